"""Seeded noise: Philox4x32-10 in integers, Gumbel in float32.

Counter-based, so the noise of a token at a position needs no state and is the same on every backend
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)

PURPOSE_TOKEN = 0
PURPOSE_CHOICE = 1


def philox(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox4x32-10 of counters [..., 4] under one key (low, high): words [..., 4], uint32."""
    x0, x1, x2, x3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (p1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0),
            p1 & _LOW,
            ((p0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1)),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)


def split_seed(seed: int) -> tuple[int, int]:
    """Low and high half of a 64-bit seed: the Philox key."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def token_words(seed: int, position: int, vocab_size: int) -> NDArray[np.uint32]:
    """[vocab_size] uint32: the random word of every target token id at one position."""
    blocks = -(-vocab_size // 4)
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, 1] = position
    counter[:, 2] = PURPOSE_TOKEN
    return philox(counter, split_seed(seed)).reshape(-1)[:vocab_size]


def gumbel(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """[vocab_size] float32 standard Gumbel noise: ``-log(-log1p(-v))``, ``v = min((b + 1/2) 2^-32, 1 - 2^-24)``."""
    words = token_words(seed, position, vocab_size)
    v = ((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    v = np.minimum(v, np.float32(1 - 2.0**-24))
    noise: NDArray[np.float32] = -np.log(-np.log1p(-v))
    return noise


def choice_seed(seed: int, choice: int) -> int:
    """64-bit seed of choice ``choice`` of ``n`` parallel completions; choice 0 of 1 keeps its own seed."""
    words = philox(np.array([choice, 0, PURPOSE_CHOICE, 0], np.uint32), split_seed(seed))
    return int(words[0]) | int(words[1]) << 32
