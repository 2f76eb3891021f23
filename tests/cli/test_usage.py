"""Wrong usage and failures: one line, the right exit code, before any work."""

import os

import pytest

from services.cli.parser import build_parser
from services.cli.report import complain
from services.speculation.errors import AerieError, Reason
from tests.cli.conftest import one_line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["generate"], "prompt"),
        (["generate", "hi", "--max-tok", "3"], "--max-tok"),
        (["generate", "hi", "--no-such"], "--no-such"),
        (["generate", "hi", "--top-p", "x"], "--top-p"),
        (["generate", "hi", "--top-p", "0"], "--top-p must be"),
        (["generate", "hi", "--top-k", "-1"], "--top-k must be"),
        (["generate", "hi", "--min-p", "1"], "--min-p must be"),
        (["generate", "hi", "--temperature", "nan"], "--temperature must be"),
        (["generate", "hi", "--repetition-penalty", "0"], "--repetition-penalty must be"),
        (["generate", "hi", "--logit-bias", "5"], "--logit-bias"),
        (["generate", "hi", "--logit-bias", "5=nan"], "--logit-bias"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "hi", "--seed", "-1"], "--seed"),
        (["generate", "hi", "--stop", ""], "--stop"),
        (["generate", "hi", "--stop", "x" * 2000], "stop string of 2000"),
        (["generate", "hi", "--target", ""], "--target must not be empty"),
        (["generate", "hi", "--drafter", " "], "--drafter must not be empty"),
        (["generate", "hi", "--threads", "0"], "--threads"),
        (["generate", "hi", "--tree-nodes", "0"], "--tree-nodes must be 1..256"),
        (["generate", "hi", "--tree-nodes", "257"], "--tree-nodes must be 1..256"),
        (["generate", "hi", "--tree-depth", "0"], "--tree-depth must be 1"),
        (["generate", "hi", "--tree-topk", "0"], "--tree-topk must be 1"),
        (["generate", " \n"], "prompt is empty"),
        (["generate", "", "--raw"], "prompt is empty"),
        (["generate", "-"], "prompt is empty"),
        (["generate", "\udcff"], "not UTF-8"),
        (["demo", "hi", "--drafter", "off"], "nothing to compare"),
        (["demo", ""], "prompt is empty"),
        (["bench", "--repetitions", "2"], "--repetitions"),
        (["bench", "--max-tokens", "1"], "--max-tokens"),
        (["bench", "--limit", "0"], "--limit"),
        (["bench", "--json", "/nonexistent/x.json"], "/nonexistent/x.json"),
        (["bench", "--json", "/tmp"], "/tmp"),
        (["bench", "--prompts", "/nonexistent"], "/nonexistent"),
        (["bench", "--prompts", "~nosuchuser/x"], "--prompts"),
        (["bench", "--json", "x" * 300], "--json"),
        (["inspect", ""], "empty"),
        (["inspect", "x", "--target", ""], "empty"),
        (["inspect", "~nosuchuser/x"], "nosuchuser"),
        (["inspect", "x" * 300], "too long"),
    ],
)
def test_wrong_usage_is_one_line_and_2(aerie, arguments, says):
    run = aerie(*arguments)
    assert run.code == 2
    assert says in one_line(run)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate", "hi", "--target", "./nonexistent"], "TARGET_NOT_FOUND"),
        (["generate", "hi", "--target", "~nosuchuser/x"], "TARGET_NOT_FOUND"),
        (["generate", "hi", "--target", "/" + "x" * 300], "TARGET_NOT_FOUND"),
        (["generate", "hi", "--target", "{tiny}", "--drafter", "hass"], "FAMILY_NOT_BUILT"),
        (["generate", "hi", "--target", "{tiny}", "--drafter", "eagle3"], "DRAFTER_UNAVAILABLE"),
        (["generate", "hi", "--target", "{tiny}", "--drafter", "./nonexistent"], "CHECKPOINT_NOT_FOUND"),
        (["inspect", "./nonexistent"], "CHECKPOINT_NOT_FOUND"),
        (["inspect", "hass"], "FAMILY_NOT_BUILT"),
        (["inspect", "eagle3", "--target", "./nonexistent"], "TARGET_NOT_FOUND"),
    ],
)
def test_failures_are_one_line_and_1(aerie, tiny, arguments, reason):
    run = aerie(*(tiny if a == "{tiny}" else a for a in arguments))
    assert run.code == 1
    assert one_line(run).startswith(reason)


