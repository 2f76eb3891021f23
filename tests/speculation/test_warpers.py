import itertools
import math

import numpy as np
import pytest
from scipy.stats import chisquare

from services.speculation.errors import AerieError, Reason
from services.speculation.noise import gumbel
from services.speculation.warpers import Counts, Sampler, choose, log_probs, penalise, warp
from tests.speculation.slow_warpers import INF, slow_penalise, slow_warp, softmax

VOCAB = 40
PROMPT, OUTPUT = (3, 5, 5, 8, 13), (5, 21, 21, 21, 34)

PENALTIES = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"logit_bias": ((2, 4.0), (21, -3.0))},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((5, 1.5), (30, -100.0)),
    },
]
CUTS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product((0.6, 1.0, 1.7), (0, 1, 7), (1.0, 0.5, 0.95), (0.0, 0.2))
]


def random_logits(seed, vocab_size=VOCAB):
    return np.random.default_rng(seed).normal(0, 2.5, vocab_size).astype(np.float32)


def kept(warped):
    return np.flatnonzero(np.isfinite(warped)).tolist()


def logits_of(*probabilities):
    return np.log(np.array(probabilities)).astype(np.float32)


@pytest.mark.parametrize("penalties", PENALTIES)
def test_warp_matches_the_slow_reference_in_every_combination(penalties):
    counts = Counts.of(VOCAB, PROMPT, OUTPUT)
    sizes = set()
    for seed, cuts in itertools.product(range(4), CUTS):
        sampler, logits = Sampler(**penalties, **cuts), random_logits(seed)
        before = logits.copy()
        got, expected = warp(logits, sampler, counts), slow_warp(logits, sampler, PROMPT, OUTPUT)
        assert got.dtype == np.float32
        assert kept(got) == kept(expected), (seed, cuts)
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
        assert (logits == before).all()
        sizes.add(len(kept(got)))
    assert {1, VOCAB} < sizes


@pytest.mark.parametrize("penalties", PENALTIES)
def test_greedy_choice_is_the_argmax_after_bias_and_penalties(penalties):
    sampler, counts = Sampler(**penalties), Counts.of(VOCAB, PROMPT, OUTPUT)
    for seed in range(50):
        logits = random_logits(seed)
        expected = slow_penalise(logits, sampler, PROMPT, OUTPUT)
        np.testing.assert_allclose(penalise(logits, sampler, counts), expected, rtol=1e-6, atol=1e-6)
        assert choose(logits, sampler, None, counts) == expected.index(max(expected))


def test_temperature_zero_still_applies_bias_and_penalties():
    logits = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    counts = Counts.of(4, prompt=(0,), output=(1,))
    assert choose(logits, Sampler(), None, counts) == 0
    assert choose(logits, Sampler(repetition_penalty=4.0), None, counts) == 2
    assert choose(logits, Sampler(presence_penalty=1.5, logit_bias=((0, -2.5),)), None, counts) == 2
    assert choose(logits, Sampler(logit_bias=((3, 9.0),)), None, None) == 3


def test_greedy_ties_go_to_the_smaller_id():
    assert choose(np.array([0.0, 2.0, 2.0, 2.0], np.float32), Sampler(), None) == 1


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(1.0, logit_bias=((0, 2.0),), repetition_penalty=2.0), 0.5),  # (-1 + 2) / 2, not -1 * 2 + 2
        (Sampler(1.0, repetition_penalty=2.0, presence_penalty=1.0), -3.0),  # -1 * 2 - 1, not (-1 - 1) * 2
        (Sampler(1.0, repetition_penalty=2.0, frequency_penalty=1.0), -4.0),  # -1 * 2 - 2: it is there twice
        (Sampler(0.5, presence_penalty=1.0), -4.0),  # (-1 - 1) / 0.5, not -1 / 0.5 - 1
    ],
)
def test_scores_are_moved_in_order(sampler, expected):
    counts = Counts.of(3, prompt=(), output=(0, 0))
    assert warp(np.array([-1.0, 9.0, 9.0], np.float32), sampler, counts)[0] == expected


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(1.0, top_p=0.5), [0, 1]),
        (Sampler(1.0, top_k=2, top_p=0.5), [0]),  # of the two kept, the first has 4/7; before top-k it has 0.4
        (Sampler(1.0, min_p=0.3), [0, 1, 2]),
        (Sampler(0.5, min_p=0.3), [0, 1]),  # (0.2 / 0.4)^2 is below 0.3
        (Sampler(0.5, top_p=0.5), [0]),  # 0.16 / 0.3
        (Sampler(1.0, top_p=0.45, min_p=0.8), [0]),
        (Sampler(1.0, top_k=3, top_p=0.999, min_p=0.6), [0, 1]),
    ],
)
def test_cuts_follow_temperature_and_each_other_in_order(sampler, expected):
    assert kept(warp(logits_of(0.4, 0.3, 0.2, 0.1), sampler)) == expected


