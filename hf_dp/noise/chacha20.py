"""Noise from the ChaCha20 stream cipher, through the package randomgen."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from hf_dp.errors import ConfigurationError
from hf_dp.noise.source import NoiseSource
from hf_dp.randomness import Entropy

# The first bytes under a key of zeros (draft-agl-tls-chacha20poly1305-04, section 7, the first test vector).
_KNOWN = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


class ChaCha20Noise(NoiseSource):
    """The key stream of ChaCha20 (Bernstein 2008), a 256-bit key for each stream, on any device made on the CPU.

    Who knows all of a stream but a few numbers, as one may who knows all examples but one, can tell nothing of these
    without breaking the cipher. Keys are BLAKE2b hashes of the call's key and the path, and each stream begins at
    counter 0: no two share key and counter.

    Raises:
        ConfigurationError: randomgen is not installed, or its ChaCha is not that cipher.
    """

    def __init__(self, entropy: Entropy) -> None:
        super().__init__(entropy)
        self._cipher = _cipher()

    def bits(self, key: bytes, path: tuple[int, ...]) -> np.random.BitGenerator:
        """ChaCha20."""
        derived = hashlib.blake2b(repr(path).encode(), key=key, digest_size=32).digest()
        return _stream(self._cipher, derived)


def _stream(cipher: Any, key: bytes) -> np.random.BitGenerator:
    stream: np.random.BitGenerator = cipher(key=int.from_bytes(key, "little"), counter=0, rounds=20)
    return stream


def _cipher() -> Any:
    """randomgen's class of bit generators, held against the cipher."""
    try:
        from randomgen import ChaCha
    except ImportError as error:
        raise ConfigurationError(
            "noise='chacha20' or 'grid' without the package randomgen, which has the cipher.",
            why="noise from another generator would not be what was promised.",
            fix="pip install 'randomgen>=2.0,<3' (the extra 'secure'), or leave noise out.",
        ) from error
    found = np.asarray(_stream(ChaCha, bytes(32)).random_raw(4)).astype("<u8").tobytes()
    if found != _KNOWN:
        raise ConfigurationError(
            f"noise='chacha20' or 'grid' with a randomgen whose ChaCha begins with {found[:8].hex()} under a key of "
            "zeros.",
            why=f"ChaCha20 begins with {_KNOWN[:8].hex()} (its published test vector): this is another generator.",
            fix="install a version that was tested: pip install 'randomgen>=2.0,<3' (the extra 'secure').",
        )
    return ChaCha
