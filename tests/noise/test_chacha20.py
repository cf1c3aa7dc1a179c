"""ChaCha20: the cipher itself, and no other in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from hf_dp import PrivacyConfig, PrivacyReport, SparseEmbeddingConfig
from hf_dp.accounting import Ledger
from hf_dp.errors import ConfigurationError, LedgerError
from tests.noise.contract import NoiseSourceContract, needs_randomgen, plan_of
from tests.training.workbench import classifier, make, private, with_lora


def round_of(state: list[int], *words: int) -> None:
    """A quarter round on four words of the state (Bernstein 2008)."""
    a, b, c, d = words
    for left, right, other, shift in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[left] = (state[left] + state[right]) % 2**32
        mixed = state[other] ^ state[left]
        state[other] = (mixed << shift | mixed >> (32 - shift)) % 2**32


def key_stream(key: bytes, block: int) -> bytes:
    """64 bytes of ChaCha20 at a counter, written down from its definition."""
    words = [int.from_bytes(part, "little") for part in (key[i : i + 4] for i in range(0, 32, 4))]
    constants = [int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in range(0, 16, 4)]
    start = [*constants, *words, block, 0, 0, 0]
    state = list(start)
    for _ in range(10):
        for column in range(4):
            round_of(state, *(column + 4 * row for row in range(4)))
        for column in range(4):
            round_of(state, *((column + row) % 4 + 4 * row for row in range(4)))
    return b"".join(((one + other) % 2**32).to_bytes(4, "little") for one, other in zip(state, start, strict=True))


@needs_randomgen
class TestChaCha20(NoiseSourceContract):
    kind: ClassVar[Any] = "chacha20"

    def test_a_stream_is_the_cipher_under_a_key_of_its_own_from_counter_0(self) -> None:
        source, keys = self.source(), set()
        for path in ((), (0, 0), (0, 1)):
            stream: Any = source.bits(b"\x01" * 32, path)
            state = stream.state["state"]
            assert state["rounds"] == 20
            assert state["ctr"].tolist() == [0, 0]
            key = state["keysetup"].astype("<u4").tobytes()
            keys.add(key)
            wanted = b"".join(key_stream(key, block) for block in range(3))
            assert stream.random_raw(24).astype("<u8").tobytes() == wanted
        assert len(keys) == 3
        assert all(len(key.strip(b"\0")) > 28 for key in keys)

    def test_tensors_on_cuda_devices_get_it_too(self) -> None:
        assert self.source().on_device(torch.device("cuda"), bytes(32), (1,)) is None

    def test_promise_and_report_say_so_and_those_of_other_runs_are_as_they_were(self) -> None:
        chacha, plain = plan_of(noise="chacha20"), plan_of()
        assert chacha.promise == {**plain.promise, "noise": "chacha20"}
        told, usual = (plan.report(Ledger(plan.promise)) for plan in (chacha, plain))
        assert told.to_dict() == {**usual.to_dict(), "noise": "chacha20"}
        assert PrivacyReport.from_json(told.to_json()) == told
        assert "1.5 (Gaussian, from the generator chacha20)" in str(told)
        assert "1.5 (Gaussian, from the generator chacha20)" in str(chacha)
        assert "chacha20" not in str(usual) + str(plain) + usual.to_json()
        for wrong in ("chacha", None, [], 1):
            with pytest.raises(LedgerError, match="noise"):
                PrivacyReport.from_dict({**told.to_dict(), "noise": wrong})


@needs_randomgen
@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("model", "settings"),
    [(with_lora, {"accountant": "rdp"}), (classifier, {"sparse_embeddings": SparseEmbeddingConfig(threshold=2.0)})],
    ids=["LoRA", "sparse embeddings"],
)
@pytest.mark.slow
def test_with_automatic_clipping_it_costs_what_the_usual_noise_costs(
    tmp_path: Path, model: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    reports = []
    for noise in ("gaussian", "chacha20"):
        privacy = private(
            noise_multiplier=None, target_epsilon=3.0, seed=None, clipping="automatic", noise=noise, **settings
        )
        trainer = make(tmp_path / noise, model(), privacy)
        trainer.train()
        reports.append(trainer.privacy_report().to_dict())
    assert reports[1] == {**reports[0], "noise": "chacha20"}
    assert reports[1]["private"]


def test_the_definition_gives_the_published_test_vector() -> None:
    wanted = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert key_stream(bytes(32), 0)[:32].hex() == wanted


@pytest.mark.parametrize("noise", ["ChaCha20", "", None, 1, 1.5, ["chacha20"]])
def test_a_generator_that_is_not_known_is_refused(noise: Any) -> None:
    with pytest.raises(ConfigurationError, match="noise="):
        PrivacyConfig(target_epsilon=4.0, noise=noise)


@pytest.mark.usefixtures("checked_once")
def test_without_the_package_nothing_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "randomgen", None)
    with pytest.raises(ConfigurationError, match=r"(?s)randomgen.*pip install 'randomgen"):
        plan_of(noise="chacha20")
    trainer = make(tmp_path, privacy=private(noise="chacha20"))
    with pytest.raises(ConfigurationError, match="randomgen"):
        trainer.train()
    assert trainer.ledger.steps == 0
    # Whoever verifies needs no generator.
    assert PrivacyConfig.from_json(trainer.privacy.to_json()).noise == "chacha20"


def test_another_generator_of_that_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(**_: Any) -> Any:
        return np.random.SFC64(0)

    monkeypatch.setitem(sys.modules, "randomgen", SimpleNamespace(ChaCha=other))
    with pytest.raises(ConfigurationError, match=r"(?s)begins with.*76b8e0ada0f13d90.*another generator"):
        plan_of(noise="chacha20")
