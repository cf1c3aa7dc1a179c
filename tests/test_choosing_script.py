"""What scripts/choosing.py compares with: Adam, rates over the steps, and tables of what was found."""

import importlib.util
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "choosing.py"


@pytest.fixture
def choosing(forgotten, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # the script puts recipes there; undone with this
    spec = importlib.util.spec_from_file_location("choosing", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_adam_is_corrected_for_the_noise_and_without_any_is_adam(noise, choosing):
    ours, theirs = torch.zeros(5, requires_grad=True), torch.zeros(5, requires_grad=True)
    optimizers = choosing.Corrected([ours], 0.1, noise, floor=0.01), torch.optim.Adam([theirs], lr=0.1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(4):
        gradient = 1 + torch.randn(5, generator=draw)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    # Less in the denominator is more in the step.
    assert torch.allclose(ours, theirs, atol=1e-6) is (noise == 0)
    assert bool((ours.detach().abs() >= theirs.detach().abs() - 1e-6).all())


def test_rates_rise_over_the_warm_up_and_fall_to_the_last_step(choosing):
    point = {**choosing.BASE, "warmup": 0.25, "rate": 1.0}
    rates = [choosing.rate_at(point, step, 16) for step in range(16)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == 1 / 12


def test_a_table_has_the_points_that_there_are(choosing):
    (first, *_) = choosing.SECTIONS["norm"]
    found = {"point": first, "seed": 1, "accuracy": 61.2, "loss": 1.5, "clipped": 0.5, "noise": 0.4}
    rows = choosing.table("norm", [found, {**found, "seed": 2, "loss": 1.6}]).splitlines()
    assert rows[-1] == "| 0.1 |  | 1.500, 1.600 | 61.2 | 50 | 0.400 |"
    assert len(rows) == 5
