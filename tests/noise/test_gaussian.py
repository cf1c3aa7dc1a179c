"""GaussianNoise: what it touches, what it refuses, and where its randomness comes from."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch

from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.noise import gaussian as noise_module
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.randomness import Entropy


def drawn(seed: int | None, step: int = 0, shape: tuple[int, ...] = (100,), dtype=torch.float32) -> torch.Tensor:
    tensor = torch.zeros(shape, dtype=dtype)
    GaussianNoise(Entropy(seed)).add_([tensor], 1.0, step)
    return tensor


def test_noise_is_added_in_place_whatever_the_layout():
    plain = torch.full((30, 40), 100.0)
    transposed = torch.full((40, 30), 100.0).t()
    column = torch.full((30, 40), 100.0)
    wide = torch.full((30, 40), 100.0, dtype=torch.float64)
    tensors = [plain, transposed, column[:, 3], wide, torch.tensor(100.0), torch.empty(0, 5)]
    GaussianNoise(Entropy(1)).add_(iter(tensors), 1.0, 0)
    for tensor in tensors:
        assert (tensor != 100).all()
        assert ((tensor - 100).abs() < 10).all()
    untouched = [index for index in range(40) if index != 3]
    assert (column[:, untouched] == 100).all()


def test_small_tensors_that_share_a_stream_do_not_share_their_noise():
    tensors = [
        torch.empty(0),
        *(torch.zeros(5) for _ in range(20)),
        torch.zeros(3, noise_module._BLOCK),
        torch.zeros(7),
    ]
    GaussianNoise(Entropy(1)).add_(tensors, 1.0, 0)
    drawn = torch.cat([tensor.flatten() for tensor in tensors])
    assert len(drawn.unique()) > 0.9 * len(drawn)  # float32 normals repeat now and then
    assert torch.stack(tensors[1:21]).unique().numel() == 100


def test_parameters_that_require_grad_can_be_given():
    parameter = torch.nn.Parameter(torch.zeros(10))
    GaussianNoise(Entropy(1)).add_([parameter], 1.0, 0)
    assert (parameter != 0).all()
    assert parameter.grad_fn is None


def test_no_noise_changes_nothing():
    tensor = torch.tensor([1.0, -0.0, math.inf])
    before = tensor.clone()
    GaussianNoise(Entropy(None)).add_([tensor], 0.0, 0)
    assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf, 1e-60, 1e60])
def test_a_standard_deviation_that_is_no_noise_is_refused(bad):
    tensor = torch.zeros(3)
    with pytest.raises(ConfigurationError, match=r"(?s)standard deviation.*refused.*What to do"):
        GaussianNoise(Entropy(1)).add_([tensor], bad, 0)
    assert (tensor == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.complex64])
@pytest.mark.parametrize("standard_deviation", [0.0, 1.0])
def test_failure_15_noise_in_bf16_is_refused_and_changes_nothing(dtype, standard_deviation):
    good = torch.zeros(3)
    with pytest.raises(HfDpError, match=f"(?s)tensor 1 of shape \\(2,\\) and dtype {dtype}.*float32"):
        GaussianNoise(Entropy(1)).add_([good, torch.zeros(2, dtype=dtype)], standard_deviation, 0)
    assert (good == 0).all()


def test_failure_9_noise_once_the_same_tensor_twice_is_refused():
    tensor = torch.zeros(4, 4)
    for pair in ([tensor, tensor], [tensor, tensor.view(16)], [tensor, torch.nn.Parameter(tensor)]):
        with pytest.raises(HfDpError, match="same tensor twice"):
            GaussianNoise(Entropy(1)).add_(pair, 1.0, 0)
    assert (tensor == 0).all()


def test_a_seed_and_a_step_decide_the_noise():
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert not torch.equal(drawn(1), drawn(1, step=1))


def test_failure_21_resume_does_not_replay_noise():
    """Neither a new process at the same step nor the same process repeats what it added."""
    entropy = Entropy(None)
    one, two = torch.zeros(100), torch.zeros(100)
    GaussianNoise(entropy).add_([one], 1.0, 7)
    GaussianNoise(entropy).add_([two], 1.0, 7)
    assert not (one == two).any()
    assert not (one == drawn(None, step=7)).any()


def test_known_seeds_have_no_influence_on_noise():
    seen = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        seen.append(drawn(None))
    assert not (seen[0] == seen[1]).any()


def test_torchs_own_cpu_generator_keeps_32_bits_of_its_seed_and_ours_keeps_all():
    """The reason for not using it: 2 ** 32 streams can all be tried."""
    streams = [torch.randn(100, generator=torch.Generator().manual_seed(s)) for s in (5, 5 + 2**32)]
    assert torch.equal(streams[0], streams[1])
    assert not torch.equal(drawn(5), drawn(5 + 2**32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_does_not_matter(monkeypatch, dtype):
    monkeypatch.setattr(noise_module, "_BLOCK", 1000)
    monkeypatch.setattr(noise_module, "_CHUNK", 300)
    results = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(drawn(3, shape=(101, 99), dtype=dtype))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert len(results[0].unique()) > 9_000


def test_extra_memory_does_not_grow_with_the_tensor():
    tensor = torch.zeros(20_000_000)
    tracemalloc.start()
    try:
        GaussianNoise(Entropy(1)).add_([tensor], 1.0, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    assert (tensor[::1000] != 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_on_a_cuda_device():
    tensors = [torch.zeros(100, 100, device="cuda"), torch.zeros(50, 60, device="cuda").t()]
    GaussianNoise(Entropy(1)).add_(tensors, 2.0, 0)
    again = [torch.zeros(100, 100, device="cuda"), torch.zeros(50, 60, device="cuda").t()]
    GaussianNoise(Entropy(1)).add_(again, 2.0, 0)
    for tensor, same in zip(tensors, again, strict=True):
        assert torch.equal(tensor, same)
        assert 1.9 < tensor.std().item() < 2.1
