"""Re-Attention in a private training: what its errors are, from the plan, at each step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig, ReAttentionConfig
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.parts.embeddings import token_tables
from hf_dp.parts.re_attention import FILE, FREQUENCIES, ReAttention, read
from hf_dp.parts.re_attention.corrections import Corrections
from hf_dp.parts.re_attention.deviations import accumulate_, one_step, relative_counts, zeros
from hf_dp.parts.token_frequencies import public_token_frequencies, release_token_frequencies
from hf_dp.step.plan import Plan

logger = logging.getLogger(__name__)
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# In nats. Rounded to float32, larger ones differ with the padding by more than a few 1e-4 of the attention.
_LARGEST = 1e4
# Where the paper's error has helped it was below what an optimizer's step put in; where it harmed, 100 times that.
_FAR = 10


class AttentionNoise:
    """Keeps the Re-Attention of one model in step with its private training.

    From the beginning the attention is corrected, for noise that is the same in all rows; `begin` gives it its own.

    Args:
        model: gets the corrected attention.
        config: what the user chose.
        plan: of the run.
        optimizer: of the run.
        tokenizer: of the model, to read public texts.

    Raises:
        ConfigurationError: an optimizer whose noise is not known.
        UnsupportedModelError: a model whose attention cannot be corrected.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ReAttentionConfig,
        plan: Plan,
        optimizer: torch.optim.Optimizer | None,
        tokenizer: Any = None,
    ) -> None:
        self._model, self._config, self._plan, self._tokenizer = model, config, plan, tokenizer
        self.frequencies: Tensor | None = None
        self._compared = False
        self._deviation = plan.noise_standard_deviation / plan.sampler.expected_batch_size
        inner = getattr(optimizer, "optimizer", optimizer)
        if config.error == "accumulated" and not isinstance(inner, _KNOWN):
            raise ConfigurationError(
                f"Re-Attention with error='accumulated' and the optimizer {type(inner).__name__}.",
                why="how much noise its steps put into the parameters is not known.",
                fix="use AdamW or SGD (optim='adamw_torch'), or ReAttentionConfig(error='paper').",
            )
        self.attention = ReAttention(model, config)
        self._counts = self._counted()
        self.attention.errors = one_step(self._counts, self._deviation) if self._deviation else {}

    def begin(
        self, ledger: Ledger, examples: Iterable[Tensor], checkpoint: Path | None, earlier: AttentionNoise | None
    ) -> None:
        """Gives each parameter its own noise, from token frequencies.

        Args:
            ledger: charged for the frequencies where they are released now.
            examples: the token ids of each training example, read only for a release.
            checkpoint: a directory to continue from.
            earlier: of a training of this model before: what was released is not released again, and noise adds up.

        Raises:
            ConfigurationError: unreadable public frequencies, a checkpoint without the Re-Attention of this model, or
                corrections that were too large in the check before the first step.
            LedgerError: a checkpoint with another release than this process has made.
        """
        config = self._config
        if config.error == "paper":
            # The check has seen them with the noise of dense parameters, and rare rows will have more.
            self._refuse_large("Nothing was spent.")
        saved = None if checkpoint is None else read(checkpoint / FILE)[1]
        if saved is not None:
            self.frequencies = saved.pop(FREQUENCIES, None)
            self._refuse_second_release(earlier)
        elif config.token_frequencies == "public":
            path = Path(str(config.public_frequencies))
            self.frequencies = public_token_frequencies(path, self._vocabulary_size(), self._tokenizer)
        elif config.token_frequencies == "released":
            known = None if earlier is None else earlier.frequencies
            self.frequencies = self._released(ledger, examples) if known is None else known
        self._counts = self._counted()
        start = zeros(self._counts) if config.error == "accumulated" else one_step(self._counts, self._deviation)
        start = start if self._deviation else {}
        if saved is not None and {n: e.shape for n, e in saved.items()} != {n: e.shape for n, e in start.items()}:
            raise ConfigurationError(
                f"{str(checkpoint)!r} has the noise of other parameters than the {len(start)} that are trained.",
                why="the correction would leave out noise that the keys have.",
                fix="resume with the same model and the same parameters trained, or from another checkpoint.",
            )
        if saved is None and earlier is not None and config.error == "accumulated":
            saved = {**start, **earlier.attention.errors}
        self.attention.errors = {n: e if saved is None else saved[n].to(e.device) for n, e in start.items()}
        # What the check before the first step has seen is no part of the training.
        self.attention.corrections = Corrections()

    def _refuse_second_release(self, earlier: AttentionNoise | None) -> None:
        known = None if earlier is None else earlier.frequencies
        if known is not None and (self.frequencies is None or not torch.equal(known, self.frequencies)):
            raise LedgerError(
                "the checkpoint holds other token frequencies than were released in this process.",
                why="its ledger does not count that release.",
                fix="resume from a checkpoint of this run, or in a new process if nothing of this one was seen.",
            )

    def _counted(self) -> dict[str, Tensor]:
        return relative_counts(self._model, self._plan.sampler.expected_batch_size, self.frequencies)

    def after_private_step(self) -> None:
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
        groups = optimizer.param_groups
        warming_up = any(group["lr"] < 0.9 * group.get("initial_lr", group["lr"]) for group in groups)
        if warming_up or not isinstance(getattr(optimizer, "optimizer", optimizer), _KNOWN):
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

    def load(self, checkpoint: Path) -> None:
        """Goes back to the noise that an earlier model of this training has."""
        saved = read(checkpoint / FILE)[1]
        self.attention.errors = {n: saved[n].to(e.device) for n, e in self.attention.errors.items()}

    def save(self, directory: str | Path) -> None:
        """Writes errors and frequencies beside the weights."""
        self.attention.save(directory, {} if self.frequencies is None else {FREQUENCIES: self.frequencies})

    def _released(self, ledger: Ledger, examples: Iterable[Tensor]) -> Tensor:
        size = self._vocabulary_size()
        return release_token_frequencies(examples, size, self._config.presence_clipping_norm, self._plan, ledger)

    def _refuse_large(self, spent: str) -> None:
        for name, correction in self.attention.corrections.take_largest().items():
            if not correction <= _LARGEST:
                raise ConfigurationError(
                    f"Re-Attention corrects the scores of {name} of an example by {correction:.3g} on average.",
                    why="of such numbers rounding leaves so little that an example's gradient depends on the padding "
                    "that its neighbours give it, and clipping would not bound what one example adds.",
                    fix="give ReAttentionConfig a smaller scale or error='accumulated', or train with less noise: a "
                    f"larger batch has less of it. {spent}",
                )

    def _vocabulary_size(self) -> int:
        sizes = {len(table) for table in token_tables(self._model)}
        if len(sizes) != 1:
            raise ConfigurationError(
                f"trained token embeddings of {sorted(sizes) or 'no'} rows.",
                why="one table of token frequencies is needed for all of them.",
                fix="use ReAttentionConfig(token_frequencies='uniform').",
            )
        return sizes.pop()


