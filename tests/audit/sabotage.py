"""Trainings on Dirac canaries alone, honest or with something wrong in them, and what attacks make of each step."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.accounting import PrivacyReport
from hf_dp.audit import OneRun, coins, gaussian_one_run, one_run
from hf_dp.audit.dirac import PLACE, THERE, WithDirac, placed, with_dirac
from hf_dp.randomness import Entropy

DELTA = 1e-5
loss = with_dirac(lambda model, batch: torch.zeros(()))


@dataclass(frozen=True)
class Trained:
    """What came out: which canaries were in, the noisy sums (steps, parameters, m) of every step, and the claim."""

    included: Any
    sums: Tensor
    report: PrivacyReport

    def shown(self, scores: Tensor | None = None, bound: Any = None, **options: Any) -> OneRun:
        """By the sum of all steps, unless by other scores."""
        found = (-self.sums.sum((0, 1)) if scores is None else scores).numpy()
        bound = bound or (gaussian_one_run if self.report.sampling_probability == 1 else one_run)
        shown: OneRun = bound(found[self.included], found[~self.included], delta=DELTA, **options)
        return shown


def trained(
    m: int = 2000,
    *,
    epsilon: float = 1.0,
    share: float = 1.0,
    steps: int = 2,
    folder: Path | None = None,
    model: nn.Module | None = None,
    loss: Any = loss,
    collate: Any = placed,
    begun: Callable[[], object] = bool,
    **promise: Any,
) -> Trained:
    """With a folder it breaks off after half of its steps, and goes on from its checkpoint in a new run. `begun` is
    called after the check before the first step."""
    included = coins(m)
    # The check before the first step looks at the first and the last row, which are no canaries.
    rows = [{PLACE: m, THERE: 1.0}, *({PLACE: i, THERE: float(included[i])} for i in range(m)), {PLACE: m, THERE: 1.0}]
    privacy = PrivacyConfig(target_epsilon=epsilon, target_delta=DELTA, **promise)
    sums: list[Tensor] = []
    report = None
    for part in range(1 if folder is None else 2):
        fresh = WithDirac(nn.Identity(), m + 1) if model is None else model
        run = PrivateRun(
            fresh, rows, privacy, collate, expected_batch_size=round(share * len(rows)), micro_batch_size=1000,
            steps=steps, loss=loss, output_dir=folder,
        )  # fmt: skip
        optimizer = torch.optim.SGD(fresh.parameters(), lr=1.0)
        run.begin(optimizer, resume_from_checkpoint=bool(part))
        begun()
        for batch in run.batches():
            run.step(batch)
            grads = [p.grad for p in fresh.parameters() if p.grad is not None]
            sums.append(torch.stack([g[:m, 0] for g in grads]) * round(share * len(rows)))
            optimizer.step()
            if folder is not None and not part and run.global_step == steps // 2:
                run.save_checkpoint()
                run.end()
                break
        report = run.report()
    assert report is not None
    return Trained(included, torch.stack(sums), report)


def noise_again_after_resuming(patch: pytest.MonkeyPatch) -> None:
    """Each run draws what the one before it drew, from a secret."""
    secret, calls = secrets.token_bytes(32), dict[Entropy, int]()

    def fresh(self: Entropy, purpose: str, step: int) -> bytes:
        calls[self] = calls.get(self, 0) + 1
        return hashlib.blake2b(str(calls[self]).encode(), key=secret, digest_size=32).digest()

    patch.setattr(Entropy, "fresh", fresh)
