"""What every source of noise must keep: each kind has a class of tests that inherits these."""

from __future__ import annotations

import json
import math
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import dp_accounting as dp
import numpy as np
import pytest
import torch
from torch import nn

from hf_dp import ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting import GaussianNoise, Ledger, Mechanism
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.config import PrivacyConfig
from hf_dp.errors import ConfigurationError, HfDpError, LedgerError
from hf_dp.noise import source as noise_module
from hf_dp.noise.source import NoiseSource
from hf_dp.noise.table import SOURCES, source_of
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from tests.noise.distribution import REJECTED, SIZE, DistributionContract, independence_p, normal_p, variance_p
from tests.training.workbench import assert_resumes_as_it_was, make, private
from tests.zoo import tiny

HAS_RANDOMGEN = find_spec("randomgen") is not None
needs_randomgen = pytest.mark.skipif(not HAS_RANDOMGEN, reason="needs randomgen: pip install 'randomgen>=2.0,<3'")

SIGMA, CLIPPING = 1.5, 0.5


def plan_of(**changes: Any) -> Plan:
    config = PrivacyConfig(**{"noise_multiplier": SIGMA, "clipping_norm": CLIPPING, "accountant": "rdp", **changes})
    entropy = Entropy(config.seed)
    return Plan.make(config, PoissonBatchSampler.of(1000, 50, entropy), 10, entropy)