def test_ties_at_a_cut_keep_the_smaller_ids():
    logits = np.array([1.0, 2.0, 1.0, 3.0, 1.0, 1.0], np.float32)
    assert kept(warp(logits, Sampler(1.0, top_k=4))) == [0, 1, 2, 3]
    assert kept(warp(logits, Sampler(1.0, top_k=3))) == [0, 1, 3]
    mass = softmax(logits.tolist())
    crossing = mass[3] + mass[1] + 1.5 * mass[0]
    assert kept(warp(logits, Sampler(1.0, top_p=crossing))) == [0, 1, 2, 3]


def test_top_p_keeps_the_token_that_crosses():
    logits = logits_of(0.5, 0.3, 0.2)
    assert kept(warp(logits, Sampler(1.0, top_p=0.4))) == [0]
    assert kept(warp(logits, Sampler(1.0, top_p=0.6))) == [0, 1]
    assert kept(warp(logits, Sampler(1.0, top_p=0.9))) == [0, 1, 2]
    assert kept(warp(logits, Sampler(1.0, top_p=1e-9))) == [0]


def test_top_p_does_not_lose_the_tail_of_a_large_vocabulary():
    """A flat row has no token that stands out: a nucleus of 0.9 is nine tenths of it."""
    assert kept(warp(np.zeros(5000, np.float32), Sampler(1.0, top_p=0.89995))) == list(range(4500))


def test_banned_tokens_stay_banned_in_every_cut():
    logits = np.array([-INF, 1.0, -INF, 0.0], np.float32)
    for sampler in (Sampler(1.0), Sampler(1.0, top_k=3), Sampler(1.0, top_p=0.99), Sampler(1.0, min_p=0.01)):
        assert kept(warp(logits, sampler)) == [1, 3]


def test_counts_tell_prompt_from_output():
    counts = Counts.of(10, (1, 1, 2), (2, 3, 3))
    assert np.flatnonzero(counts.seen).tolist() == [1, 2, 3]
    assert counts.output.tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 0, 0]
    more = counts.plus((3, 7))
    assert np.flatnonzero(more.seen).tolist() == [1, 2, 3, 7]
    assert more.output.tolist() == [0, 0, 1, 3, 0, 0, 0, 1, 0, 0]
    assert counts.output[3] == 2
    assert not counts.seen[7]
    assert counts.plus(()).output.tolist() == counts.output.tolist()


def test_presence_and_frequency_ignore_the_prompt():
    sampler = Sampler(presence_penalty=1.0, frequency_penalty=1.0)
    scores = penalise(np.zeros(3, np.float32), sampler, Counts.of(3, prompt=(0, 0, 1), output=(1, 2, 2)))
    assert scores.tolist() == [0.0, -2.0, -3.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": 1e39},
        {"temperature": 10**400},
        {"repetition_penalty": 1e-50},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 1e39},
        {"presence_penalty": -1e39},
        {"frequency_penalty": 1e300},
        {"temperature": 1e-40},
        {"logit_bias": ((0, 1e39),)},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_k": "3"},
        {"temperature": "1"},
        {"min_p": None},
        {"logit_bias": ((1.5, 1.0),)},
        {"logit_bias": ((1,),)},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_samplers_refuse_wrong_settings(wrong):
    with pytest.raises(AerieError) as refusal:
        Sampler(**wrong)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT


