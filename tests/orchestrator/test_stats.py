"""Figures against values computed by hand."""

from dataclasses import replace

import pytest

from services.orchestrator.stats import Stats
from services.speculation.messages import Drafted, Features, Prefilled, Verdict
from services.speculation.trees import DraftTree


def verdict(tokens, seconds):
    path = tuple(range(len(tokens)))
    return Verdict("s", 0, 0, 0, path, tokens, None, Features(0, {}), seconds)


@pytest.fixture
def stats(monkeypatch):
    """Prompt of 5. First token at 10.0 s, then rounds of 3, 1, 4 and 2 tokens; the last at 12.5 s."""
    clock = iter([9.0, 10.0, 10.5, 11.0, 12.0, 12.5])
    monkeypatch.setattr("services.orchestrator.stats.time.perf_counter", lambda: next(clock))
    made = Stats(prompt_tokens=5, started=next(clock))
    made.on_prefilled(Prefilled("s", 0, 1, None, 0.75))
    for tokens, drafting, verifying in (
        ((1, 2, 3), 0.125, 0.25),
        ((4,), 0.125, 0.25),
        ((5, 6, 7, 8), 0.25, 0.5),
        ((9, 10), 0.0, 0.25),
    ):
        if drafting:
            made.on_drafted(Drafted("s", 0, 0, 0, DraftTree.root(1), drafting), drafting + 0.0625)
        made.on_verdict(verdict(tokens, verifying), verifying + 0.125)
    return made


def test_lengths_and_rounds(stats):
    # 1 + 3 + 1 + 4 + 2 tokens.
    assert stats.usage() == {"prompt_tokens": 5, "completion_tokens": 11}
    assert (stats.rounds, stats.drafted_rounds, stats.accepted) == (4, 3, [2, 0, 3, 1])


def test_speed_leaves_out_the_first_token_and_the_time_to_it(stats):
    # 10 tokens after the first, in 12.5 - 10.0 s.
    assert stats.decode_seconds == 2.5
    assert stats.tokens_per_second == 10 / 2.5


def test_acceptance(stats):
    # (3 + 1 + 4 + 2) / 4 tokens a round.
    assert stats.acceptance_length == 2.5
    # Of 4 rounds, 3 accepted at depth 1; of these, 2 at depth 2; of these, 1 at depth 3.
    assert stats.acceptance_by_depth == [3 / 4, 2 / 3, 1 / 2]


def test_overhead_is_the_time_that_neither_side_reports(stats):
    report = stats.report()
    # 2.5 - (0.125 + 0.125 + 0.25) - (0.25 + 0.25 + 0.5 + 0.25) s.
    assert report["overhead_seconds"] == 0.75
    assert (report["draft_seconds"], report["verify_seconds"], report["prefill_seconds"]) == (0.5, 1.25, 0.75)
    stats.verify_seconds += 10  # clocks of two services: never below 0
    assert stats.report()["overhead_seconds"] == 0.0


def test_time_between_a_message_and_its_answer_is_compute_queue_or_network():
    stats = Stats(prompt_tokens=5)
    stats.on_drafted(Drafted("s", 0, 0, 0, DraftTree.root(1), 0.5, queue_seconds=0.25), wait=1.0)
    stats.on_verdict(replace(verdict((1,), 2.0), queue_seconds=0.5), wait=3.0)
    report = stats.report()
    # Waits of 1 and 3 s, of which 0.5 + 2 are compute and 0.25 + 0.5 queue.
    assert (report["queue_seconds"], report["network_seconds"]) == (0.75, 0.75)
    stats.on_verdict(verdict((1,), 2.0), wait=1.0)  # clocks differ: never below 0
    assert stats.network_seconds == 0.75


def test_nothing_yet_is_zero():
    empty = Stats(prompt_tokens=5)
    assert (empty.decode_seconds, empty.tokens_per_second, empty.acceptance_length) == (0.0, 0.0, 0.0)
    assert empty.acceptance_by_depth == []
    empty.on_prefilled(Prefilled("s", 0, 1, "length", 0.75))
    assert (empty.completion_tokens, empty.tokens_per_second, empty.report()["overhead_seconds"]) == (1, 0.0, 0.0)


def test_nothing_accepted_has_no_depths_and_a_length_of_one():
    plain = Stats(prompt_tokens=5)
    for _ in range(3):
        plain.on_verdict(verdict((1,), 0.25), 0.25)
    assert (plain.acceptance_length, plain.acceptance_by_depth) == (1.0, [])


def test_a_snapshot_stays(stats):
    before = stats.snapshot()
    stats.accepted.append(9)
    stats.completion_tokens = 0
    assert (before.accepted, before.completion_tokens) == ([2, 0, 3, 1], 11)
