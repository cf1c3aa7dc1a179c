"""TRL's DPOTrainer behind DPTrainerMixin: the losses of each pair by itself, and what is no pair's own, by name.

TRL prepares the data and the reference, and evaluates. Where it computes the reference's log-probabilities beforehand,
each is made of its own pair and of a model that is public, or was released, so they are a part of the pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.data.pairs import both, rows_of_pairs
from hf_dp.errors import ConfigurationError, PreflightError
from hf_dp.losses import PREFERENCE_LOSSES, Preferences, Shape, log_probabilities
from hf_dp.per_example.checks.independence import in_mode
from hf_dp.per_example.checks.state import put_back
from hf_dp.per_example.precision import computed_in
from hf_dp.training.behind.pairs import Pairs
from hf_dp.training.behind.trl import Conflicts

_SORTS = "it sorts all pairs of a batch and compares them in that order, so one pair would change the gradients of all."
_NOT_COMPUTED = "the private step does not compute it, so it would be trained for another loss."
# What is no input of the model.
_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
_OTHERS = {"completion_mask", *_REFERENCE}
# Of a log-probability, relative to it, alone and in a batch.
_SAME, _SAME_IN_BF16 = 1e-4, 5e-2
# Losses of a batch: why none of its pairs has one of its own.
_OF_BATCHES = {"aot": _SORTS, "aot_unpaired": _SORTS}
_OWN = "override compute_per_example_loss(model, inputs) to return that loss of each pair."


class Dpo(Pairs):
    """Of DPOTrainer."""

    name = "DPOTrainer"

    @contextmanager
    def making(self, model: Any = None, *others: Any, **options: Any) -> Iterator[None]:
        with super().making(model, *others, **options):
            try:
                yield
            except OSError as error:
                if getattr(getattr(model, "config", None), "_name_or_path", None) != "":
                    raise
                raise ConfigurationError(
                    "DPOTrainer with a model that was read from nowhere (made from a config, say), without ref_model.",
                    why="the reference is the model before training, which TRL reads from where the model was read.",
                    fix="give ref_model=copy.deepcopy(model), or adapters (peft_config=LoraConfig(...)), beside which "
                    "the model is its own reference, as with DPOConfig(precompute_ref_log_probs=True).",
                ) from error

    def beside(self) -> Sequence[nn.Module]:
        return () if self.trainer.ref_model is None else (self.trainer.ref_model,)

    def refuse(self, own_loss: bool) -> None:
        super().refuse(own_loss)
        if self.trainer.args.precompute_ref_log_probs:
            # TRL does it next, without a look at the mode: masks of dropout follow from a public seed, and from how
            # wide the pairs before are.
            self.trainer.model.eval()

    def losses(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        with self.known_parts():
            shape = Shape(self.trainer.beta, self.trainer.label_smoothing, self.trainer.args.discopop_tau)
            weights = list(zip(self.trainer.loss_types, self.trainer.loss_weights, strict=True))
        rows = rows_of_pairs(batch)
        answers = rows["completion_mask"]
        inputs = {name: value for name, value in rows.items() if name not in _OTHERS}
        chosen, rejected = both(log_probabilities(model, inputs, answers))
        predicted, _ = both(answers[:, 1:].sum(1))
        ratios = chosen - batch["ref_chosen_logps"], rejected - batch["ref_rejected_logps"]
        pairs = Preferences(*ratios, chosen / predicted.clamp_min(1), *both(answers.sum(1)))
        return torch.stack([weight * PREFERENCE_LOSSES[name](pairs, shape) for name, weight in weights]).sum(0)

    def prepared(self, model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the reference's log-probabilities, where the rows do not bring them."""
        with self.known_parts():
            if self.trainer.precompute_ref_logps:
                return batch
        return {**batch, **self._reference(model, batch)}

    def check_losses(self, model: nn.Module, batch: Mapping[str, Any], alone: Iterable[Mapping[str, Any]]) -> None:
        for reference in self.beside():
            if reference.training and self.trainer.precompute_ref_logps:
                raise ConfigurationError(
                    "precompute_ref_log_probs=True, by a ref_model in training mode.",
                    why="masks of its dropout follow from a public seed, and from how wide the pairs before were, so "
                    "one pair would change the gradients of others.",
                    fix="call ref_model.eval() before.",
                )
            reference.eval()
        super().check_losses(model, batch, alone)
        # What is computed in each step is checked with it. Without an adapter or a model of its own the reference is
        # the model before the first step, which is checked too.
        has_its_own = self.trainer.ref_model is not None or hasattr(model, "peft_config")
        if not (self.trainer.precompute_ref_logps and has_its_own):
            return
        for pair in alone:
            for name, value in self._reference(model, pair).items():
                found, expected = float(pair[name]), float(value)
                if not abs(found - expected) <= self._tolerance * max(1.0, abs(expected)):
                    raise PreflightError(
                        f"{name} of a pair is {found:.6g}; the reference gives {expected:.6g} for the pair by itself.",
                        why="what the reference made of one pair depends on those that were beside it, so one pair "
                        "would change the gradients of others, beyond what clipping bounds.",
                        fix="pad on the right with an attention mask, and give a reference that sees each row alone.",
                    )

    @property
    def _tolerance(self) -> float:
        models = self.trainer.model, *self.beside()
        is_rounded = self.trainer.args.bf16 or any(model.dtype == torch.bfloat16 for model in models)
        return _SAME_IN_BF16 if is_rounded else _SAME

    def conflicts(self, own_loss: bool) -> Conflicts:
        yield from super().conflicts(own_loss)
        args = self.trainer.args
        if args.sync_ref_model:
            yield (
                "sync_ref_model=True.",
                "the reference that moves is in no checkpoint, so a resumed training would be one for another loss.",
                "leave it out; the reference is then the model as it was before training.",
            )
        together = args.precompute_ref_batch_size or args.per_device_train_batch_size
        if self.trainer.privacy.equal_widths and args.precompute_ref_log_probs and together > 1:
            yield (
                f"equal_widths=True with references that TRL computes beforehand, {together} pairs at a time.",
                "it computes pairs of all widths together, so what the reference makes of one follows by rounding from "
                "those beside it, which equal widths are to prevent.",
                "leave precompute_ref_log_probs out (with adapters or a ref_model); or set precompute_ref_batch_size=1 "
                "and have what TRL has kept of the same rows computed again (train_dataset.cleanup_cache_files()).",
            )
        if own_loss:
            return
        for name in args.loss_type:
            if name not in PREFERENCE_LOSSES:
                known = ", ".join(PREFERENCE_LOSSES)
                yield f"loss_type={name!r}.", _OF_BATCHES.get(name, _NOT_COMPUTED), f"choose one of {known}; or {_OWN}"
        if args.f_divergence_type != "reverse_kl":
            yield f"f_divergence_type={str(args.f_divergence_type)!r}.", _NOT_COMPUTED, f"leave it out, or {_OWN}"
        if args.ld_alpha is not None:
            yield f"ld_alpha={args.ld_alpha}.", _NOT_COMPUTED, f"leave it out, or {_OWN}"
        if args.use_weighting:
            yield "use_weighting=True.", _NOT_COMPUTED, f"leave it out, or {_OWN}"

    def _reference(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """(B,) each: log-probabilities of the chosen and the rejected answers under the reference."""
        # PEFT switches adapters, and with them what is trained.
        with self.known_parts():
            reference, compute = self.trainer.ref_model or model, self.trainer.compute_ref_log_probs
        rows = rows_of_pairs(batch, firsts_first=True)
        # A model of its own computes in no fewer bits than the checks do.
        lifted = nullcontext(rows) if reference is model else computed_in(reference, rows, torch.float32)
        # In training mode it may draw a coin for all pairs of a micro-batch, which no check of the losses sees.
        with put_back(model), in_mode(reference, training=False), lifted as rows:
            found = compute(reference, rows)
        return dict(zip(_REFERENCE, found, strict=True))
