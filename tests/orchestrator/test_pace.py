"""Deadlines of drafts against RFC 6298's estimator, worked out by hand."""

import pytest

from services.orchestrator.pace import FIRST_SECONDS, LEAST_SECONDS, DraftPace


def test_without_an_answer_the_deadline_is_generous():
    assert DraftPace().deadline == FIRST_SECONDS


def test_mean_and_deviation_follow_the_answers():
    pace = DraftPace()
    pace.observe(0.4)
    assert (pace.mean, pace.deviation) == (0.4, 0.2)
    assert pace.deadline == pytest.approx(0.4 + 4 * 0.2)
    pace.observe(0.8)
    # deviation 3/4 * 0.2 + 1/4 * |0.8 - 0.4|, then mean 7/8 * 0.4 + 1/8 * 0.8
    assert pace.deviation == pytest.approx(0.25)
    assert pace.mean == pytest.approx(0.45)


def test_no_deadline_is_shorter_than_a_hiccup():
    pace = DraftPace()
    for _ in range(100):
        pace.observe(0.002)
    assert pace.deadline == LEAST_SECONDS