def token_ids(loader: Any, model: nn.Module) -> Iterator[Tensor]:
    """The token ids of each training example, without padding; what a decoder reads too.

    Args:
        loader: the training loader, with its dataset and its `LogicalBatchCollator`.
        model: whose config says whether there is a decoder, and what it begins with.

    Raises:
        ConfigurationError: batches without `input_ids`.
    """
    config = getattr(model, "config", None)
    has_decoder = getattr(config, "is_encoder_decoder", False)
    start = getattr(config, "decoder_start_token_id", None) if has_decoder else None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    # Without a head for tokens, labels are classes or numbers, and the decoder reads the text once more.
    read = ("decoder_input_ids",) if head is None else ("labels", "decoder_input_ids")
    for index in range(len(loader.dataset)):
        # Under a public seed one example more would change the random masks of all that follow.
        with loader.collate_fn.randomness():
            batch = loader.collate_fn.collated([loader.dataset[index]])
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor):
            raise ConfigurationError(
                "Re-Attention with released token frequencies, and no input_ids in the batches.",
                why="there are no tokens to count.",
                fix="use ReAttentionConfig(token_frequencies='uniform').",
            )
        mask = batch.get("attention_mask")
        seen = [ids if mask is None or mask.shape != ids.shape else ids[mask.bool()]]
        if has_decoder:
            seen += [v for name in read if isinstance(v := batch.get(name), Tensor)]
        if start is not None and "decoder_input_ids" not in batch:
            seen.append(torch.tensor([start], device=ids.device))
        yield torch.cat([part.flatten() for part in seen])


def without_idle_release(privacy: PrivacyConfig, model: nn.Module) -> PrivacyConfig:
    """The promise, without a release of token frequencies that nothing would use."""
    attention = privacy.re_attention
    if attention is None or attention.token_frequencies != "released" or token_tables(model):
        return privacy
    ranks.warn(logger, "No token embedding is trained: token frequencies are not released, and cost nothing.")
    return privacy.replace(re_attention={**attention.to_dict(), "token_frequencies": "uniform"})
