"""Where randomness comes from: secret without a seed, repeatable with one."""

from __future__ import annotations

import copy
import os
import pickle
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hf_dp.errors import HfDpError
from hf_dp.randomness import Entropy, bernoulli, secret_global_state, seed_sequence


def words(entropy: Entropy, purpose: str = "test", step: int = 0) -> list[int]:
    return entropy.generator(purpose, step).integers(2**63, size=4).tolist()


def fresh(entropy: Entropy, purpose: str = "test", step: int = 0) -> list[int]:
    return list(entropy.fresh(purpose, step))


@pytest.mark.parametrize("draw", [words, fresh])
def test_a_seed_makes_draws_repeatable_and_keyed_by_seed_purpose_and_step(draw):
    assert draw(Entropy(7)) == draw(Entropy(7))
    others = [draw(Entropy(8)), draw(Entropy(7), "other"), draw(Entropy(7), step=1), draw(Entropy(7 + 2**32))]
    assert draw(Entropy(7)) not in others
    assert len({tuple(each) for each in others}) == len(others)


def test_purpose_and_step_cannot_be_confused():
    assert words(Entropy(0), "a1", 1) != words(Entropy(0), "a", 11)
    assert words(Entropy(0), "1a", 1) != words(Entropy(0), "a", 11)
    assert words(Entropy(0), "1:a", 1) != words(Entropy(0), "a", 11)


def test_a_secret_generator_repeats_within_one_entropy_only():
    secret = Entropy(None)
    assert words(secret) == words(secret)
    assert words(secret) != words(Entropy(None))


def test_fresh_draws_never_repeat_without_a_seed():
    secret = Entropy(None)
    assert fresh(secret) != fresh(secret)


@pytest.mark.parametrize("draw", [words, fresh])
def test_known_seeds_have_no_influence_on_a_secret(draw):
    seen = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)
        seen.append(draw(Entropy(None)))
    assert seen[0] != seen[1]


def test_global_generators_are_left_alone():
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    for entropy in (Entropy(None), Entropy(3)):
        words(entropy)
        fresh(entropy)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


@pytest.mark.parametrize("seed", [None, 5])
def test_the_secret_is_not_printed_pickled_or_copied(seed):
    entropy = Entropy(seed)
    for text in (repr(entropy), str(entropy), f"{entropy}"):
        assert text == ("Entropy(secret)" if seed is None else "Entropy(reproducible: not private)")
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(HfDpError, match=r"(?s)pickle or copy.*refused.*What to do"):
            leak(entropy)


def test_only_a_seed_is_reproducible():
    assert Entropy(0).reproducible
    assert not Entropy(None).reproducible


def test_256_bits_come_from_the_operating_system_and_none_is_lost(monkeypatch):
    asked = []

    def token_bytes(count: int) -> bytes:
        asked.append(count)
        return bytes(count - 1) + bytes([len(asked)])

    monkeypatch.setattr("hf_dp.randomness.secrets.token_bytes", token_bytes)
    first, second = Entropy(None), Entropy(None)
    assert asked == [32, 32]
    assert words(first) != words(second)
    assert fresh(first) != fresh(second)
    assert asked == [32] * 4
    assert seed_sequence(first.fresh("test", 0)).pool_size * 32 >= 256


def test_a_secret_global_state_is_fresh_inside_and_leaves_the_public_one_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    drawn = []
    for _ in range(2):
        with secret_global_state():
            drawn.append(draw())
    after = draw()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert after == draw(), "the public streams go on as if nothing had happened"
    assert all(a != b for a, b in zip(*drawn, strict=True))
    assert all(a != b for inside in drawn for a, b in zip(inside, after, strict=True))


def test_a_secret_global_state_leaves_nothing_behind_for_an_accelerator_that_is_not_there() -> None:
    if torch.accelerator.is_available():
        pytest.skip("an accelerator is there")
    before = len(torch.cuda._queued_calls)
    with secret_global_state():
        pass
    assert len(torch.cuda._queued_calls) == before


def test_failure_41_a_gap_of_nothing_that_numpy_can_draw_draws_nobody_twice() -> None:
    """Where its uniform bits are all 0, a geometric number is 0: the last row at the beginning, a second time later."""
    modulus, multiplier = 2**128, 0x2360ED051FC65DA44385DF649FCCF645
    bits = np.random.PCG64()
    state: Any = bits.state
    # PCG64 steps, and then puts out nothing but zeros.
    state["state"]["state"] = -state["state"]["inc"] * pow(multiplier, -1, modulus) % modulus
    bits.state = state
    assert np.random.Generator(bits).geometric(0.01) == 0
    bits.state = state
    drawn = bernoulli(np.random.Generator(bits), 1000, 0.01)
    assert drawn[0] == 0
    assert drawn == sorted(set(drawn))
    gaps = mock.Mock()
    gaps.geometric.side_effect = [np.array([3, 0, 0, 5]), np.array([1000])]
    assert bernoulli(gaps, 20, 0.01) == [2, 3, 4, 9]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked processes here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_failure_144_a_process_that_was_forked_draws_others_of_its_own() -> None:
    def drawn(entropy: Entropy) -> bytes:
        return entropy.generator("sampling", 0).bytes(16)

    def drawn_by_child(entropy: Entropy) -> bytes:
        reads, writes = os.pipe()
        if not (child := os.fork()):
            os.write(writes, drawn(entropy) + drawn(entropy))
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            return pipe.read()

    entropy = Entropy(None)
    mine, first, second = drawn(entropy), drawn_by_child(entropy), drawn_by_child(entropy)
    assert len({mine, first[:16], second[:16]}) == 3
    assert first[:16] == first[16:], "asked again, a stream starts again there too"
    assert drawn(entropy) == mine
    assert drawn_by_child(Entropy(3))[:16] == drawn(Entropy(3))
