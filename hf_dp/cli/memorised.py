"""What `hf-dp memorisation` measures: models are loaded one after another, and read the same texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dp.accounting.risk import risk
from hf_dp.audit.members import FALSE_POSITIVE_RATES, Membership
from hf_dp.audit.memorisation import DRAWS, Memorisation, Reader
from hf_dp.audit.secrets import Secret
from hf_dp.errors import ConfigurationError
from hf_dp.figures import upper
from hf_dp.hub import RECORD_FILE, PrivacyRecord, verify
from hf_dp.places import NOT_KEPT, nowhere


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a model's record says of one unit, once it was checked as `hf-dp verify` does.

    Attributes:
        epsilon, delta: that are claimed.
        unit: whose presence is hidden.
        verified: nothing there disagrees.
        private: nor does it say itself that it is not private.
        rates: by false positive rate the largest true positive rate that this allows of one text; empty where it is not
            private, or the unit is another.
    """

    epsilon: float
    delta: float
    unit: str
    verified: bool
    private: bool
    rates: dict[float, float]

    @property
    def said(self) -> str:
        """In a few words; an epsilon only where it is one."""
        if not self.verified:
            return "does not verify"
        return f"epsilon {upper(self.epsilon, 3)}" if self.private else "not private"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; None for those of a claim that is none."""
        values = {"epsilon": self.epsilon, "delta": self.delta, "unit": self.unit}
        return {
            "said": self.said, "verified": self.verified, "private": self.private,
            **(values if self.private else dict.fromkeys(values)),
            "true_positive_rates": {f"{rate:g}": most for rate, most in self.rates.items()},
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found.

    Attributes:
        models: by folder, in the order in which they were named.
        claims: of the same; None of a model without a record.
        reference: membership by the loss of the reference alone, which should be by chance; None without one.
    """

    models: dict[str, Memorisation]
    claims: dict[str, Claim | None]
    reference: Membership | None

    @property
    def names(self) -> dict[str, str]:
        """What each model is called: the last part of its folder's name, where no two are alike."""
        last = {name: Path(name).absolute().name for name in self.models}
        return last if len(set(last.values())) == len(last) else {name: name for name in last}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        models = {}
        for name, found in self.models.items():
            claim = self.claims[name]
            models[name] = {"claim": None if claim is None else claim.to_dict(), **found.to_dict()}
        return {"draws": DRAWS, "models": models, "reference": self.reference and self.reference.to_dict()}


def measured(
    models: Sequence[str], reference: str | None, members: Sequence[str], others: Sequence[str],
    secrets: Sequence[Secret], *, longest: int, confidence: float,
) -> Measured:  # fmt: skip
    """Each model attacked in turn, the reference first.

    Raises:
        ConfigurationError: a folder without a causal language model, or texts from which nothing could follow.
        LedgerError: a record that cannot be read.
    """
    reader = Reader(members, others, secrets, longest=longest, confidence=confidence)
    claims = {name: _claim(Path(name)) for name in models}
    losses = None if reference is None else reader.losses(*loaded(reference))
    found = {name: reader.memorisation(*loaded(name), losses) for name in models}
    return Measured(
        models=found, claims=claims, reference=None if losses is None else reader.of_losses(*losses)
    )  # fmt: skip


def _claim(folder: Path) -> Claim | None:
    if not (folder / RECORD_FILE).is_file():
        return None
    record = PrivacyRecord.from_json((folder / RECORD_FILE).read_bytes())
    report, found = record.report, verify(folder)
    is_of_texts = found.private and record.config.unit is None
    most = risk(record.ledger.event, FALSE_POSITIVE_RATES).true_positive_rates if is_of_texts else {}
    return Claim(
        epsilon=report.epsilon, delta=report.delta, unit=report.unit, verified=found.consistent, private=found.private,
        rates=most,
    )  # fmt: skip


def loaded(folder: str) -> tuple[Any, Any]:
    """The causal language model in a folder, in the precision in which it lies there, and its tokenizer.

    Raises:
        ConfigurationError: there is none, but another kind of model, or one whose weights are not all and only those of
            its configuration.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        made: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        found = f"no causal language model can be loaded from {folder!r} ({said})"
        raise ConfigurationError(
            f"{nowhere(folder, NOT_KEPT) if isinstance(error, OSError) and not os.path.exists(folder) else found}.",
            why="its losses are what is attacked.",
            fix="give a folder that save_pretrained wrote, with its tokenizer; of other models give the losses to "
            "hf_dp.audit.membership.",
        ) from error
    model, told = made
    adapters = [config.task_type for config in getattr(model, "peft_config", {}).values()]
    kinds = [kind for kind in (*(model.config.architectures or ()), *adapters) if kind is not None]
    reshaped = [name for name, *_ in told["mismatched_keys"]]
    more = told["unexpected_keys"]
    lists = {"lacks": told["missing_keys"], "has other shapes of": reshaped, "has no place for": more}
    wrong = [f"{what} {len(names)} weights such as {min(names)}" for what, names in lists.items() if names]
    if not set(kinds) <= {type(model).__name__, "CAUSAL_LM"}:
        wrong = [f"holds {' and '.join(kinds)}"]
    if wrong:
        found = " and ".join(wrong)
        raise ConfigurationError(
            f"{folder!r} {found}, and would be read as {type(model).__name__}.",
            why="the report would be of another model.",
            fix="give a causal language model, as save_pretrained wrote it; of other models give the losses to "
            "hf_dp.audit.membership.",
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
