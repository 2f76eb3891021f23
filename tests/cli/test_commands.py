"""What each command prints, on tiny checkpoints."""

import json
import shutil

import pytest

from services.embedded import Engine
from services.orchestrator.stats import Stats
from services.speculation.errors import AerieError, Reason
from tests.cli.conftest import one_line
from tests.tiny import tiny_tokenizer


def test_json_answer_has_ids_depths_usage_and_times(aerie, tiny, drafter):
    run = aerie("generate", "hi", "--target", tiny, "--drafter", drafter, "--max-tokens", "9", "--json", "--seed", "3")
    assert (run.code, run.err) == (0, "")
    answer = json.loads(run.out)
    assert set(answer) == {"text", "token_ids", "depths", "finish_reason", "seed", "usage", "stats"}
    assert len(answer["token_ids"]) == len(answer["depths"]) == answer["usage"]["completion_tokens"] == 9
    assert answer["text"] == tiny_tokenizer().decode(answer["token_ids"])
    assert (answer["finish_reason"], answer["seed"]) == ("length", 3)
    assert answer["depths"][0] == 0
    # The drafter changes nothing, and neither does the tree; a plain token is always the target's own.
    for other in (["--drafter", "off"], ["--drafter", drafter, "--tree-nodes", "1"], ["--drafter", drafter, "--raw"]):
        run = aerie("generate", "hi", "--target", tiny, *other, "--max-tokens", "9", "--json")
        same = json.loads(run.out)["token_ids"] == answer["token_ids"]
        assert same == ("--raw" not in other)


def test_streamed_text_is_the_text_of_the_json(aerie, tiny):
    options = ("generate", "hi", "--target", tiny, "--drafter", "off", "--max-tokens", "9")
    text = json.loads(aerie(*options, "--json").out)["text"]
    assert aerie(*options).out == text + "\n"
    assert aerie("generate", "-", *options[2:], stdin=b"hi").out == text + "\n"


def test_off_is_silent_and_auto_without_a_drafter_says_so_in_one_line(aerie, tiny):
    options = ("generate", "hi", "--target", tiny, "--max-tokens", "2")
    assert aerie(*options, "--drafter", "off").err == ""
    assert aerie(*options).err == "aerie: no drafter fits the target: decoding plainly\n"


def test_targets_without_a_chat_template_ask_for_raw(aerie, bare):
    options = ("--target", bare, "--drafter", "off", "--max-tokens", "3")
    run = aerie("generate", "hi", *options)
    assert run.code == 2
    assert "--raw" in one_line(run)
    assert aerie("generate", "hi", *options, "--raw").code == 0
    assert aerie("demo", "hi", "--target", bare, "--max-tokens", "3").code == 2
    assert aerie("demo", "hi", "--target", bare, "--max-tokens", "3", "--raw").code == 0
    assert "--raw" in aerie("bench", *options, "--limit", "1", "--no-mlx-lm").err
    assert aerie("bench", *options, "--limit", "1", "--no-mlx-lm", "--raw").code == 0
    assert "chat" in one_line(aerie("chat", *options))


# demo -------------------------------------------------------------------------------------------------------


def test_demo_compares_and_says_what_it_does(aerie, tiny, drafter):
    run = aerie("demo", "hi", "--target", tiny, "--drafter", drafter, "--max-tokens", "9")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith(f"loading {tiny} ...\nhi\n")
    assert run.out.index("now plain decoding") < run.out.index("tokens/s")
    assert run.out.splitlines()[-1].split() == ["output", "identical"]
    assert any(line.split() == ["sketch", "plain"] for line in run.out.splitlines())


@pytest.mark.parametrize("tokens", ["1", "5"])
def test_demo_without_a_drafter_does_not_pretend_to_have_one(aerie, tiny, tokens):
    run = aerie("demo", "hi", "--target", tiny, "--max-tokens", tokens)
    assert run.code == 0
    assert any(line.split() == ["no", "drafter", "plain"] for line in run.out.splitlines())
    assert "EAGLE" not in run.out


