import itertools

import numpy as np
import pytest

from services.speculation.exactness import EPSILON_FLOAT32, EPSILON_HALF, Agreement, compare, is_tie
from services.speculation.noise import gumbel
from services.speculation.warpers import Counts, Sampler
from tests.speculation.slow_warpers import INF, slow_penalise, slow_warp

VOCAB = 5
EPSILON = 0.1
PROMPT, OUTPUT = (0,), (1, 1)
CORNERS = [np.array(corner) / 2 for corner in itertools.product((-1, 1), repeat=VOCAB)]
ZEROS = np.zeros(4, np.float32)


def chosen(logits, sampler, noise):
    if sampler.greedy:
        scores = slow_penalise(logits, sampler, PROMPT, OUTPUT)
    else:
        scores = np.array(slow_warp(logits, sampler, PROMPT, OUTPUT)) + noise
    return int(np.argmax(scores))


def flips(logits, sampler, noise, epsilon):
    """Whether some move of the raw logits by ``epsilon / 2`` each changes the token."""
    winner = chosen(logits, sampler, noise)
    return any(chosen(logits + epsilon * corner, sampler, noise) != winner for corner in CORNERS)


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(),
        Sampler(presence_penalty=1.0, logit_bias=((2, 1.0),)),
        Sampler(1.0),
        Sampler(0.5),
        Sampler(2.0),
        Sampler(0.6, top_k=1),
        Sampler(0.6, top_k=2),
        Sampler(1.0, top_k=4),
        Sampler(1.0, top_p=0.5),
        Sampler(0.5, top_p=0.8),
        Sampler(1.0, top_p=0.05),
        Sampler(1.0, min_p=0.3),
        Sampler(0.6, min_p=0.7),
        Sampler(1.0, min_p=0.95),
        Sampler(0.7, top_k=3, top_p=0.8, min_p=0.1),
        Sampler(0.7, top_k=3, top_p=0.8, frequency_penalty=0.5),
    ],
)
def test_ties_are_the_positions_that_a_move_of_the_logits_decides(sampler):
    counts = Counts.of(VOCAB, PROMPT, OUTPUT)
    ties = 0
    for seed in range(80):
        logits = np.random.default_rng(seed).normal(0, 1, VOCAB).astype(np.float32)
        noise = gumbel(seed, 0, VOCAB)
        tie = is_tie(logits, sampler, None if sampler.greedy else noise, counts, EPSILON)
        ties += tie
        # Never missed; and never called where twice the move changes nothing.
        if flips(logits, sampler, noise, 0.999 * EPSILON):
            assert tie, seed
        if not flips(logits, sampler, noise, 2 * EPSILON):
            assert not tie, seed
    assert 0 < ties < 40


def test_a_greedy_tie_is_a_small_gap():
    assert is_tie(np.array([1.0, 0.0, 1.0009], np.float32), Sampler(), None, None)
    assert not is_tie(np.array([1.0, 0.0, 1.0011], np.float32), Sampler(), None, None)
    assert is_tie(np.array([1.0, 0.0, 1.0011], np.float32), Sampler(), None, None, EPSILON_HALF)
    assert (EPSILON_FLOAT32, EPSILON_HALF) == (1e-3, 0.25)


def test_a_greedy_gap_is_taken_after_penalties():
    logits = np.array([2.0, 0.0, 1.0], np.float32)
    counts = Counts.of(3, (), (0,))
    assert not is_tie(logits, Sampler(presence_penalty=0.5), None, counts)
    assert is_tie(logits, Sampler(presence_penalty=1.0), None, counts)


@pytest.mark.parametrize(("penalty", "seen", "other"), [(4.0, -1.0, -4.0), (0.25, 1.0, 4.0)])
def test_a_repetition_penalty_stretches_the_error_of_a_logit(penalty, seen, other):
    """-1 * 4 and 1 / 0.25: a move of 0.0005 in the logit moves the score by 0.002."""
    sampler, counts = Sampler(repetition_penalty=penalty), Counts.of(2, (0,))
    assert is_tie(np.array([seen, other - 0.003], np.float32), sampler, None, counts)
    assert not is_tie(np.array([seen, other - 0.005], np.float32), sampler, None, counts)


