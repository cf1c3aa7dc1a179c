"""The default: SFC64 on the CPU, torch's Philox on CUDA devices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import hf_dp
from hf_dp.noise import source as noise_module
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.randomness import Entropy
from tests.noise.contract import NoiseSourceContract
from tests.noise.distribution import REJECTED, SIZE, DistributionContract, normal_p

DRAWS = re.compile(
    r"np\.random\.(?:Generator|SFC64|PCG64|Philox|MT19937|default_rng)|torch\.(?:Generator|randn|normal)\("
)


class TestGaussian(NoiseSourceContract):
    kind: ClassVar[Any] = "gaussian"

    def test_torchs_own_cpu_generator_keeps_32_bits_of_its_seed_and_ours_keeps_all(self) -> None:
        """The reason for not using it: 2 ** 32 streams can all be tried."""
        streams = [torch.randn(100, generator=torch.Generator().manual_seed(s)) for s in (5, 5 + 2**32)]
        assert torch.equal(streams[0], streams[1])
        assert not torch.equal(self.drawn(5), self.drawn(5 + 2**32))

    def test_the_noise_of_a_seed_stays_what_it_was(self) -> None:
        assert self.drawn(3, step=4, dtype=torch.float64)[:2].tolist() == [0.32175079251938843, 2.0391867807367943]


class TestOnDevicesTogether:
    def test_tensors_of_one_device_get_one_stream_and_numbers_of_their_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = list[tuple[int, ...]]()

        def on_device(self: GaussianNoise, device: torch.device, key: bytes, path: tuple[int, ...]) -> torch.Generator:
            made.append(path)
            return torch.Generator().manual_seed(int.from_bytes(key[:4]) + path[0])

        monkeypatch.setattr(GaussianNoise, "on_device", on_device)
        drawn = []
        for step in (0, 0, 1):
            tensors = [torch.zeros(500, 40), torch.zeros(20_000)]
            GaussianNoise(Entropy(3)).add_(tensors, 2.0, step)
            drawn.append(torch.cat([tensor.flatten() for tensor in tensors]))
        assert made == [(1,)] * 3
        assert torch.equal(drawn[0], drawn[1])
        assert len(torch.cat([drawn[0], drawn[2]]).unique()) > 0.99 * 80_000
        assert normal_p(drawn[0].double().numpy(), 2.0) > REJECTED > normal_p(drawn[0].double().numpy(), 3.0)


class TestOnDevices(DistributionContract):
    """What runs on a CUDA device, run on the CPU."""

    def values(self, sd: float, step: int = 0, dtype: torch.dtype = torch.float32, size: int = 20_000) -> np.ndarray:
        tensor = torch.zeros(size, dtype=dtype)
        noise_module._add_by_torch(tensor, sd, torch.Generator().manual_seed(1000 + step))
        return tensor.double().numpy()

    @pytest.mark.parametrize("size", [20, 20_000])
    def test_numbers_are_those_of_float64(self, size: int) -> None:
        """Of float32 cuRAND's end at 6.77 deviations (docs/proof.md, the last digits of noise)."""
        drawn = torch.empty(size, dtype=torch.float64).normal_(0, 2.0, generator=torch.Generator().manual_seed(1003))
        assert torch.equal(torch.from_numpy(self.values(2.0, 3, size=size)), drawn.float().double())


def test_numbers_are_drawn_where_noise_is_made_and_nowhere_else() -> None:
    package = Path(hf_dp.__file__).parent
    texts = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    found = {name for name, text in texts.items() if DRAWS.search(text)}
    # Generators of a model's own are looked for, and none is drawn from.
    looked_for = {"per_example/checks/coins.py", "per_example/checks/draws.py"}
    # An audit draws coins and canaries, none of which a training without one knows of.
    audits = {"audit/canaries.py", "audit/guesses.py", "audit/public.py", "demo/audited.py"}
    made = {"randomness.py", *(f"noise/{name}.py" for name in ("source", "gaussian", "grid", "digits"))}
    assert found == made | audits | looked_for


def test_negative_control_other_distributions_are_rejected() -> None:
    generator = np.random.default_rng(0)
    assert normal_p(generator.uniform(-(3**0.5), 3**0.5, SIZE), 1.0) < REJECTED
    assert normal_p(generator.laplace(0, 0.5**0.5, SIZE), 1.0) < REJECTED
