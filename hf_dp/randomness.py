"""The one place where secret randomness comes from."""

from __future__ import annotations

import hashlib
import math
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

import hf_dp.ranks as ranks
from hf_dp.errors import HfDpError

# Those of torch, numpy and Python, in this order.
GENERATORS = 3


class Entropy:
    """Where sampling and noise get their randomness: the operating system, or a seed that gives privacy up.

    A known seed lets anyone redo the draws, subtract the noise and read the private sum. So without a seed the secret
    is 256 bits from the operating system; it is held in this process's memory only, never printed, and cannot be
    pickled; a process that is forked has one of its own, since two trainings would draw alike. Nothing here reads or
    changes the global states of `torch`, `numpy` or `random`.

    Streams that can be asked for again are SFC64: fast, with 192 bits of seed, but not a cryptographic generator. What
    is added as noise comes from a source of noise (`hf_dp.noise`), out of `fresh` keys.

    Args:
        seed: None for a secret, or an integer for draws that anyone can repeat (for tests; not private).

    Attributes:
        reproducible: True with a seed. What such a run releases is not private.
    """

    __slots__ = ("_key", "_process", "reproducible")

    def __init__(self, seed: int | None) -> None:
        self.reproducible = seed is not None
        self._key = secrets.token_bytes(32) if seed is None else hashlib.blake2b(str(seed).encode()).digest()
        self._process = os.getpid()

    @classmethod
    def of_all_ranks(cls, seed: int | None) -> Entropy:
        """The same on every rank: rank 0's secret, sent from memory to memory. All ranks must call it together.

        What is `fresh` still differs between ranks, unless there is a seed.
        """
        entropy = cls(seed)
        if not entropy.reproducible:
            entropy._key = ranks.secret_from_first(entropy._key)
        return entropy

    def generator(self, purpose: str, step: int) -> np.random.Generator:
        """A stream that depends on (this secret, `purpose`, `step`) only: asking again starts it again.

        Streams of different purposes or steps are independent.
        """
        return np.random.Generator(np.random.SFC64(seed_sequence(self._keyed(purpose, step))))

    def fresh(self, purpose: str, step: int) -> bytes:
        """A key of streams that nobody can ask for again: a new draw from the operating system at every call.

        Only with a seed does it depend on (seed, `purpose`, `step`). It is for noise: a step that is repeated
        after a resume must not repeat its noise, since the difference of the two releases would then have none.
        """
        return self._keyed(purpose, step) if self.reproducible else secrets.token_bytes(32)

    def _keyed(self, purpose: str, step: int) -> bytes:
        if not self.reproducible and self._process != os.getpid():
            self._key, self._process = secrets.token_bytes(32), os.getpid()
        # A keyed cryptographic hash, because SeedSequence's own mixing is not made to hide one key from another.
        return hashlib.blake2b(f"{step}:{purpose}".encode(), key=self._key).digest()

    def __repr__(self) -> str:
        return f"Entropy({'reproducible: not private' if self.reproducible else 'secret'})"

    def __reduce__(self) -> NoReturn:
        raise HfDpError(
            "an attempt to pickle or copy hf_dp's Entropy, the secret behind sampling and noise.",
            why="whoever reads the copy can redo the draws, and a copied stream would be used twice.",
            fix="keep samplers and noise out of what is pickled, and make a new Entropy(None) in a new process.",
        )


@contextmanager
def unchanged_global_state() -> Iterator[None]:
    """The global generators of `torch`, `numpy` and `random` come back as they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def state_to_return_to() -> Callable[[], None]:
    """What sets the global generators of `torch`, `numpy` and `random` to where they are now."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def back() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)

    return back


@contextmanager
def secret_global_state() -> Iterator[None]:
    """Inside, the global generators of `torch`, `numpy` and `random` are seeded by the operating system.

    For dropout masks, rows that are augmented at random and collators that mask at random. Under Trainer's public seed
    one example more or less would shift everyone else's in a known way, and the clipped sum would move by more than C.
    The global states come back as they were.
    """
    with unchanged_global_state():
        seed_secretly()
        yield


def seed_secretly() -> None:
    """Seeds the global generators by the operating system: once more inside of `secret_global_state`, where something
    may have seeded them since."""
    _seed_global_state(secrets.randbits(63), secrets.randbits(32), secrets.randbits(256))


def key_global_state(key: bytes, number: int) -> None:
    """Sets the global generators to what they are wherever `key` and `number` are: to read a row that is augmented at
    random twice, and find it the same."""
    digest = hashlib.blake2b(str(number).encode(), key=key).digest()
    _seed_global_state(*(int.from_bytes(part, "little") for part in (digest[:7], digest[7:11], digest[11:43])))


def seed_global_state(*entropy: int, only: int | None = None) -> None:
    """Sets the global generators of `torch`, `numpy` and `random` to what `entropy` says, or `only` one of these, of
    three, and the others to one state. For checks, not training."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    seeds = [seed] * GENERATORS if only is None else [0] * GENERATORS
    seeds[-1 if only is None else only] = seed
    _seed_global_state(*seeds)


def global_state() -> tuple[Any, ...]:
    """What the global generators of `torch` (CUDA and CPU), `numpy` and `random` are at, to be compared."""
    of_numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    drawn = (of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"], of_numpy["has_gauss"])
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [state.numpy().tobytes() for state in (*of_cuda, torch.default_generator.get_state())]
    return *of_torch, drawn, random.getstate()


def _seed_global_state(of_torch: int, of_numpy: int, of_python: int) -> None:
    # Without an accelerator `torch.manual_seed` keeps a stack trace of every call for one that never comes.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(of_torch)
    np.random.seed(of_numpy)  # noqa: NPY002
    random.seed(of_python)


def bernoulli(generator: np.random.Generator, n: int, q: float) -> list[int]:
    """The indices below n, ascending, that independent coin flips with probability q choose, without flipping each.

    Source: Bernoulli draws by their geometric gaps (Fan, Muller and Rezucha 1962), exact up to double precision.

    Args:
        q: in (0, 1].
    """
    chosen: list[int] = []
    last = -1
    at_once = math.ceil(n * q + 4 * math.sqrt(n * q)) + 16
    while last < n:
        # NumPy's is 0 where its uniform bits all are, and a unit would be drawn twice: a gap is 1 at least.
        gaps = np.maximum(generator.geometric(q, at_once), 1)
        # A gap beyond the end is as good as any other beyond the end, and the sum of clipped gaps cannot overflow.
        indices = last + np.minimum(gaps, n + 1).cumsum(dtype=np.int64)
        chosen += indices[indices < n].tolist()
        last = int(indices[-1])
    return chosen


def seed_sequence(key: bytes, path: tuple[int, ...] = ()) -> np.random.SeedSequence:
    """The start of the streams of a key; each `path`, of any length, has one of its own."""
    # The default pool of 4 words would squeeze the key to 128 bits.
    return np.random.SeedSequence(int.from_bytes(key, "little"), spawn_key=path, pool_size=8)