def test_demo_of_one_token_has_dashes_for_what_cannot_be_measured(aerie, tiny, drafter):
    run = aerie("demo", "hi", "--target", tiny, "--drafter", drafter, "--max-tokens", "1")
    assert run.code == 0
    assert "nan" not in run.out
    assert "speed-up" not in run.out
    assert any(line.split() == ["tokens/s", "-", "-"] for line in run.out.splitlines())


def test_demo_that_finds_a_difference_fails(aerie, tiny, drafter, monkeypatch):
    from services.cli import demo
    from services.speculation.exactness import Agreement

    monkeypatch.setattr(demo, "compare_runs", lambda *_: Agreement(False, differs_at=3))
    run = aerie("demo", "hi", "--target", tiny, "--drafter", drafter, "--max-tokens", "5")
    assert run.code == 1
    assert "DIFFERENT at token 3" in run.out


def test_demo_whose_drafter_is_lost_says_so_and_still_compares(aerie, tiny, drafter, monkeypatch):
    from services.drafter.eagle3.model import Eagle3Drafter

    def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Eagle3Drafter, "top_children", fail)
    run = aerie("demo", "hi", "--target", tiny, "--drafter", drafter, "--max-tokens", "5")
    assert run.code == 0
    assert "drafter lost" in run.out
    assert "output                     identical" in run.out
    assert "secret" not in run.out + run.err
    assert all(line.startswith("aerie: ") for line in run.err.splitlines())


# bench ------------------------------------------------------------------------------------------------------


def test_bench_writes_what_it_prints(aerie, tiny, drafter, tmp_path):
    report = tmp_path / "report.json"
    run = aerie(
        "bench", "--target", tiny, "--drafter", drafter, "--max-tokens", "4", "--limit", "2", "--json", str(report)
    )
    assert (run.code, run.err) == (0, "")
    content = json.loads(report.read_text())
    assert set(content) == {"machine", "options", "summary", "prompts"}
    assert [set(p["arms"]) for p in content["prompts"]] == [{"plain", "speculative", "mlx_lm"}] * 2
    assert all(len(timings) == 3 for p in content["prompts"] for timings in p["arms"].values())
    assert content["machine"]["drafters"] == ["sketch"]
    assert "spec / plain" in run.out
    assert run.out.count(" identical") == 2


def test_bench_without_other_arms_has_no_empty_tables(aerie, tiny):
    run = aerie("bench", "--target", tiny, "--drafter", "off", "--no-mlx-lm", "--max-tokens", "4", "--limit", "1")
    assert run.code == 0
    assert "geometric" not in run.out
    assert "spec" not in run.out.splitlines()[-1]
    assert run.out.splitlines()[-1].startswith("plain ")


def test_bench_of_answers_of_one_token_has_nothing_to_time(aerie, tiny, tmp_path):
    # Ids below 0 and beyond the vocabulary do not exist: the target's first token is its end of sequence.
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    first = json.loads(aerie("generate", "hi", "--target", tiny, "--drafter", "off", "--json").out)["token_ids"][0]
    monkey = pytest.MonkeyPatch()
    from services.targets.tokenizer import TokenizerFiles

    load = TokenizerFiles.__init__

    def ends_at_once(self, *args, **kwargs):
        load(self, *args, **kwargs)
        object.__setattr__(self, "eos_ids", (first,))

    monkey.setattr(TokenizerFiles, "__init__", ends_at_once)
    try:
        run = aerie("bench", "--target", tiny, "--drafter", "off", "--max-tokens", "4", "--prompts", str(prompts))
    finally:
        monkey.undo()
    assert (run.code, run.err) == (0, "")
    assert run.out.splitlines()[-1] == "no answer was long enough to be timed"


# inspect ----------------------------------------------------------------------------------------------------


def test_inspect_describes_and_judges_the_fit(aerie, tiny, drafter):
    run = aerie("inspect", drafter, "--target", tiny)
    assert (run.code, run.err) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in run.out.splitlines()[1:-1]}
    assert rows["family"] == "eagle3"
    assert rows["width"] == "32, target 32"
    assert rows["vocabulary"] == "300 of 300"
    assert run.out.splitlines()[-1] == f"fits {tiny}: yes, taps (2, 3, 5) of 6 layers"


