"""Two trainings of which all is seen: one with next to no noise, and one in which all else is next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import torch
from torch import Tensor, nn

from hf_dp.accounting import epsilon, step_event
from hf_dp.audit.dirac import PLACE, THERE, placed
from hf_dp.audit.seen import Numbers, Seen, charged, contributions, in_common, noise, standard_draws
from hf_dp.config import PrivacyConfig
from hf_dp.per_example.batch import Batch
from hf_dp.training.private_run import PrivateRun

_EXAMPLES, _SHARE, _HALF, _MICRO_BATCH = 1500, 0.3, 0.5, 64
_STEPS, _FEW = 12, 3
_QUIET, _LOUD = 1e-4, 1000.0
_ROWS, _DELTA, _HIDDEN = 60, 1e-5, 40
# In units of C: some shorter, some longer.
_LENGTHS = (0.5, 2.0, 100.0)


class _Directions(nn.Module):
    """Each example has a direction of its own, in one parameter that it uses once or twice, or in two of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.places, self.more = nn.Embedding(number, 1), nn.Embedding(number, 1)
        nn.init.zeros_(self.places.weight)
        nn.init.zeros_(self.more.weight)

    def forward(self, place: Tensor, there: Tensor) -> Tensor:
        twice, both = (place % 3 == 1).float(), (place % 3 == 2).float()
        once = self.places(place)[:, 0]
        found: Tensor = (once + twice * self.places(place)[:, 0] + both * self.more(place)[:, 0]) * there
        return found


class _Kinds(nn.Module):
    """Parameters of many kinds: a table that is tied, weights, biases, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, _HIDDEN)
        self.norm = nn.LayerNorm(_HIDDEN)
        self.inner, self.outer = nn.Linear(_HIDDEN, 4 * _HIDDEN), nn.Linear(4 * _HIDDEN, _HIDDEN, bias=False)

    def forward(self, place: Tensor) -> Tensor:
        hidden = self.table(place)
        hidden = hidden + self.outer(torch.tanh(self.inner(self.norm(hidden))))
        found: Tensor = nn.functional.linear(hidden, self.table.weight)
        return found


def _own_direction(model: Any, batch: Batch) -> Tensor:
    place = batch[PLACE]
    lengths = torch.tensor(_LENGTHS)[place // 3 % len(_LENGTHS)]
    uses = torch.tensor([1.0, 2.0, 2.0**0.5])[place % 3]
    found: Tensor = lengths / uses * model(place, batch[THERE])
    return found


def _cross_entropy(model: Any, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[PLACE]), batch[PLACE] + 1, reduction="none")


def seen_here(folder: Path, **promise: Any) -> list[Seen]:
    """What steps of this library do on this machine, with models of its own. Seconds.

    Args:
        folder: an empty one, for a checkpoint.
        promise: further fields of `PrivacyConfig`, which leave clipping and sampling as they are.
    """
    alone = np.minimum(np.array(_LENGTHS)[np.arange(_EXAMPLES) // 3 % len(_LENGTHS)], 1.0)

    def added(steps: int) -> Numbers:
        sums, _ = _sums(_Directions(_EXAMPLES), _own_direction, _EXAMPLES, _QUIET, _SHARE, steps, promise)
        in_both = np.hypot(sums["places.weight"], sums["more.weight"])
        # The other way it is nothing that was drawn.
        return np.where(sums["places.weight"] < -6 * _QUIET, -in_both, in_both)

    def released(steps: int, to: Path | None = None) -> tuple[dict[str, Numbers], PrivateRun]:
        sums, run = _sums(_Kinds(), _cross_entropy, _ROWS, _LOUD, _HALF, steps, promise, to)
        return {name: values / _LOUD for name, values in sums.items()}, run

    first, second = added(_STEPS), added(_FEW)
    draws = [standard_draws(one[:_FEW], alone, _SHARE) for one in (first, second)]
    (noises, run), (others, _) = released(_STEPS, folder), released(_FEW)
    wholes = [np.concatenate([values[:_FEW] for values in one.values()], axis=1) for one in (noises, others)]
    report, taken = run.report(), dp.SelfComposedDpEvent(step_event(_LOUD, _HALF), _STEPS)
    return [
        *contributions(first, alone, _SHARE),
        in_common("draws", *draws),
        *noise(noises),
        in_common("numbers of the noise", *wholes),
        *charged(_STEPS, report.steps, report.epsilon, epsilon(taken, report.delta)),
    ]


def _sums(
    model: nn.Module, loss: Any, n: int, multiplier: float, share: float, steps: int, further: dict[str, Any],
    folder: Path | None = None,
) -> tuple[dict[str, Numbers], PrivateRun]:  # fmt: skip
    """By parameter (steps, numbers), in units of C. With a folder it goes on from a checkpoint after half of them."""
    rows = [{PLACE: i, THERE: 1.0} for i in range(n)]
    expected, found = round(share * n), dict[str, list[Any]]()
    promise = PrivacyConfig(noise_multiplier=multiplier, target_delta=_DELTA, **further)
    run: PrivateRun | None = None
    for part in range(1 if folder is None else 2):
        run = PrivateRun(
            model, rows, promise, placed, expected_batch_size=expected, micro_batch_size=_MICRO_BATCH, steps=steps,
            loss=loss, output_dir=folder,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run.begin(optimizer, resume_from_checkpoint=bool(part))
        for batch in run.batches():
            run.step(batch)
            for name, p in model.named_parameters():
                assert p.grad is not None
                found.setdefault(name, []).append(p.grad.double().flatten().numpy() * expected)
            optimizer.step()
            if folder is not None and not part and run.global_step == steps // 2:
                run.save_checkpoint()
                run.end()
                break
    assert run is not None
    return {name: np.stack(values) for name, values in found.items()}, run