def test_prompts_that_are_not_utf8_are_refused(aerie, tmp_path):
    assert "not UTF-8" in one_line(run := aerie("generate", "-", stdin=b"\xff"))
    assert run.code == 2
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    assert "not UTF-8" in one_line(run := aerie("bench", "--prompts", str(tmp_path / "p.jsonl")))
    assert run.code == 2


def test_bench_checks_its_report_before_it_measures_and_leaves_the_old_one(aerie, tmp_path):
    old = tmp_path / "old.json"
    old.write_text("kept")
    new = tmp_path / "new.json"
    for path in (old, new):
        assert aerie("bench", "--json", str(path), "--target", "./nonexistent").code == 1
    assert old.read_text() == "kept"
    assert not new.exists()
    link = tmp_path / "link.json"
    link.symlink_to(new)
    assert aerie("bench", "--json", str(link), "--target", "./nonexistent").code == 1
    assert link.is_symlink()
    assert not new.exists()


def test_a_bug_of_ours_is_an_incident_whose_details_are_in_the_log_alone(aerie, monkeypatch, tmp_path):
    from services.cli import generate

    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(generate, "request_options", fail)
    run = aerie("generate", "hi")
    assert run.code == 1
    message = one_line(run)
    assert message.startswith("INTERNAL: incident ")
    assert "secret" not in run.err
    monkeypatch.setenv("AERIE_LOG", str(tmp_path / "log"))
    incident = one_line(aerie("generate", "hi")).split()[2]
    log = (tmp_path / "log").read_text()
    assert f"incident {incident}" in log
    assert "ZeroDivisionError: secret detail" in log


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            AerieError(Reason.INVALID_ARGUMENT, "top_p must\nbe\x1b[1m so"),
            2,
            "INVALID_ARGUMENT: --top-p must be?[1m so",
        ),
        (AerieError(Reason.PROMPT_EMPTY, "no"), 2, "PROMPT_EMPTY: no"),
        (AerieError(Reason.INTERNAL, "incident 1"), 1, "INTERNAL: incident 1"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied"),
    ],
)
def test_errors_are_folded_to_one_line_with_their_exit_code(aerie, monkeypatch, error, code, message):
    from services.cli import generate

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(generate, "request_options", fail)
    run = aerie("generate", "hi")
    assert run.code == code
    assert one_line(run) == message


@pytest.mark.parametrize(
    "error", [ConnectionError("lost"), TimeoutError("late"), RecursionError("deep"), MemoryError()]
)
def test_what_is_no_answer_of_the_system_is_an_incident(aerie, monkeypatch, error):
    from services.cli import generate

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(generate, "request_options", fail)
    assert one_line(aerie("generate", "hi")).startswith("INTERNAL: incident ")


def test_help_names_every_default(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("(default: 256)", "(default: 0)", "(default: 1, all)", "(default: smollm2)", "(default: auto)"):
        assert default in text
    assert "at 0 these three change nothing" in text


def test_complaints_survive_a_full_terminal(monkeypatch):
    import sys

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert complain("x" * 100_000, 1) == 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what it holds must go somewhere


def test_threads_that_cannot_be_set_warn(aerie, monkeypatch, tiny):
    from kernels import _blas

    monkeypatch.setattr(_blas, "loaded", None)
    run = aerie("generate", "hi", "--target", tiny, "--drafter", "off", "--threads", "1", "--max-tokens", "1")
    assert run.code == 0
    assert "--threads changes nothing" in run.err
