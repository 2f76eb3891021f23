"""The losslessness check on a tiny target: full batches, ties and differences counted where runs part."""

from dataclasses import replace

import pytest

from services.bench import lossless
from services.bench.lossless import NEIGHBOURS, SAMPLERS, run_arm, run_plain, verify
from services.bench.prompts import read_prompts
from services.speculation.exactness import Agreement

PROMPTS = read_prompts()[::3]
TOKENS = 10


@pytest.fixture
def batches(tiny, monkeypatch):
    """Sizes of the batches of requests that ran."""
    sizes, real = [], tiny.run_all

    def record(requests):
        sizes.append(len(requests))
        return real(requests)

    monkeypatch.setattr(tiny, "run_all", record)
    return sizes


@pytest.mark.parametrize("drafter", ["random", "root"])
@pytest.mark.parametrize("sampler", ["greedy", "t1.0", "t1.0 top-k 40"])
@pytest.mark.parametrize("batch", [1, NEIGHBOURS])
def test_arms_agree(tiny, sampler, drafter, batch):
    plain = run_plain(tiny, PROMPTS, SAMPLERS[sampler], TOKENS)
    arm = run_arm(tiny, PROMPTS, plain, sampler, drafter, batch, TOKENS)
    assert (arm.prompts, arm.differences) == (8, [])
    assert arm.identical + len(arm.ties) == 8
    assert (arm.lost, arm.rounds > 0) == (0, True)


def test_every_session_has_seven_neighbours(tiny, batches):
    plain = run_plain(tiny, PROMPTS[:3], SAMPLERS["greedy"], TOKENS)
    run_arm(tiny, PROMPTS[:3], plain, "greedy", "root", NEIGHBOURS, TOKENS)
    run_arm(tiny, PROMPTS[:3], plain, "greedy", "root", 1, TOKENS)
    assert batches == [8, 8, 1, 1, 1]
    assert len(plain) == 3


def test_tokens_count_up_to_where_runs_part(tiny, monkeypatch):
    plain = run_plain(tiny, PROMPTS[:3], SAMPLERS["greedy"], TOKENS)
    verdicts = iter([Agreement(True), Agreement(False, tie_at=2), Agreement(False, differs_at=4)])
    monkeypatch.setattr(lossless, "compare_runs", lambda *_: next(verdicts))
    arm = run_arm(tiny, PROMPTS[:3], plain, "greedy", "root", 1, TOKENS)
    assert arm.tokens == len(plain[0].token_ids) + 3 + 5
    assert (arm.identical, arm.ties, arm.differences) == (1, [{"prompt": 1, "token": 2}], [{"prompt": 2, "token": 4}])


def test_a_wrong_token_is_a_difference(tiny):
    plain = run_plain(tiny, PROMPTS[:1], SAMPLERS["greedy"], TOKENS)
    ids = plain[0].token_ids
    wrong = [replace(plain[0], token_ids=(*ids[:3], (ids[3] + 1) % 290, *ids[4:]))]
    arm = run_arm(tiny, PROMPTS[:1], wrong, "greedy", "root", 1, TOKENS)
    assert arm.differences == [{"prompt": 0, "token": 3}]
    assert arm.tokens == 4


@pytest.fixture
def tiny_check(tiny, monkeypatch):
    """``verify`` on the tiny target, for which there is no EAGLE-3 drafter."""

    class Kept:
        __enter__ = staticmethod(lambda: tiny)
        __exit__ = staticmethod(lambda *_: None)

    monkeypatch.setattr(lossless, "load_engine", Kept)
    monkeypatch.setattr(
        lossless, "DRAFTERS", {"random": lossless.DRAFTERS["random"], "root": lossless.DRAFTERS["root"]}
    )
    monkeypatch.setattr(lossless, "FEW_DRAFTERS", ("random",))


def test_verify_runs_the_full_settings_on_all_prompts_alone_and_in_batches(tiny_check, batches):
    report = verify(PROMPTS, 8, few=2, few_tokens=6)
    full = {(a["sampler"], a["drafter"], a["batch"]) for a in report["arms"] if a["prompts"] == len(PROMPTS)}
    assert full == {(s, d, b) for s in ("greedy", "t1.0") for d in ("random", "root") for b in (1, 8)}
    few = {(a["sampler"], a["drafter"], a["batch"]) for a in report["arms"] if a["prompts"] == 2}
    assert few == {(s, "random", 8) for s in SAMPLERS if s not in ("greedy", "t1.0")}
    assert set(batches) == {1, 8}
    assert report["tokens"] == sum(a["tokens"] for a in report["arms"])
    assert report["passed"] is True


@pytest.mark.parametrize("wrong", ["difference", "ties", "lost"])
def test_verify_fails_for_a_difference_too_many_ties_or_a_lost_drafter(tiny_check, monkeypatch, wrong):
    def arm(engine, prompts, plain, sampler, drafter, batch, length):
        made = lossless.Arm(sampler, drafter, batch, tokens=1000, prompts=1, identical=1, rounds=100)
        if (sampler, drafter, batch) == ("greedy", "root", 1):
            made.differences = [{"prompt": 0, "token": 0}] if wrong == "difference" else []
            made.ties = [{"prompt": 0, "token": 0}] * (3 if wrong == "ties" else 1)
            made.lost = int(wrong == "lost")
        return made

    monkeypatch.setattr(lossless, "run_arm", arm)
    assert verify(PROMPTS, 2, few=1, few_tokens=1)["passed"] is False
    wrong = ""
    assert verify(PROMPTS, 2, few=1, few_tokens=1)["passed"] is True  # 12 000 tokens may have one tie


def test_the_shipped_plan_covers_what_the_gate_asks_for():
    assert set(lossless.DRAFTERS) == {"eagle3", "random", "root"}
    assert lossless.FULL == ("greedy", "t1.0")
    assert lossless.MAX_TIES == 1e-4
    assert NEIGHBOURS == 8


def test_a_report_that_cannot_be_written_is_refused_first(tiny_check, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lossless", "--out", "/nonexistent/x.json"])
    with pytest.raises(SystemExit) as caught:
        lossless.main()
    assert caught.value.code == 1
    assert "/nonexistent/x.json" in capsys.readouterr().err
