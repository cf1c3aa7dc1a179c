"""Re-Attention in a private training: what its errors are, from the plan, at each step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.config import ReAttentionConfig
from hf_dp.errors import ConfigurationError
from hf_dp.parts.embeddings import token_tables
from hf_dp.parts.part import Logs, Part, Run, Setting
from hf_dp.parts.re_attention import FILE, FREQUENCIES, ReAttention, read, remove_re_attention
from hf_dp.parts.re_attention.corrections import Corrections
from hf_dp.parts.re_attention.deviations import accumulate_, one_step, relative_counts, zeros
from hf_dp.parts.token_frequencies import known_frequencies
from hf_dp.step.written import plain_optimizer

logger = logging.getLogger(__name__)
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# In nats. Rounded to float32, larger ones differ with the padding by more than a few 1e-4 of the attention.
_LARGEST = 1e4
# Where the paper's error has helped it was below what an optimizer's step put in; where it harmed, 100 times that.
_FAR = 10


class AttentionNoise(Part):
    """Keeps the Re-Attention of one model in step with its private training.

    From its installation on the attention is corrected, for noise that is the same in all rows; `begin` gives each
    parameter its own, from token frequencies.

    Attributes:
        attention: the correction on the model.
    """

    name = "re_attention"
    attention: ReAttention

    def __init__(self, config: ReAttentionConfig) -> None:
        self._config = config
        self._frequencies: Tensor | None = None
        self._compared = False

    def refuse(self, setting: Setting) -> None:
        """FSDP2, and embeddings with sparse gradients."""
        if setting.is_sharded:
            raise ConfigurationError(
                "Re-Attention with FSDP2.",
                why="the noise of each row of a parameter is followed through the whole parameter, which is in shards.",
                fix="train under DDP, or without re_attention.",
            )
        if setting.config.sparse_embeddings is not None:
            raise ConfigurationError(
                "re_attention together with sparse_embeddings.",
                why="Re-Attention corrects for noise in all rows of the embedding, and here only a few have any.",
                fix="use one of the two.",
            )

    def install(self, run: Run) -> None:
        """Corrects the attention of the model.

        Raises:
            ConfigurationError: an optimizer whose noise is not known.
            UnsupportedModelError: a model whose attention cannot be corrected.
        """
        plan, inner = run.plan, plain_optimizer(run.optimizer)
        self._model, self._expected_batch_size = run.model, plan.sampler.expected_batch_size
        self._deviation = plan.noise_standard_deviation / self._expected_batch_size
        if self._config.error == "accumulated" and not isinstance(inner, _KNOWN):
            raise ConfigurationError(
                f"Re-Attention with error='accumulated' and the optimizer {type(inner).__name__}.",
                why="how much noise its steps put into the parameters is not known.",
                fix="use AdamW or SGD (optim='adamw_torch'), or ReAttentionConfig(error='paper').",
            )
        self.attention = ReAttention(self._model, self._config)
        self._counts = self._counted()
        self.attention.errors = one_step(self._counts, self._deviation) if self._deviation else {}

    def checked(self, run: Run) -> None:
        """Refuses corrections that were too large in the check (`ConfigurationError`)."""
        if self._config.error == "paper":
            # The check has seen them with the noise of dense parameters, and rare rows will have more. It has put rows
            # without numbers beside others, too, where an input has room for them, as pictures have.
            self._refuse_large("Nothing was spent.", of_numbers=True)

    def begin(self, run: Run, checkpoint: Path | None, earlier: Self | None) -> None:
        """Gives each parameter its own noise. In a second training of a model that of the first is still there.

        Raises:
            ConfigurationError: a checkpoint without the Re-Attention of this model.
        """
        saved = None if checkpoint is None else read(checkpoint / FILE)[1]
        if saved is not None:
            saved.pop(FREQUENCIES, None)
        self._frequencies = known_frequencies(run)
        self._counts = self._counted()
        is_accumulated = self._config.error == "accumulated"
        start = zeros(self._counts) if is_accumulated else one_step(self._counts, self._deviation)
        start = start if self._deviation else {}
        if saved is not None and {n: e.shape for n, e in saved.items()} != {n: e.shape for n, e in start.items()}:
            raise ConfigurationError(
                f"{str(checkpoint)!r} has the noise of other parameters than the {len(start)} that are trained.",
                why="the correction would leave out noise that the keys have.",
                fix="resume with the same model and the same parameters trained, or from another checkpoint.",
            )
        if saved is None and earlier is not None and is_accumulated:
            saved = {**start, **earlier.attention.errors}
        self.attention.errors = {n: e if saved is None else saved[n].to(e.device) for n, e in start.items()}
        # What the check before the first step has seen is no part of the training.
        self.attention.corrections = Corrections()

    def _counted(self) -> dict[str, Tensor]:
        return relative_counts(self._model, self._expected_batch_size, self._frequencies)

    def after_step(self) -> None:
        """Looks at the corrections of the passes that made the latest gradients.

        Raises:
            ConfigurationError: corrections so large that rounding lets padding into the gradients.
        """
        self._refuse_large("The step that showed it stays in the ledger, and moved nothing.")

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds the noise of the step that was taken."""
        if self._config.error == "accumulated" and self._deviation:
            accumulate_(self.attention.errors, self._model, optimizer, self._counts, self._deviation)
        elif self._deviation and not self._compared:
            self._compare_with_a_step(optimizer)

    def _compare_with_a_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(plain_optimizer(optimizer), _KNOWN):  # others need have no rate
            return
        if any(group["lr"] < 0.9 * group.get("initial_lr", group["lr"]) for group in optimizer.param_groups):
            return
        self._compared = True
        tables = {id(table) for table in token_tables(self._model)}
        names = [name for name, p in self._model.named_parameters() if id(p) in tables]
        put_in = {name: torch.zeros_like(self.attention.errors[name]) for name in names}
        accumulate_(put_in, self._model, optimizer, self._counts, self._deviation)
        counted = {name: self._config.scale * self.attention.errors[name] for name in names}
        times = max((float((counted[name] / put_in[name]).median()) for name in names), default=0.0)
        if times > _FAR:
            ranks.warn(
                logger,
                "Re-Attention with error='paper': it counts rows of the token embedding as having %.3g times the noise "
                "that a step of this optimizer puts into them, and attention leaves out rare tokens whose embeddings "
                "are as good as before. A pretrained model trained so has lost accuracy (docs/re_attention.md): use "
                "ReAttentionConfig(error='accumulated') there.",
                times,
            )

    def logs(self) -> Logs:
        """By how much each layer was corrected, on average."""
        return Logs(exact=self.attention.corrections.take_means())

    def load(self, checkpoint: Path) -> None:
        """Goes back to the noise that an earlier model of this training has."""
        saved = read(checkpoint / FILE)[1]
        self.attention.errors = {n: saved[n].to(e.device) for n, e in self.attention.errors.items()}

    def save(self, directory: Path) -> None:
        """Writes errors and frequencies beside the weights.

        Raises:
            ConfigurationError: a model whose adapters were merged: of what they became no noise is known.
        """
        self._refuse_merged()
        self.attention.save(directory, {} if self._frequencies is None else {FREQUENCIES: self._frequencies})

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        """Plain attention again."""
        remove_re_attention(model)

    def _refuse_merged(self) -> None:
        known = dict(self._model.named_parameters())
        for name, error in self.attention.errors.items():
            if name in known and (not error.dim() or len(error) == len(known[name])):
                continue
            raise ConfigurationError(
                f"a model that was trained with Re-Attention is saved, and {name}, whose noise is known, is gone (its "
                "adapter was merged into the model) or of another size.",
                why="the card says that the correction can be put back on what is saved; on this one it cannot.",
                fix="save before merge_and_unload(): the adapter with its Re-Attention, of which whoever loads it may "
                "make a merged model, with plain attention. What is gone here is in the latest checkpoint.",
            )

    def _refuse_large(self, spent: str, *, of_numbers: bool = False) -> None:
        for name, correction in self.attention.corrections.take_largest(of_numbers=of_numbers).items():
            if not correction <= _LARGEST:
                raise ConfigurationError(
                    f"Re-Attention corrects the scores of {name} of an example by {correction:.3g} on average.",
                    why="of such numbers rounding leaves so little that an example's gradient depends on the padding "
                    "that its neighbours give it, and clipping would not bound what one example adds.",
                    fix="give ReAttentionConfig a smaller scale or error='accumulated', or train with less noise: a "
                    f"larger batch has less of it. {spent}",
                )
