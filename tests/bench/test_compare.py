"""Agreement of runs, and how much an answer repeats itself, against values worked out by hand."""

import numpy as np
import pytest

from services.bench.compare import compare_runs, last_logits
from services.bench.results import distinct_share
from services.speculation.exactness import Agreement
from services.speculation.warpers import Sampler
from tests import plain
from tests.tiny import load_plain

PROMPT = tuple(range(40, 60))


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 1.0),
        ([1, 2, 3], 1.0),
        ([1, 2, 3, 4], 1.0),
        ([1, 1, 1, 1, 1], 0.5),  # two 4-grams, one distinct
        ([1, 2, 1, 2, 1, 2, 1], 0.5),  # 1212 2121 1212 2121
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], 5 / 6),
    ],
)
def test_distinct_share(tokens, share):
    assert distinct_share(tokens) == pytest.approx(share)


def test_last_logits_are_those_of_mlx_lm(tiny, folder):
    expected = plain.decode(load_plain(folder), PROMPT, 1).logits[0]
    found = tiny.on_device(lambda: last_logits(tiny, PROMPT))
    assert plain.relative_error(found[None], expected[None]) < 1e-4


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, repetition_penalty=1.2)])
def test_a_changed_token_is_a_difference_where_it_was_changed(tiny, folder, sampler):
    request = tiny.request(PROMPT, sampler=sampler, seed=5, max_tokens=12)
    tokens = tuple(plain.decode(load_plain(folder), PROMPT, 12, sampler, 5).tokens)
    assert compare_runs(tiny, request, tokens, tokens, 5) == Agreement(True)
    changed = (*tokens[:7], (tokens[7] + 1) % 290, *tokens[8:])
    assert compare_runs(tiny, request, tokens, changed, 5) == Agreement(False, differs_at=7)
    assert compare_runs(tiny, request, tokens, tokens[:9], 5) == Agreement(False, differs_at=9)


def test_a_token_that_rounding_can_choose_is_a_tie(tiny, folder):
    logits = plain.decode(load_plain(folder), PROMPT, 1).logits[0].astype(np.float64)
    second, first = np.argsort(logits)[-2:]
    for nudge, expected in ((5e-4, Agreement(False, tie_at=0)), (5e-3, Agreement(False, differs_at=0))):
        # A bias that leaves the best two this far apart.
        bias = ((int(second), float(logits[first] - logits[second] - nudge)),)
        request = tiny.request(PROMPT, sampler=Sampler(logit_bias=bias), max_tokens=1)
        assert compare_runs(tiny, request, [int(first)], [int(second)], 0) == expected
