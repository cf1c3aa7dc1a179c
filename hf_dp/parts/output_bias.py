"""An output that starts as frequencies: one private release of how often each token is a label, put into its bias."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_dp.config.asked import LABEL_PRESENCE
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.parts.part import Part, Run, Setting
from hf_dp.parts.token_frequencies import release_token_frequencies

FILE = "output_bias.safetensors"
LABEL = LABEL_PRESENCE
_SHARES = "label_shares"
# Seeded noise differs from that of every training step, and of the other releases.
_STEP = -2


class OutputBias(Part):
    """Where the weights start; what is learnt afterwards is learnt as with any other bias.

    Attributes:
        shares: (V,) of the examples that have each token as a label; None before `begin`.
    """

    name = "output_bias"
    shares: Tensor | None = None

    def refuse(self, setting: Setting) -> None:
        """FSDP2."""
        if setting.is_sharded:
            raise ConfigurationError(
                "output_bias with FSDP2.",
                why="the bias would be in shards, and it is written whole.",
                fix="train under DDP, or without output_bias.",
            )

    def checked(self, run: Run) -> None:
        """Refuses a model without a trained bias to begin with (`ConfigurationError`)."""
        _bias(run.model)

    def begin(self, run: Run, checkpoint: Path | None, earlier: Self | None) -> None:
        """Releases how often each token is a label, unless that was done before.

        Raises:
            ConfigurationError: a checkpoint without what was released, or labels that the output does not have.
            LedgerError: a checkpoint with another release than this process has made.
        """
        self.shares = None if earlier is None else earlier.shares
        if checkpoint is not None:
            self._resume(checkpoint)
        else:
            bias, norm = _bias(run.model), self._config.presence_clipping_norm
            if self.shares is None:
                self.shares = release_token_frequencies(
                    labels(run.loader), len(bias), norm, run.plan, run.ledger, LABEL, _STEP, ("label", "output")
                )
            # Also what a training that took no step has released: the model may have been made anew.
            with torch.no_grad():
                bias.copy_(self.shares.log())

    def save(self, directory: Path) -> None:
        """Beside the weights, so that a resumed run releases nothing anew."""
        if self.shares is not None:
            save_file({_SHARES: self.shares}, directory / FILE)

    def _resume(self, checkpoint: Path) -> None:
        known = self.shares
        try:
            self.shares = load_file(checkpoint / FILE)[_SHARES]
        except (OSError, KeyError, SafetensorError) as error:
            raise ConfigurationError(
                f"{str(checkpoint / FILE)!r} holds no frequencies of labels ({error}).",
                why="what was released would be released and paid for again.",
                fix="resume from a checkpoint as DPTrainer wrote it.",
            ) from error
        if known is not None and not torch.equal(known, self.shares):
            raise LedgerError(
                "the checkpoint holds other frequencies of labels than were released in this process.",
                why="its ledger does not count that release.",
                fix="resume from a checkpoint of this run, or in a new process if nothing of this one was seen.",
            )


def labels(loader: Any) -> Iterator[Tensor]:
    """The labels of each training example, or unit.

    Raises:
        ConfigurationError: batches without labels of whole numbers.
    """
    for index in loader.examples():
        rows = index if isinstance(index, tuple) else (index,)
        found = []
        for row in rows:
            # Under a public seed one example more would change the random masks of all that follow.
            with loader.collate_fn.randomness():
                found.append(loader.collate_fn.collated([loader.dataset[row]]).get("labels"))
        if not all(isinstance(ids, Tensor) and not ids.is_floating_point() for ids in found):
            raise ConfigurationError(
                "output_bias, and batches without labels of whole numbers.",
                why="how often each is seen is what the output starts from.",
                fix="give the collator's batches 'labels', or leave output_bias out.",
            )
        yield torch.cat([ids.flatten() for ids in found])


def _bias(model: nn.Module) -> nn.Parameter:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    bias = getattr(head, "bias", None)
    if not (isinstance(bias, nn.Parameter) and bias.requires_grad):
        raise ConfigurationError(
            f"output_bias, and {'no output layer' if head is None else 'an output layer without a trained bias'} in "
            f"{type(model).__name__}.",
            why="frequencies start an output as its bias, which is trained on and saved with the other weights.",
            fix="train a model whose get_output_embeddings() has a bias (BERT, GPT-J, Phi and others), or leave "
            "output_bias out.",
        )
    return bias