@pytest.mark.parametrize(("temperature", "tie"), [(0.5, True), (1.0, True), (2.0, False)])
def test_a_sampled_gap_counts_times_the_temperature(temperature, tie):
    """The scores are 0.06 apart: a move of 0.1 in logits is 0.2, 0.1 and 0.05 of it."""
    noise = np.array([0.06, 0.0, -50.0, -50.0], np.float32)
    assert is_tie(ZEROS, Sampler(temperature), noise, None, EPSILON) is tie


def test_the_winner_of_a_cut_far_away_is_no_tie():
    """The last token kept wins, and the next one is far below it."""
    logits, noise = np.array([3.0, 2.0, -3.0, -4.0], np.float32), np.array([0.0, 5.0, 0.0, 0.0], np.float32)
    assert not is_tie(logits, Sampler(1.0, top_k=2), noise, None, EPSILON)
    assert not is_tie(logits, Sampler(1.0, top_k=1), noise, None, EPSILON)
    assert not is_tie(logits, Sampler(1.0, top_p=0.9), noise, None, EPSILON)
    assert not is_tie(logits, Sampler(1.0, min_p=0.1), noise, None, EPSILON)


@pytest.mark.parametrize(
    "sampler",
    [Sampler(1.0, top_k=2), Sampler(1.0, top_p=0.7), Sampler(1.0, min_p=0.5), Sampler(1.0, top_k=2, top_p=0.99)],
    ids=["top-k", "top-p", "min-p", "both"],
)
@pytest.mark.parametrize("side", [-1, 1])
def test_the_winner_at_a_cut_is_a_tie_on_either_side_of_it(sampler, side):
    """Noise would have token 2 win, wherever the cut lets it in; it stands a hair on one side of the cut."""
    second = {2: 1.0, 0: None}[sampler.top_k]
    if second is not None:
        logits = np.array([2.0, second, second + side * 0.03, -9.0], np.float32)
    elif sampler.min_p:
        logits = np.array([0.0, -5.0, np.log(0.5) + side * 0.03, -9.0], np.float32)
    else:
        # Token 2 comes second, or third behind token 1: before it comes a mass of 0.7, give or take.
        share = 0.7 - side * 0.005
        logits = np.log(np.array([share, 1e-6, 1 - share, 1e-6])).astype(np.float32)
    noise = np.array([0.0, 0.0, 9.0, -9.0], np.float32)
    assert is_tie(logits, sampler, noise, None, EPSILON)
    assert not is_tie(logits, sampler, noise, None, 1e-4)


def test_a_swap_of_the_best_two_is_a_tie_in_a_nucleus_of_one():
    logits, noise = np.array([1.0, 1.01, -2.0, -2.0], np.float32), np.array([9.0, 0.0, 0.0, 0.0], np.float32)
    assert is_tie(logits, Sampler(1.0, top_p=0.1), noise, None, EPSILON)
    assert is_tie(logits, Sampler(1.0, top_k=1, top_p=0.5, min_p=0.5), noise, None, EPSILON)


def test_banned_tokens_are_no_rivals():
    logits = np.array([1.0, -INF, -INF], np.float32)
    assert not is_tie(logits, Sampler(), None, None)
    assert not is_tie(logits, Sampler(1.0, top_p=0.5, min_p=0.5), np.zeros(3, np.float32), None)


def test_runs_agree_when_they_differ_first_at_a_tie():
    asked = []

    def tie_test(index):
        asked.append(index)
        return index == 2

    assert compare([1, 2, 3], [1, 2, 3], tie_test) == Agreement(identical=True)
    assert compare([], [], tie_test) == Agreement(identical=True)
    assert asked == []
    assert compare([1, 2, 3, 4], [1, 2, 9, 8], tie_test) == Agreement(False, tie_at=2)
    assert compare([1, 2, 3, 4], [1, 7, 9, 8], tie_test) == Agreement(False, differs_at=1)
    assert asked == [2, 1]
    assert compare([1, 2, 3], [1, 2], tie_test) == Agreement(False, differs_at=2)
    assert compare([1], [1, 2], tie_test) == Agreement(False, differs_at=1)


def test_agreement_says_what_it_found():
    assert Agreement(True).agrees
    assert Agreement(False, tie_at=0).agrees
    assert not Agreement(False, differs_at=0).agrees
    assert str(Agreement(True)) == "identical"
    assert str(Agreement(False, tie_at=3)) == "identical up to a tie at token 3"
    assert str(Agreement(False, differs_at=0)) == "DIFFERENT at token 0"
