"""What one who knows every public number computes: noise of seeds that stand somewhere, taken off what was released."""

from __future__ import annotations

import itertools
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Normals = Callable[[torch.Size], Tensor]
# Of a seed, a step, the place of a parameter and how many there are: which stream, and its seed.
Order = Callable[[int, int, int, int], tuple[int, int]]

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
    return _in_order(_of_torch, _once, like, deviation, steps)


def usual_noises(like: Mapping[str, Tensor], deviation: float, steps: int) -> list[Callable[[int], dict[str, Tensor]]]:
    """Noise of torch's generator and of NumPy's new and old ones: from one stream, from one of seed + step for each
    step, and from the seed anew for each parameter; and of torch's for all parameters at once.

    Args:
        like: what was released, by parameter name, in the order in which noise is drawn.
        deviation: of the noise.
        steps: of which it is the sum.
    """
    orders = _once, _each_step, _each_parameter
    found = [
        _in_order(normals, order, like, deviation, steps)
        for normals, order in itertools.product((_of_torch, _of_numpy, _of_numpy_in_float32, _of_old_numpy), orders)
    ]
    return found + [_at_once(order, like, deviation, steps) for order in orders[:2]]


def _at_once(
    order: Order, like: Mapping[str, Tensor], deviation: float, steps: int
) -> Callable[[int], dict[str, Tensor]]:
    sizes = [value.numel() for value in like.values()]
    whole = _in_order(_of_torch, order, {"": torch.zeros(sum(sizes))}, deviation, steps)

    def noise(seed: int) -> dict[str, Tensor]:
        parts = zip(like.items(), whole(seed)[""].split(sizes), strict=True)
        return {name: part.view(value.shape) for (name, value), part in parts}

    return noise


def _in_order(
    normals: Callable[[int], Normals], order: Order, like: Mapping[str, Tensor], deviation: float, steps: int
) -> Callable[[int], dict[str, Tensor]]:
    def noise(seed: int) -> dict[str, Tensor]:
        found, known = {name: torch.zeros_like(value) for name, value in like.items()}, dict[int, Normals]()
        for step in range(steps):
            for place, value in enumerate(found.values()):
                key, own = order(seed, step, place, len(found))
                if key not in known:
                    known = {key: normals(own)}
                value.add_(known[key](value.shape), alpha=deviation)
        return found

    return noise


def _once(seed: int, step: int, place: int, parameters: int) -> tuple[int, int]:
    return 0, seed


def _each_step(seed: int, step: int, place: int, parameters: int) -> tuple[int, int]:
    return step, seed + step


def _each_parameter(seed: int, step: int, place: int, parameters: int) -> tuple[int, int]:
    return step * parameters + place, seed


def _of_torch(seed: int) -> Normals:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return lambda shape: torch.randn(shape, generator=generator)


def _of_numpy(seed: int) -> Normals:
    generator = np.random.default_rng(seed)
    return lambda shape: torch.from_numpy(generator.standard_normal(tuple(shape))).float()


def _of_numpy_in_float32(seed: int) -> Normals:
    generator = np.random.default_rng(seed)
    return lambda shape: torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


def _of_old_numpy(seed: int) -> Normals:
    generator = np.random.RandomState(seed % 2**32)
    return lambda shape: torch.from_numpy(generator.standard_normal(tuple(shape))).float()
