import math

import numpy as np
import pytest

from services.speculation.noise import choice_seed, gumbel, philox, token_words

MASK = 0xFFFFFFFF
SEEDS = [0, 1, 0xDEADBEEF, 2**63 + 12345, 2**64 - 1]


def slow_philox(counter, key):
    """Philox4x32-10 as its paper writes it, in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def slow_words(seed, position, vocab_size):
    key = (seed & MASK, seed >> 32)
    return [slow_philox((token // 4, position, 0, 0), key)[token % 4] for token in range(vocab_size)]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter, key, words):
    low, high = (int(word, 16) for word in key.split())
    got = philox(np.array([int(word, 16) for word in counter.split()], np.uint32), (low, high))
    assert got.dtype == np.uint32
    assert [f"{word:08x}" for word in got.tolist()] == words.split()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [0, 1, 8191, 2**31])
def test_words_are_counted_by_token_and_position(seed, position):
    assert token_words(seed, position, 37).tolist() == slow_words(seed, position, 37)


@pytest.mark.parametrize("seed", SEEDS)
def test_gumbel_matches_the_formula_in_float64(seed):
    words = slow_words(seed, 17, 2000)
    # v is a float32 by definition: next to 1 its rounding decides the noise.
    v = [min(float(np.float32((word + 0.5) * 2.0**-32)), 1 - 2.0**-24) for word in words]
    expected = np.array([-math.log(-math.log1p(-x)) for x in v])
    got = gumbel(seed, 17, 2000)
    assert got.dtype == np.float32
    assert np.isfinite(got).all()
    assert (np.abs(got - expected) <= 1e-6 * np.maximum(1, np.abs(expected))).all()


@pytest.mark.parametrize("word", [0, MASK])
def test_gumbel_is_finite_at_both_ends(word, monkeypatch):
    """The extreme words are too rare to meet: put them in."""
    monkeypatch.setattr("services.speculation.noise.token_words", lambda *_: np.array([word], np.uint32))
    v = 2.0**-33 if word == 0 else 1 - 2.0**-24
    assert gumbel(0, 0, 1)[0] == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 999])
def test_noise_of_a_token_does_not_depend_on_the_vocabulary(size):
    assert gumbel(3, 5, size).tolist() == gumbel(3, 5, 1000)[:size].tolist()


def test_noise_differs_between_positions_seeds_and_tokens():
    rows = [gumbel(seed, position, 64) for seed in (1, 2, 1 << 32) for position in (0, 1)]
    values = np.concatenate(rows)
    assert len(set(values.tolist())) == len(values)


@pytest.mark.parametrize("seed", SEEDS)
def test_choice_seeds_are_two_words_low_first(seed):
    for choice in range(5):
        words = slow_philox((choice, 0, 1, 0), (seed & MASK, seed >> 32))
        assert choice_seed(seed, choice) == words[0] + (words[1] << 32)


def test_choice_seeds_differ():
    seeds = {choice_seed(seed, choice) for seed in (0, 1) for choice in range(100)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**64 for seed in seeds)