def test_inspect_shows_no_control_characters(aerie, drafter, tmp_path):
    shutil.copytree(drafter, tmp_path / "d")
    config = tmp_path / "d" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"\x1b]0;title\x07\nfits smollm2: yes": 1}))
    run = aerie("inspect", str(tmp_path / "d"))
    assert run.code == 0
    assert "?]0;title? fits smollm2: yes" in run.out
    assert "\x1b" not in run.out


def test_inspect_says_why_a_checkpoint_does_not_fit(aerie, tiny):
    run = aerie("inspect", "eagle3", "--target", tiny)
    assert run.code == 1
    assert f"fits {tiny}: no" in run.out
    assert "576 wide, the target 32" in run.out


def test_inspect_knows_the_shipped_drafter_by_its_family(aerie):
    run = aerie("inspect", "eagle3")
    assert run.code == 0
    assert "smollm2-135m-instruct/eagle3" in run.out.splitlines()[0]


# chat -------------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch):
    """Conversations that chat asked about, in order."""
    asked: list[list[dict[str, str]]] = []
    encode = Engine.chat_tokens

    def record(self, messages):
        asked.append([dict(message) for message in messages])
        return encode(self, messages)

    monkeypatch.setattr(Engine, "chat_tokens", record)
    return asked


def test_chat_remembers_ignores_blank_lines_and_obeys_commands(aerie, tiny, answers):
    lines = b"one\n\n  \ntwo\r\n/reset\nthree\n/help\n/foo\n\xff\nfour\n/exit\nnever\n"
    run = aerie("chat", "--target", tiny, "--drafter", "off", "--max-tokens", "3", stdin=lines)
    assert run.code == 0
    users = [[m["content"] for m in conversation if m["role"] == "user"] for conversation in answers]
    assert users == [["one"], ["one", "two"], ["three"], ["three", "four"]]
    assert [m["role"] for m in answers[1]] == ["user", "assistant", "user"]
    assert answers[1][1]["content"] == run.out.split("\n")[0]
    assert "/reset" in run.out
    assert "no such command: /foo" in run.out
    assert run.err == "aerie: that line is not UTF-8; it was ignored\n"
    assert "> " not in run.out
    assert "aerie chat" not in run.out  # the banner is for terminals


def test_chat_goes_on_after_a_refused_turn_and_forgets_it(aerie, tiny, answers, monkeypatch):
    stream = Engine.stream

    def refuse_second(self, tokens, **options):
        if len(answers) == 2:
            raise AerieError(Reason.PROMPT_TOO_LONG, "too long")
        return stream(self, tokens, **options)

    monkeypatch.setattr(Engine, "stream", refuse_second)
    run = aerie("chat", "--target", tiny, "--drafter", "off", "--max-tokens", "2", stdin=b"one\ntwo\nthree")
    assert run.code == 1  # no person reads along
    assert run.err == "aerie: PROMPT_TOO_LONG: too long\n"
    assert [m["content"] for m in answers[2] if m["role"] == "user"] == ["one", "three"]


@pytest.mark.parametrize("chunks", [0, 2])
def test_stopped_answers_stay_in_the_conversation_as_far_as_they_came(aerie, tiny, answers, monkeypatch, chunks):
    stream = Engine.stream

    def stop(self, tokens, **options):
        for count, item in enumerate(stream(self, tokens, **options)):
            if len(answers) == 1 and count == chunks:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(Engine, "stream", stop)
    run = aerie("chat", "--target", tiny, "--drafter", "off", "--max-tokens", "6", stdin=b"one\ntwo\n")
    assert run.code == 0
    assert "[stopped]" in run.out
    part = run.out.split("\n[stopped]")[0]
    if chunks:
        assert part
        assert [m["content"] for m in answers[1]] == ["one", part, "two"]
    else:
        assert [m["content"] for m in answers[1]] == ["two"]


def test_stats_of_one_token_have_no_pace():
    assert Stats(prompt_tokens=1).tokens_per_second == 0
