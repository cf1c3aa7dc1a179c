"""Re-Attention in a private training: what its errors are, from the plan, at each step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.accounting import Ledger
from hf_dp.config import ReAttentionConfig
from hf_dp.errors import ConfigurationError
from hf_dp.frequencies import release_token_frequencies
from hf_dp.plan import Plan
from hf_dp.re_attention import FILE, FREQUENCIES, ReAttention, read
from hf_dp.re_attention.errors import accumulate_, one_step, relative_counts, zeros


class AttentionNoise:
    """Keeps the Re-Attention of one model in step with its private training.

    Args:
        model: gets the corrected attention.
        config: what the user chose.
        plan: of the run.
        ledger: charged for token frequencies where they are released.
        examples: the token ids of each training example, read only for a release.
        checkpoint: a directory to continue from.

    Raises:
        ConfigurationError: unreadable public frequencies, or a checkpoint without Re-Attention.
        UnsupportedModelError: a model whose attention cannot be corrected.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ReAttentionConfig,
        plan: Plan,
        ledger: Ledger,
        examples: Iterable[Tensor],
        checkpoint: Path | None = None,
    ) -> None:
        self._model, self._config, self._plan = model, config, plan
        self.attention = ReAttention(model, config)
        saved = None if checkpoint is None else read(checkpoint / FILE)[1]
        self.frequencies = None if saved is None else saved.pop(FREQUENCIES, None)
        if saved is None and config.token_frequencies != "uniform":
            self.frequencies = self._public() if config.public_frequencies else self._released(ledger, examples)
        self._counts = relative_counts(model, plan.sampler.expected_batch_size, self.frequencies)
        self._deviation = plan.noise_standard_deviation / plan.sampler.expected_batch_size
        start = zeros(self._counts) if config.error == "accumulated" else one_step(self._counts, self._deviation)
        if saved is not None:
            start = {name: saved[name].to(error.device) if name in saved else error for name, error in start.items()}
        self.attention.errors = start if self._deviation else {}

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds the noise of the step that was taken."""
        if self._config.error == "accumulated" and self._deviation:
            accumulate_(self.attention.errors, self._model, optimizer, self._counts, self._deviation)

    def save(self, directory: str | Path) -> None:
        """Writes errors and frequencies beside the weights."""
        self.attention.save(directory, {} if self.frequencies is None else {FREQUENCIES: self.frequencies})

    def _released(self, ledger: Ledger, examples: Iterable[Tensor]) -> Tensor:
        size = self._vocabulary_size()
        return release_token_frequencies(examples, size, self._config.presence_clipping_norm, self._plan, ledger)

    def _public(self) -> Tensor:
        path, size = Path(str(self._config.public_frequencies)), self._vocabulary_size()
        try:
            shares = torch.tensor(json.loads(path.read_text(encoding="utf-8")), dtype=torch.float32)
            if shares.shape != (size,) or not bool(((shares >= 0) & (shares <= 1)).all()):
                raise ValueError(f"{tuple(shares.shape)} numbers for {size} tokens, or a number outside [0, 1]")
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"public_frequencies={str(path)!r} ({error}).",
                why="the noise of each row of the embedding follows from how often it is touched.",
                fix=f"give a JSON file with a list of {size} numbers in [0, 1].",
            ) from error
        return shares

    def _vocabulary_size(self) -> int:
        base: Any = self._model
        if callable(unwrap := getattr(self._model, "get_base_model", None)):
            base = unwrap()
        try:
            return int(base.get_input_embeddings().weight.shape[0])
        except (AttributeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"{type(base).__name__} has no token embedding.",
                why="there are no token frequencies to release or to read.",
                fix="use ReAttentionConfig(token_frequencies='uniform').",
            ) from error