EXTREMES = [
    {"temperature": 1e-5, "repetition_penalty": 1e9, "presence_penalty": 1e9, "frequency_penalty": 1e9},
    {"temperature": 1e-5, "repetition_penalty": 1e-9, "presence_penalty": -1e9, "frequency_penalty": -1e9},
    {"temperature": 1e9, "repetition_penalty": 1e9, "frequency_penalty": 1e9, "logit_bias": ((3, -1e9), (4, 1e9))},
    {"temperature": 1e-5, "repetition_penalty": 1e-9, "logit_bias": ((3, 1e9),) * 100},
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 10**14}, {"top_k": 3, "top_p": 1e-300}, {"min_p": 5e-324}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_nothing_leaves_float32_within_the_limits(extreme, cuts):
    """Prompt and output of a million tokens, logits of a wild model."""
    sampler = Sampler(**extreme, **cuts)
    counts = Counts(np.ones(VOCAB, np.bool_), np.full(VOCAB, 1_000_000, np.int32))
    logits = random_logits(0) * np.float32(1e4)
    assert np.isfinite(penalise(logits, sampler, counts)).all()
    warped = warp(logits, sampler, counts)
    assert not np.isnan(warped).any()
    assert np.isfinite(warped.max())


@pytest.mark.parametrize("token", [-1, 10])
def test_bias_outside_the_vocabulary_is_refused(token):
    with pytest.raises(AerieError) as refusal:
        Sampler(logit_bias=((9, 1.0), (token, 1.0))).check_vocabulary(10)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT
    Sampler(logit_bias=((0, 1.0), (9, 1.0))).check_vocabulary(10)


@pytest.mark.parametrize("settings", [{}, *PENALTIES[1:]])
def test_plain_argmax_holds_only_without_bias_and_penalties(settings):
    assert Sampler(**settings).plain_argmax is (not settings)
    assert not Sampler(temperature=0.5, **settings).plain_argmax


def test_sampling_needs_noise():
    with pytest.raises(ValueError, match="noise"):
        choose(random_logits(0), Sampler(1.0), None)


def test_choose_is_gumbel_max_over_the_warped_logits():
    sampler = Sampler(0.8, top_k=7, top_p=0.9)
    for seed in range(50):
        logits, noise = random_logits(seed), gumbel(seed, 4, VOCAB)
        scores = [a + float(b) for a, b in zip(slow_warp(logits, sampler), noise, strict=True)]
        assert choose(logits, sampler, noise) == scores.index(max(scores))


def test_log_probs_are_a_log_softmax():
    logits = np.stack([random_logits(seed) for seed in range(3)]) + np.float32(500)
    expected = [np.log(softmax(row)) for row in logits.tolist()]
    np.testing.assert_allclose(log_probs(logits), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(log_probs(logits[1]), expected[1], rtol=1e-6, atol=1e-6)


DRAWS = 20_000
SMALL = 12


@pytest.fixture(scope="module")
def noise():
    """Noise of one position under many seeds."""
    return [gumbel(seed, 11, SMALL) for seed in range(DRAWS)]


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(1.0),
        Sampler(0.7),
        Sampler(1.0, top_k=5),
        Sampler(1.3, top_p=0.8),
        Sampler(1.0, min_p=0.15),
        Sampler(0.9, top_k=8, top_p=0.9, min_p=0.05, logit_bias=((4, 1.0),)),
    ],
    ids=["plain", "cooler", "top-k", "top-p", "min-p", "all"],
)
def test_sampled_tokens_follow_the_targets_distribution(sampler, noise):
    logits = np.random.default_rng(5).normal(0, 1.2, SMALL).astype(np.float32)
    probabilities = np.array(softmax(slow_warp(logits, sampler)))
    drawn = np.bincount([choose(logits, sampler, row) for row in noise], minlength=SMALL)
    possible = probabilities > 0
    assert drawn[~possible].sum() == 0
    assert chisquare(drawn[possible], DRAWS * probabilities[possible]).pvalue > 1e-3


def test_sampling_at_many_positions_of_one_seed_follows_the_distribution_too():
    """One session draws along positions, not along seeds."""
    logits = np.random.default_rng(6).normal(0, 1.2, SMALL).astype(np.float32)
    drawn = np.bincount(
        [choose(logits, Sampler(1.0), gumbel(99, position, SMALL)) for position in range(2500)], minlength=SMALL
    )
    assert chisquare(drawn, 2500 * np.array(softmax(logits.tolist()))).pvalue > 1e-3
