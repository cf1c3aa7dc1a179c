"""What the user promises: `PrivacyConfig`, frozen and serialisable. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import PurePath
from typing import Any, Never

from hf_dp.config.after import check_after, names_of, one_or_several
from hf_dp.config.clipping import ClippingName, as_groups, check_clipping
from hf_dp.config.computed import NoiseName, check_equal_widths, check_noise, check_passes
from hf_dp.config.fields import AccountantName, Fields
from hf_dp.config.names import refuse_unknown
from hf_dp.config.output_bias import OutputBiasConfig
from hf_dp.config.parts import PARTS, check_parts
from hf_dp.config.plain import values_or_error
from hf_dp.config.ranges import check_seed, check_target_delta, is_one_of, shown
from hf_dp.config.re_attention import ReAttentionConfig
from hf_dp.config.sampling import check_sampling
from hf_dp.config.secret import check_secret
from hf_dp.config.sparse_embeddings import SparseEmbeddingConfig
from hf_dp.config.target import AT_FPR, already_told, check_target, warn_of_no_noise
from hf_dp.config.units import UnitSamplingName, check_unit
from hf_dp.errors import ConfigurationError
from hf_dp.launched import say_once

# What ledgers leave out, as those did that were made before it could be chosen.
PLAIN = {
    "re_attention": None,
    "sparse_embeddings": None,
    "output_bias": None,
    "clipping": "flat",
    "noise": "gaussian",
    "sampling_probability": None,
    "max_batch_size": None,
    "unit": None,
    "max_examples_per_unit": None,
    "unit_sampling": "units",
    "target_tpr": None,
    "at_fpr": AT_FPR,
    "dataset_size": None,
    "after": None,
    "other_people": False,
    "passes": 1,
    "groups": None,
    "equal_widths": False,
}


class PrivacyConfig(Fields):
    """The promise of a private training run.

    Exactly one of `target_epsilon`, `target_tpr` and `noise_multiplier` is given. In neighbouring datasets one of n
    training examples is replaced by nothing (zero-out), and n is public; with a `sampling_probability` of your own one
    example is added or removed, and n is secret. Batches are Poisson-sampled, and noise is Gaussian (DP-SGD; Abadi et
    al. 2016, arXiv:1607.00133, algorithm 1).

    Attributes:
        target_epsilon: the budget epsilon > 0; the noise multiplier is calibrated to it.
        noise_multiplier: standard deviation of the noise on the sum, in units of the clipping norm. 0 adds no noise:
            it is allowed for debugging, warns, and reports an infinite epsilon.
        target_tpr, at_fpr: the budget in the language of attacks: who sees all that was released, and wrongly takes at
            most `at_fpr` of the examples that were not used for used ones, finds at most `target_tpr` of those that
            were. The noise multiplier is calibrated to it. Needs accountant="pld".
        target_delta: delta, strictly between 0 and 1/n. None: n ** -1.1 for n training examples.
        clipping_norm: l2 norm C > 0 to which each example's gradient is clipped. `math.inf` (no clipping) is
            allowed only with `noise_multiplier=0`.
        clipping: "flat" cuts longer gradients to norm C and leaves shorter ones; "automatic" scales every gradient g by
            C / (|g| + 0.01), below C (Bu et al. 2022, arXiv:2206.07136), which leaves only the learning rate to choose;
            "groups" cuts what it has in each of several `groups` of parameters, for the memory of an ordinary step.
        noise: what makes it, Gaussian always: "gaussian", a fast statistical generator; "chacha20", a cipher (`pip
            install 'randomgen>=2.0,<3'`); "grid", the same, exact to the last digit, on sums rounded to these digits.
        max_batch_size: None, or the most examples that a step uses, over all processes: of a larger draw so many are
            kept, chosen at random (Ganesh 2025, arXiv:2508.15089). Not below the expected batch size, which sums are
            divided by all the same; five times its square root above, it costs next to nothing. Needs
            dp-accounting 0.6, and accountant="pld".
        accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi, an upper bound).
        withhold_non_private_logs: keep training loss and clipping statistics, which are functions of the
            private data with no noise, out of the logs and the trainer state.
        seed: None draws sampling and noise from the operating system's entropy. An integer makes both
            reproducible, for tests, and marks the report as not private. It is not a command-line argument:
            beside `TrainingArguments`, whose `seed` is public, one flag would set both.
        sampling_probability: None for the expected batch size divided by n, which is public. A number between 1e-12
            and 1 is what examples are drawn with whatever n is, for a claim of "add or remove one" that keeps n secret:
            `target_delta` and `max_steps` must then be given, and sums are divided by the expected batch size of the
            arguments. Choose all four without a look at n. With `unit`, units are drawn so, or their examples.
        unit: None for each training example by itself, or the column of the dataset that says whose each example is,
            such as "user", which no model sees: all examples with one value are hidden together. Batches, n, q and
            delta count units then, and a unit's gradient is the mean over its examples in the step, clipped as one.
        max_examples_per_unit: with `unit`, the most examples of one unit that a step uses; of more, so many are drawn
            at random in each step.
        unit_sampling: "units": each unit is drawn for a step with all of these, independently. "examples": of a unit
            with more, so many are chosen once; each of these is drawn and clipped by itself, batches count them, and
            what a step costs is a mixture of Gaussians. A row may then belong to several units (a list in the column),
            and whose each row is is public; neither where n is secret. Needs accountant="pld".
        dataset_size: None, or a public number that stands for what is drawn from: for n, or with
            unit_sampling="examples" for the number of examples, both secret then. The sampling probability, the default
            delta and its bound follow from this one, for the same claim. `max_steps` must be given.
        after: None, or where an earlier private training on the same people was saved (a folder, or OWNER/NAME on the
            hub; a list of several): what it spent is checked, paid first, and reported, so that the budget holds for
            all together, for whoever has at most one unit in each data set. Delta is then at most the earlier one's.
        other_people: the model was trained privately before (with `after`: besides those), and nobody in that data is
            in this one.
        passes: 1, or 2: norms and sums each by a backward pass of their own, for about the memory of an ordinary step
            and more than twice its time. No part of the promise.
        groups: with clipping="groups", weights by pattern (of `fnmatch`) of names of parameters: {"*attn*": 2, "*": 1},
            "*" for every other one. A group with weight w is clipped to C sqrt(w / sum of weights), for the same claim.
        equal_widths: only examples that are as wide by themselves, padding included, share a micro-batch. How wide an
            example is computed then follows from itself alone, and so does what rounding, in 16 bits, makes of it: see
            `docs/privacy.md`. A collator that pads to a multiple (`pad_to_multiple_of`) gives fewer micro-batches. Each
            example is collated once more, by itself: `dataloader_num_workers` does it beside the model.
        re_attention: None for plain attention, or a `ReAttentionConfig`.
        sparse_embeddings: None for dense noise on all rows, or a `SparseEmbeddingConfig`. With AdaFEST
            `noise_multiplier` is that of both releases of a step together.
        output_bias: None, or an `OutputBiasConfig`: the output starts from released frequencies of labels.

    Raises:
        ConfigurationError: a value outside the ranges above, a name that is none of these, or more or less than one of
            what the noise follows from.
    """

    def __init__(
        self,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        target_delta: float | None = None,
        clipping_norm: float = 1.0,
        accountant: AccountantName = "pld",
        withhold_non_private_logs: bool = False,
        seed: int | None = None,
        re_attention: ReAttentionConfig | None = None,
        sparse_embeddings: SparseEmbeddingConfig | None = None,
        clipping: ClippingName = "flat",
        noise: NoiseName = "gaussian",
        sampling_probability: float | None = None,
        max_batch_size: int | None = None,
        unit: str | None = None,
        max_examples_per_unit: int | None = None,
        unit_sampling: UnitSamplingName = "units",
        target_tpr: float | None = None,
        at_fpr: float = AT_FPR,
        dataset_size: int | None = None,
        after: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        other_people: bool = False,
        output_bias: OutputBiasConfig | None = None,
        passes: int = 1,
        groups: Mapping[str, float] | tuple[tuple[str, float], ...] | None = None,
        equal_widths: bool = False,
        **unknown: Never,
    ) -> None:
        values = dict(locals())
        refuse_unknown("PrivacyConfig", unknown, self.__dataclass_fields__)
        # Every private run makes one of these before anything can be refused.
        say_once()
        for name, kind in PARTS.items():
            if isinstance(values[name], dict):
                values[name] = kind.from_dict(values[name])
        values["after"] = one_or_several(after)
        values["groups"] = as_groups(groups) or groups
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, values[item.name])
        self._check()

    def __setattr__(self, name: str, value: object) -> None:  # what `frozen` would leave to a class that inherits
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _check(self) -> None:
        if not is_one_of(self.accountant, ("pld", "rdp")):
            raise ConfigurationError(
                f"accountant={shown(self.accountant)}.",
                why="only 'pld' and 'rdp' are known, and an unknown accountant promises nothing.",
                fix="use 'pld' (tight, the default) or 'rdp'.",
            )
        check_noise(self.noise)  # first: a number given here was meant for the target
        check_target(self)
        check_passes(self.passes)
        check_equal_widths(self.equal_widths)
        check_clipping(self)
        if self.target_delta is not None:
            check_target_delta(self.target_delta)
        check_secret(self)
        check_sampling(self.max_batch_size, self.accountant)
        if not isinstance(self.withhold_non_private_logs, bool):
            raise ConfigurationError(
                f"withhold_non_private_logs={shown(self.withhold_non_private_logs)}.",
                why="it is True or False; anything else could be read as either.",
                fix="give True to keep training loss and clipping statistics out of the logs.",
            )
        check_seed(self.seed)
        check_after(self.after, self.other_people)
        check_parts(self)
        check_unit(self)
        warn_of_no_noise(self.noise_multiplier, stacklevel=4)

    @property
    def hides_n(self) -> bool:
        """n is secret: the sampling probability is given, or follows from a number in place of n."""
        return self.sampling_probability is not None or self.dataset_size is not None

    def replace(self, **changes: Any) -> PrivacyConfig:
        """A copy with some values changed (`dataclasses.replace` would drop `seed`)."""
        with already_told() if self.noise_multiplier == 0 else nullcontext():
            return PrivacyConfig(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `PrivacyConfig(**config.to_dict()) == config`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values["groups"] = None if self.groups is None else dict(self.groups)
        return {**values, **{name: values[name] and values[name].to_dict() for name in PARTS}}

    def published(self) -> dict[str, Any]:
        """`to_dict` for others: without the seed, and of files their names, not where they lie on this machine."""
        values = {name: value for name, value in self.to_dict().items() if name != "seed"}
        values["after"] = one_or_several(names_of(self.after)) if self.after is not None else None
        for part, name in (("re_attention", "public_frequencies"), ("sparse_embeddings", "public_rows")):
            if values[part] is not None and values[part][name] is not None:
                values[part][name] = PurePath(values[part][name]).name
        return values

    def to_json(self) -> str:
        """The config as strict JSON; an infinite clipping norm is written as the string "inf"."""
        values = {k: "inf" if v == math.inf else v for k, v in self.to_dict().items()}
        return json.dumps(values, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyConfig:
        """The inverse of `to_json`.

        Raises:
            ConfigurationError: text that is not a JSON object, an unknown field, or a value out of range.
        """
        values = values_or_error(text)
        known = {item.name for item in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known:
            raise ConfigurationError(
                f"this is not a PrivacyConfig in JSON: {str(values)[:200]}",
                why="an unreadable or unknown field would change the promise without notice.",
                fix=f"use only these fields: {', '.join(sorted(known))}.",
            )
        if values.get("clipping_norm") == "inf":  # a column or a folder may have that name too
            values["clipping_norm"] = math.inf
        return cls(**values)
