"""How often each token is seen: one private release of the presence histogram, or public knowledge."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig, ReAttentionConfig
from hf_dp.config.asked import TOKEN_PRESENCE
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.losses.kinds import has_decoder
from hf_dp.parts.embeddings import token_tables
from hf_dp.parts.part import Part, Run
from hf_dp.parts.re_attention import FILE, FREQUENCIES, read
from hf_dp.step.plan import Plan

logger = logging.getLogger(__name__)
LABEL = TOKEN_PRESENCE
# Seeded noise differs from that of every training step.
_STEP = -1
# In standard deviations of the noise.
_STANDS_OUT = 3.0


class TokenFrequencies(Part):
    """One release, or one file, for all parts that read it.

    What was released is kept in the file of the part that asked for it.

    Attributes:
        shares: (V,) of the examples that contain each token; None before `begin`.
    """

    name = "token_frequencies"

    def __init__(self, config: ReAttentionConfig) -> None:
        self._config = config
        self.shares: Tensor | None = None

    @classmethod
    def of(cls, config: PrivacyConfig) -> Self | None:
        """Asked for by Re-Attention."""
        asks = config.re_attention
        return None if asks is None or asks.token_frequencies == "uniform" else cls(asks)

    def settled(self, config: PrivacyConfig, model: nn.Module) -> PrivacyConfig:
        """Without a release that nothing would use."""
        if self._config.token_frequencies != "released" or token_tables(model):
            return config
        ranks.warn(logger, "No token embedding is trained: token frequencies are not released, and cost nothing.")
        return config.replace(re_attention={**self._config.to_dict(), "token_frequencies": "uniform"})

    def begin(self, run: Run, checkpoint: Path | None, earlier: Self | None) -> None:
        """Reads or releases them.

        Raises:
            ConfigurationError: unreadable public frequencies, token ids that the model cannot embed, or a checkpoint
                without the file that they are kept in.
            LedgerError: a checkpoint with another release than this process has made.
        """
        known = None if earlier is None else earlier.shares
        if checkpoint is not None:
            self.shares = read(checkpoint / FILE)[1].get(FREQUENCIES)
            self._refuse_second_release(known)
        elif self._config.token_frequencies == "public":
            path = Path(str(self._config.public_frequencies))
            self.shares = public_token_frequencies(path, _vocabulary_size(run.model), run.tokenizer)
        else:
            self.shares = self._released(run) if known is None else known

    def _released(self, run: Run) -> Tensor:
        examples, size = token_ids(run.loader, run.model), _vocabulary_size(run.model)
        return release_token_frequencies(examples, size, self._config.presence_clipping_norm, run.plan, run.ledger)

    def _refuse_second_release(self, known: Tensor | None) -> None:
        if known is not None and (self.shares is None or not torch.equal(known, self.shares)):
            raise LedgerError(
                "the checkpoint holds other token frequencies than were released in this process.",
                why="its ledger does not count that release.",
                fix="resume from a checkpoint of this run, or in a new process if nothing of this one was seen.",
            )


def known_frequencies(run: Run) -> Tensor | None:
    """(V,) what this training knows of them; None where nothing asked for them."""
    part = run.parts.get(TokenFrequencies.name)
    return part.shares if isinstance(part, TokenFrequencies) else None


def release_token_frequencies(
    examples: Iterable[Tensor],
    vocabulary_size: int,
    clipping_norm: float,
    plan: Plan,
    ledger: Ledger,
    label: str = LABEL,
    step: int = _STEP,
    words: tuple[str, str] = ("token id", "embedding"),
) -> Tensor:
    """The share of examples that contain each token, with Gaussian noise.

    Each example's 0/1 vector of the tokens in it is clipped to `clipping_norm`, so that adding or removing one moves
    the sum by no more than that in l2 norm.

    Args:
        examples: the token ids of each example, of any shape; negative ids are left out.
        vocabulary_size: V.
        clipping_norm: the sensitivity of the sum.
        plan: what the release costs, and its noise.
        ledger: charged before the noisy counts exist; a refusal charges nothing.
        label: by which the plan and the ledger know the release.
        step: of its noise, by which a seed tells it from others.
        words: for refusals, what is counted and what of the model has a row for each.

    Returns:
        (V,) float32 in [1/n, 1], where a secret n is replaced by the number of examples of which the sampling
        probability would draw the expected batch size. Tokens that do not stand out from the noise share their mean.

    Raises:
        ConfigurationError: an id that is not below `vocabulary_size`.
        BudgetExceededError: it was released before.
    """
    release, n = plan.release_to_make(label, ledger), plan.sampler.public_size
    total = torch.zeros(vocabulary_size, dtype=torch.float64)
    for ids in examples:
        present = ids.flatten().unique().cpu()
        present = present[present >= 0]
        if len(present) and int(present[-1]) >= vocabulary_size:
            raise ConfigurationError(
                f"{words[0]} {int(present[-1])} in the training data, for an {words[1]} of {vocabulary_size} rows.",
                why="the model has no row for it.",
                fix="use the tokenizer that belongs to the model and labels below num_labels, or resize embeddings.",
            )
        total[present] += min(1.0, clipping_norm / max(1, len(present)) ** 0.5)
    deviation = plan.noise.deviation(release.noise_multiplier, clipping_norm)
    ledger.charge(release.event, release.label)
    if ranks.rank() == 0:
        plan.noise.add_([total], deviation, step)
    # One release: every rank counted the same, and only rank 0's noise is ever seen.
    ranks.from_first_(total)
    # Of tokens that do not stand out from the noise, the mean is known far better than each.
    in_doubt = total <= _STANDS_OUT * deviation
    shares = torch.where(in_doubt, total[in_doubt].mean() if bool(in_doubt.any()) else 0.0, total) / n
    return shares.clamp(1 / n, 1.0).float()


def token_ids(loader: Any, model: nn.Module) -> Iterator[Tensor]:
    """The token ids of each training example, or unit, without padding; what a decoder reads too.

    Args:
        loader: the training loader, with its dataset and its `LogicalBatchCollator`.
        model: whose config says whether there is a decoder, and what it begins with.

    Raises:
        ConfigurationError: batches without `input_ids`.
    """
    is_decoded = has_decoder(model)
    start = getattr(model.config, "decoder_start_token_id", None) if is_decoded else None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    # Without a head for tokens, labels are classes or numbers, and the decoder reads the text once more.
    read = ("decoder_input_ids",) if head is None else ("labels", "decoder_input_ids")

    def seen(row: int) -> Iterator[Tensor]:
        # Under a public seed one example more would change the random masks of all that follow.
        with loader.collate_fn.randomness():
            batch = loader.collate_fn.collated([loader.dataset[row]])
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor):
            raise ConfigurationError(
                "Re-Attention with released token frequencies, and no input_ids in the batches.",
                why="there are no tokens to count.",
                fix="use ReAttentionConfig(token_frequencies='uniform').",
            )
        mask = batch.get("attention_mask")
        yield ids if mask is None or mask.shape != ids.shape else ids[mask.bool()]
        if is_decoded:
            yield from (v for name in read if isinstance(v := batch.get(name), Tensor))
        if start is not None and "decoder_input_ids" not in batch:
            yield torch.tensor([start], device=ids.device)

    for index in loader.examples():
        rows = index if isinstance(index, tuple) else (index,)
        yield torch.cat([part.flatten() for row in rows for part in seen(row)])


def public_token_frequencies(path: Path, vocabulary_size: int, tokenizer: Any) -> Tensor:
    """The share of examples that contain each token, in public data.

    Args:
        path: a JSON file with one share for each token id, or texts, one public example in each line.
        vocabulary_size: V.
        tokenizer: of the model, to read texts; None where there are none.

    Returns:
        (V,) float32 in [0, 1].

    Raises:
        ConfigurationError: a file that is neither, or texts without a tokenizer that belongs to the model.
    """
    try:
        text = path.read_text(encoding="utf-8")
        shares = torch.tensor(json.loads(text)) if path.suffix == ".json" else _shares(text, vocabulary_size, tokenizer)
        if shares.shape != (vocabulary_size,) or not bool(((shares >= 0) & (shares <= 1)).all()):
            raise ValueError(f"{tuple(shares.shape)} numbers for {vocabulary_size} tokens, or a number outside [0, 1]")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"public_frequencies={str(path)!r} ({error}).",
            why="the noise of each row of the embedding follows from how often it is touched.",
            fix=f"give a JSON file (.json) with a list of {vocabulary_size} numbers in [0, 1], or a file with a public "
            "example in each line and, as the trainer's processing_class, the model's tokenizer.",
        ) from error
    return shares.float()


def _shares(text: str, vocabulary_size: int, tokenizer: Any) -> Tensor:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        raise ValueError("no texts" if not lines else "texts, and no tokenizer")
    counts = torch.zeros(vocabulary_size)
    for ids in tokenizer(lines)["input_ids"]:
        present = torch.tensor(ids).unique()
        if len(present) and int(present[-1]) >= vocabulary_size:
            raise ValueError(f"the tokenizer's id {int(present[-1])}, for an embedding of {vocabulary_size} rows")
        counts[present.long()] += 1
    return counts / len(lines)


def _vocabulary_size(model: nn.Module) -> int:
    sizes = {len(table) for table in token_tables(model)}
    if len(sizes) != 1:
        raise ConfigurationError(
            f"trained token embeddings of {sorted(sizes) or 'no'} rows.",
            why="one table of token frequencies is needed for all of them.",
            fix="use ReAttentionConfig(token_frequencies='uniform').",
        )
    return sizes.pop()
