"""What one who knows every public number computes: noise of seeds that stand somewhere, taken off what was released."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

# Defaults of trainers and examples.
USUAL_SEEDS = (0, 1, 7, 42, 123, 1234, 12345, 1337, 2024, 2025, 2026, 3407)
_TEXTS = ("*.md", "trainer_state.json", "privacy.json", "config.json", "*.yaml", "*.yml")
_PICKLES = ("training_args.bin",)
# Others are places in the memory of the reader.
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
# A number that could be a seed, and no part of a longer word.
_WHOLE = re.compile(r"(?<![\w.])\d{1,20}(?![\w.]*\w)")
_LARGEST = 2**64


def public_seeds(folder: Path) -> list[int]:
    """Every whole number in the cards, records and settings below a folder, and the usual seeds, ascending.

    `training_args.bin` is taken apart and not loaded: nothing in it is run.
    """
    found = set(USUAL_SEEDS)
    for pattern in _TEXTS:
        for path in folder.rglob(pattern):
            found.update(map(int, _WHOLE.findall(path.read_text(encoding="utf-8", errors="replace"))))
    for pattern in _PICKLES:
        for path in folder.rglob(pattern):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.endswith("data.pkl"):
                        operations = pickletools.genops(archive.read(name))
                        found.update(
                            value for code, value, _ in operations if code.name in _NUMBERS and type(value) is int
                        )
    return sorted(seed for seed in found if 0 <= seed < _LARGEST)


def without_known_noise(
    released: Mapping[str, Tensor], seeds: Iterable[int], noises: Iterable[Callable[[int], Mapping[str, Tensor]]]
) -> tuple[dict[str, Tensor], int | None]:
    """What was released, less the noise of the one seed that leaves least of it; with that seed, None where none does.

    Args:
        released: sums with noise, by parameter name.
        noises: each from a seed to the noise that would be in them.
    """

    def size(values: Mapping[str, Tensor]) -> float:
        return sum(float(value.double().square().sum()) for value in values.values())

    known, best, least = None, dict(released), size(released)
    candidates = list(noises)
    for seed in seeds:
        for noise in candidates:
            made = noise(seed)
            rest = {name: value - made[name] for name, value in released.items()}
            if (left := size(rest)) < least:
                known, best, least = seed, rest, left
    return best, known


def of_torch(like: Mapping[str, Tensor], deviation: float, steps: int) -> Callable[[int], dict[str, Tensor]]:
    """Noise as most trainers would draw it: of torch's generator of that seed, parameter by parameter, step by step."""

    def noise(seed: int) -> dict[str, Tensor]:
        generator, found = (
            torch.Generator().manual_seed(seed % 2**63),
            {n: torch.zeros_like(p) for n, p in like.items()},
        )
        for _ in range(steps):
            for value in found.values():
                value.add_(torch.randn(value.shape, generator=generator), alpha=deviation)
        return found

    return noise