class NoiseSourceContract(DistributionContract):
    """A kind of noise, from the promise to a resumed training.

    Attributes:
        kind: of the config, the terms and the table.
        room: how much more noise there is than the multiplier times the sensitivity.
        many: numbers beside which what a call needs besides is little.
    """

    kind: ClassVar[Any]
    room: ClassVar[float] = 1.0
    many: ClassVar[int] = 10_000_000

    def source(self, seed: int | None = 1) -> NoiseSource:
        return source_of(GaussianNoise(multiplier=1.0, kind=self.kind), Entropy(seed))

    def values(self, sd: float, step: int = 0, dtype: torch.dtype = torch.float32, size: int = SIZE) -> np.ndarray:
        tensor = torch.zeros(size, dtype=dtype)
        self.source(0).add_([tensor], sd, step)
        return tensor.double().numpy()

    def drawn(self, seed: int | None, step: int = 0, stream: str = "noise", dtype: Any = torch.float32) -> torch.Tensor:
        tensor = torch.zeros(100, dtype=dtype)
        self.source(seed).add_([tensor], 1.0, step, stream)
        return tensor

    # --- which numbers get noise -----------------------------------------------------------------------------------

    def test_noise_is_added_in_place_whatever_the_layout(self) -> None:
        plain = torch.full((30, 40), 100.0)
        transposed = torch.full((40, 30), 100.0).t()
        column = torch.full((30, 40), 100.0)
        wide = torch.full((30, 40), 100.0, dtype=torch.float64)
        tensors = [plain, transposed, column[:, 3], wide, torch.tensor(100.0), torch.empty(0, 5)]
        self.source().add_(iter(tensors), 1.0, 0)
        for tensor in tensors:
            assert (tensor != 100).all()
            assert ((tensor - 100).abs() < 10).all()
        untouched = [index for index in range(40) if index != 3]
        assert (column[:, untouched] == 100).all()

    def test_small_tensors_that_share_a_stream_do_not_share_their_noise(self) -> None:
        small = [torch.zeros(5) for _ in range(20)]
        tensors = [torch.empty(0), *small, torch.zeros(3, noise_module._BLOCK), torch.zeros(7)]
        self.source().add_(tensors, 1.0, 0)
        drawn = torch.cat([tensor.flatten() for tensor in tensors])
        assert len(drawn.unique()) > 0.9 * len(drawn)  # float32 normals repeat now and then
        assert torch.stack(small).unique().numel() == 100

    def test_parameters_that_require_grad_can_be_given(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(10))
        self.source().add_([parameter], 1.0, 0)
        assert (parameter != 0).all()
        assert parameter.grad_fn is None

    def test_no_noise_changes_nothing(self) -> None:
        tensor = torch.tensor([1.0, -0.0, math.inf])
        before = tensor.clone()
        self.source(None).add_([tensor], 0.0, 0)
        assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))

    @pytest.mark.parametrize("tensors", [1, 4, 16])
    def test_failure_9_noise_once_its_variance_does_not_grow_with_the_number_of_tensors(self, tensors: int) -> None:
        several = [torch.zeros(SIZE // tensors) for _ in range(tensors)]
        self.source(0).add_(several, 1.0, 0)
        values = torch.cat(several).double().numpy()
        assert variance_p(values, 1.0) > REJECTED
        # Noise from each of two ranks, and noise that was split between ranks that share a seed.
        assert variance_p(values * 2**0.5, 1.0) < REJECTED
        assert variance_p(values / 2**0.5, 1.0) < REJECTED

    def test_tensors_of_one_step_are_independent(self) -> None:
        left, right, transposed = torch.zeros(SIZE), torch.zeros(SIZE), torch.zeros(100, SIZE // 100).t()
        self.source(0).add_([left, right, transposed], 1.0, 0)
        values = [tensor.flatten().double().numpy() for tensor in (left, right, transposed)]
        assert independence_p(values[0], values[1], 1.0) > REJECTED
        assert independence_p(values[0], values[2], 1.0) > REJECTED
        assert variance_p(values[2], 1.0) > REJECTED

    def test_the_noise_of_a_step_is_sigma_times_the_sensitivity(self) -> None:
        model, plan = nn.Linear(200, 100), plan_of(noise=self.kind, seed=0)
        assert plan.noise_standard_deviation == pytest.approx(SIGMA * CLIPPING * self.room, rel=1e-4)
        assert plan.noise_standard_deviation >= SIGMA * CLIPPING
        private_gradient(model, None, [], plan, Ledger())  # type: ignore[arg-type]
        assert model.weight.grad is not None
        values = (model.weight.grad * 50).double().flatten().numpy()
        assert normal_p(values, SIGMA * CLIPPING) > REJECTED
        for wrong in (SIGMA, SIGMA * CLIPPING * 2 / 3, SIGMA * CLIPPING / 50):
            assert normal_p(values, wrong) < REJECTED

    # --- what is refused ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf, 1e-60, 1e60])
    def test_a_standard_deviation_that_is_no_noise_is_refused(self, bad: float) -> None:
        tensor = torch.zeros(3)
        with pytest.raises(ConfigurationError, match=r"(?s)standard deviation.*refused.*What to do"):
            self.source().add_([tensor], bad, 0)
        assert (tensor == 0).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.complex64])
    @pytest.mark.parametrize("sd", [0.0, 1.0])
    def test_failure_15_noise_in_bf16_is_refused_and_changes_nothing(self, dtype: torch.dtype, sd: float) -> None:
        good = torch.zeros(3)
        with pytest.raises(HfDpError, match=f"(?s)tensor 1 of shape \\(2,\\) and dtype {dtype}.*float32"):
            self.source().add_([good, torch.zeros(2, dtype=dtype)], sd, 0)
        assert (good == 0).all()

    def test_failure_9_noise_once_the_same_tensor_twice_is_refused(self) -> None:
        tensor = torch.zeros(4, 4)
        for pair in ([tensor, tensor], [tensor, tensor.view(16)], [tensor, torch.nn.Parameter(tensor)]):
            with pytest.raises(HfDpError, match="same tensor twice"):
                self.source().add_(pair, 1.0, 0)
        assert (tensor == 0).all()

    def test_failure_9_noise_once_numbers_that_tensors_share_are_refused(self) -> None:
        tensor = torch.zeros(4, 4)
        overlapping = torch.zeros(6).as_strided((4, 3), (1, 1))
        flat = tensor.view(16)
        shared = [[tensor, tensor[1:]], [flat[:8], flat[4:12]], [tensor.t()[1:], tensor[2]], [flat[1::2], flat[:3]]]
        for given in (*shared, [overlapping], [torch.zeros(2), torch.zeros(1, 4).expand(3, 4)]):
            with pytest.raises(HfDpError, match="the same numbers twice"):
                self.source().add_(given, 1.0, 0)
            assert all((one == 0).all() for one in given)
        for given in ([tensor[:, :2], tensor[:, 2:]], [flat[::2], flat[1::2]], [tensor[:2], tensor[2:]]):
            tensor.zero_()
            self.source().add_(given, 1.0, 0)
            assert (tensor != 0).all()

    # --- where the randomness comes from -----------------------------------------------------------------------------

    def test_seed_step_and_stream_decide_the_noise_and_each_alone_changes_it(self) -> None:
        one = self.drawn(1)
        assert torch.equal(one, self.drawn(1))
        for other in (self.drawn(2), self.drawn(1, step=1), self.drawn(1, stream="other"), self.drawn(1 + 2**32)):
            assert not (one == other).any()

    def test_streams_of_a_key_share_nothing(self) -> None:
        source, keys = self.source(), (bytes(32), bytes(31) + b"\x01", b"\x80" + bytes(31), bytes(63) + b"\x01")
        paths = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (11,), (1, 1), (0, 2**32)]
        words = [source.bits(key, path).random_raw(64) for key in keys for path in paths]
        assert len(np.unique(np.concatenate(words))) == 64 * len(keys) * len(paths)
        assert np.array_equal(source.bits(keys[0], (0, 1)).random_raw(64), source.bits(keys[0], (0, 1)).random_raw(64))

    def test_failure_21_resume_does_not_replay_noise(self) -> None:
        """Neither a new process at the same step nor the same process repeats what it added."""
        source, one, two = self.source(None), torch.zeros(100), torch.zeros(100)
        source.add_([one], 1.0, 7)
        source.add_([two], 1.0, 7)
        assert not (one == two).any()
        assert not (one == self.drawn(None, step=7)).any()
        first, second = (source.generator("top-k", 7).integers(2**63, size=9) for _ in range(2))
        assert not (first == second).any()

    def test_known_seeds_have_no_influence_on_noise(self) -> None:
        seen = []
        for _ in range(2):
            torch.manual_seed(42)
            np.random.seed(42)
            seen.append(self.drawn(None))
        assert not (seen[0] == seen[1]).any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_number_of_threads_does_not_matter(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        monkeypatch.setattr(noise_module, "_BLOCK", 1000)
        monkeypatch.setattr(noise_module, "_CHUNK", 300)
        monkeypatch.setattr(noise_module, "_BLOCKS_AT_ONCE", 3)
        results = []
        for threads in (1, 2, 4):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            results.append(torch.from_numpy(self.values(1.0, dtype=dtype, size=9999)))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert len(results[0].unique()) > 9_000

    def test_extra_memory_does_not_grow_with_the_tensor(self) -> None:
        tensor = torch.zeros(self.many)
        tracemalloc.start()
        try:
            self.source().add_([tensor], 1.0, 0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4_000_000
        assert (tensor[::1000] != 0).all()

    def test_a_tensor_elsewhere_gets_the_noise_that_one_on_the_cpu_gets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What moves it is replaced: the meta device keeps no values."""
        monkeypatch.setattr(noise_module, "_BLOCK", 1000)
        here, moved = torch.zeros(71, 97), []
        monkeypatch.setattr(noise_module, "_add_moved", lambda target, noise: moved.append((target, noise.clone())))
        for there in (torch.empty(71, 97, device="meta"), torch.empty(97, 71, device="meta").t()):
            moved.clear()
            self.source().add_([there], 1.0, 0)
            assert all(target.device.type == "meta" and target.shape == noise.shape for target, noise in moved)
            here.zero_()
            self.source().add_([here], 1.0, 0)
            assert torch.equal(torch.cat([noise.flatten() for _, noise in moved]), here.flatten())

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_noise_on_a_cuda_device(self) -> None:
        pairs = []
        for _ in range(2):
            pairs.append([torch.zeros(100, 100, device="cuda"), torch.zeros(50, 60, device="cuda").t()])
            self.source().add_(pairs[-1], 2.0, 0)
        for tensor, same_again in zip(*pairs, strict=True):
            assert torch.equal(tensor, same_again)
            assert normal_p(tensor.cpu().double().flatten().numpy(), 2.0) > REJECTED
        first, second = (tensor.flatten()[:3000] for tensor in pairs[0])
        assert not bool(first.eq(second).any())

    # --- what is promised --------------------------------------------------------------------------------------------

    def test_terms_go_to_json_and_back_and_nothing_else_is_read(self) -> None:
        plan, written = plan_of(noise=self.kind), {"multiplier": SIGMA, "kind": self.kind}
        assert isinstance(plan.noise, SOURCES[self.kind])
        assert json.loads(json.dumps(plan.mechanism.to_dict()))["noise"] == written
        assert Mechanism.from_dict(plan.mechanism.to_dict()) == plan.mechanism
        assert PrivacyConfig.from_json(plan.config.to_json()) == plan.config
        for wrong in ({"multiplier": -1}, {"multiplier": math.nan}, {"extra": 1}, {"kind": "other"}, {"kind": ["x"]}):
            with pytest.raises(ConfigurationError):
                terms_from_dict("noise", {**written, **wrong})
        with pytest.raises(ConfigurationError, match="noise"):
            terms_from_dict("noise", {"multiplier": SIGMA})

    def test_a_step_costs_what_gaussian_noise_costs_composed_by_hand(self) -> None:
        plan, ledger = plan_of(noise=self.kind), Ledger()
        assert plan.event == dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(SIGMA))
        for _ in range(10):
            ledger.charge(plan.event)
        by_hand = dp.rdp.RdpAccountant()
        by_hand.compose(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(SIGMA)), 10)
        assert plan.report(ledger).epsilon == pytest.approx(by_hand.get_epsilon(plan.delta), rel=1e-9)
        calibrated = (
            plan_of(noise=kind, noise_multiplier=None, target_epsilon=2.0) for kind in ("gaussian", self.kind)
        )
        assert len({made.noise_multiplier for made in calibrated}) == 1

    @pytest.mark.usefixtures("checked_once")
    @pytest.mark.parametrize(
        ("parts", "streams"),
        [
            ({"sparse_embeddings": SparseEmbeddingConfig(threshold=2.0)}, {"contribution noise", "false positives"}),
            pytest.param(
                {"sparse_embeddings": SparseEmbeddingConfig(method="fest", kept_rows=20)},
                {"top-k"},
                marks=pytest.mark.slow,
            ),
            pytest.param({"re_attention": ReAttentionConfig()}, set(), marks=pytest.mark.slow),
        ],
        ids=["AdaFEST", "FEST", "token frequencies"],
    )
    def test_all_noise_of_a_training_comes_from_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], streams: set[str]
    ) -> None:
        keys: dict[bytes, str] = {}
        used: set[bytes] = set()
        fresh, bits = Entropy.fresh, SOURCES[self.kind].bits

        def noted(entropy: Entropy, purpose: str, step: int) -> bytes:
            key = fresh(entropy, purpose, step)
            keys[key] = purpose
            return key

        def counted(source: NoiseSource, key: bytes, path: tuple[int, ...]) -> Any:
            used.add(key)
            return bits(source, key, path)

        monkeypatch.setattr(Entropy, "fresh", noted)
        monkeypatch.setattr(SOURCES[self.kind], "bits", counted)
        privacy = private(noise_multiplier=None, target_epsilon=3.0, noise=self.kind, **parts)
        trainer = make(tmp_path, tiny("gpt2", "sequence"), privacy)
        trainer.train()
        assert trainer.privacy_report().noise == self.kind
        assert keys.keys() == used
        assert set(keys.values()) == {"noise"} | streams

    @pytest.mark.slow
    @pytest.mark.usefixtures("checked_once")
    def test_a_resumed_training_is_the_uninterrupted_one_and_keeps_its_source(self, tmp_path: Path) -> None:
        kinds: Any = SOURCES.keys() - {self.kind} - (set() if HAS_RANDOMGEN else {"chacha20"})
        others = (private(noise=other) for other in kinds)
        assert_resumes_as_it_was(tmp_path, private(noise=self.kind), others, "noise", LedgerError)
