"""Summaries against values worked out by hand, and the comparison of every repetition."""

from types import SimpleNamespace

import pytest

from services.bench import runner
from services.bench.prompts import Prompt
from services.bench.results import Options, PromptResult, Timing, summarise
from services.bench.runner import compare_all, run_benchmark
from services.speculation.exactness import Agreement


def result(kind="chat", distinct=1.0, tau=2.0, **arms):
    timings = {arm: [Timing(pace, 10 / (pace or 1), 20 / (pace or 1)) for pace in paces] for arm, paces in arms.items()}
    return PromptResult(kind, "p", 10, distinct, "identical", True, tau, timings)


def test_summary_of_ratios_of_medians():
    results = [
        result("chat", 1.0, 2.0, plain=[10, 20, 30], speculative=[10, 40, 90], mlx_lm=[10, 10, 10]),  # 2, 4, 2
        result("code", 0.8, 4.0, plain=[10, 10, 40], speculative=[80, 1, 90], mlx_lm=[5, 5, 5]),  # 8, 16, 2
    ]
    summary = summarise(results)
    assert list(summary) == ["all", "not looping", "chat", "code"]
    everything = summary["all"]
    assert everything["prompts"] == 2
    assert everything["speculative_over_plain"] == {"mean": pytest.approx(4), "min": 2, "max": 8}
    assert everything["speculative_over_mlx_lm"] == {"mean": pytest.approx(8), "min": 4, "max": 16}
    assert everything["plain_over_mlx_lm"] == {"mean": pytest.approx(2), "min": 2, "max": 2}
    assert everything["plain_tokens_per_second"] == 15  # of medians 20 and 10
    assert everything["plain_first_seconds"] == pytest.approx((0.5 + 1) / 2)
    assert everything["plain_total_seconds"] == pytest.approx((1 + 2) / 2)
    assert everything["acceptance_length"] == 3
    assert summary["not looping"]["prompts"] == summary["chat"]["prompts"] == 1
    assert summary["code"]["speculative_over_plain"]["mean"] == pytest.approx(8)


def test_answers_without_a_pace_are_left_out():
    good = result(plain=[10], speculative=[30])
    assert summarise([result("code", plain=[0], speculative=[0]), good]) == summarise([good])
    assert summarise([result(plain=[10], speculative=[0])]) == {}
    assert summarise([]) == {}


def test_groups_of_arms_that_did_not_run_are_absent():
    row = summarise([result(plain=[10])])["all"]
    assert set(row) == {"prompts", "plain_tokens_per_second", "plain_first_seconds", "plain_total_seconds"}


def test_kinds_that_are_called_like_a_group_do_not_replace_it():
    summary = summarise([result("all", plain=[10]), result("code", plain=[10])])
    assert {group: row["prompts"] for group, row in summary.items()} == {
        "all": 2,
        "not looping": 2,
        "kind all": 1,
        "code": 1,
    }


def test_the_worst_repetition_decides(monkeypatch):
    verdicts = {(1,): Agreement(True), (2,): Agreement(False, tie_at=0), (3,): Agreement(False, differs_at=0)}
    monkeypatch.setattr(runner, "compare_runs", lambda engine, request, plain, other, seed: verdicts[other])
    runs = {n: SimpleNamespace(token_ids=(n,), seed=0) for n in (1, 2, 3)}

    def worst(*numbers):
        return compare_all(None, None, runs[1], [runs[n] for n in numbers])

    assert worst() == worst(1, 1) == verdicts[(1,)]
    assert worst(1, 2, 1) == worst(2, 1) == verdicts[(2,)]
    assert worst(3, 2, 1) == worst(1, 3, 1) == worst(2, 3) == verdicts[(3,)]


def test_a_repetition_that_differs_is_found_wherever_it_is(tiny, monkeypatch):
    real, calls = tiny.run_all, []

    def flip(requests):
        results = real(requests)
        calls.append(requests[0].drafter)
        if calls.count("auto") == 2 and calls[-1] == "auto":  # the first measured one: another warms up
            ids = results[0].token_ids
            results[0] = SimpleNamespace(**{**vars(results[0]), "token_ids": (*ids[:2], (ids[2] + 1) % 290, *ids[3:])})
        return results

    monkeypatch.setattr(tiny, "run_all", flip)
    told = []
    options = Options(max_tokens=6, repetitions=3, baseline=False)
    (found,) = run_benchmark(tiny, "", [Prompt("chat", "hi")], options, told.append)
    assert told == [found]
    assert (found.agrees, found.agreement) == (False, "DIFFERENT at token 2")
    assert {arm: len(timings) for arm, timings in found.arms.items()} == {"plain": 3, "speculative": 3}
