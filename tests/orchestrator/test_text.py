"""Incremental text against decoding everything at once."""

import json
import random
import time

import pytest
from tokenizers import Tokenizer

from services.orchestrator.text import MAX_STOP_LENGTH, MAX_STOPS, ChatTemplate, Detokenizer, TextStream
from services.speculation.errors import AerieError, Reason
from tests.tiny import tiny_tokenizer

TRICKY = [
    "plain words, then  two spaces\n\nand lines\t.",
    "naïve café – “quoted” … ½ ≠ 0",
    "emoji 👩‍👩‍👧 🇩🇪 and 漢字かな, العربية, हिन्दी",
    "1234567890 3.14159",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def tokenizer(engine) -> Tokenizer:
    return engine.orchestrator.tokenizer


@pytest.mark.parametrize("text", TRICKY)
def test_pieces_join_to_the_text_without_half_characters(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text).ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_multibyte_character_waits_for_its_last_token(tokenizer):
    ids = tokenizer.encode("👩").ids
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids] == [""] * (len(ids) - 1) + ["👩"]


def test_cut_character_comes_out_as_replacement_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("👩").ids[0]) == ""
    assert set(detokenizer.flush()) == {"\ufffd"}
    assert detokenizer.flush() == ""


def test_special_tokens_give_no_text(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = [*tokenizer.encode("done").ids, tokenizer.token_to_id("<|im_end|>")]
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.flush() == "done"


def split_everywhere(ids):
    """Every way to hand tokens over in at most three rounds."""
    for a in range(len(ids) + 1):
        for b in range(a, len(ids) + 1):
            yield [part for part in (ids[:a], ids[a:b], ids[b:]) if part]


@pytest.mark.parametrize("stop", [["STOP"], ["wn fo"], ["x j", "fox jumps"], [" over the lazy"], ["zzz", "dog"]])
def test_stop_strings_cut_at_the_first_occurrence_however_rounds_fall(tokenizer, stop):
    text = "The quick brown fox jumps over the lazy dog and on"
    ids = tokenizer.encode(text).ids
    found = [text.find(s) for s in stop if s in text]
    expected = text[: min(found)] if found else text
    # Independent reference: the first prefix of the tokens whose text holds a stop string.
    stopped = next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stop)), None)
    for rounds in split_everywhere(ids):
        stream, out, kept = TextStream(tokenizer, stop), "", 0
        for tokens in rounds:
            delta = stream.push(tokens)
            out += delta.text
            if delta.stopped_at is not None:
                kept += delta.stopped_at + 1
                break
            kept += len(tokens)
        else:
            out += stream.flush()
        assert out == expected
        assert kept == (stopped or len(ids))


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer):
    stream = TextStream(tokenizer, ["fox jumps"])
    ids = tokenizer.encode("a brown fox").ids
    assert stream.push(ids).text == "a brown "
    assert stream.flush() == "fox"


def slow_stop(pieces, stops):
    """Text up to the first stop string, and the piece that completed it: every prefix is searched anew."""
    for index in range(len(pieces)):
        text = "".join(pieces[: index + 1])
        if found := [text.find(s) for s in stops if s in text]:
            return text[: min(found)], index
    return "".join(pieces), None


@pytest.mark.parametrize("seed", range(60))
def test_stops_that_overlap_themselves_and_each_other(seed):
    rng = random.Random(seed)
    tokenizer = tiny_tokenizer()
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 4))]
    text = "".join(rng.choices("ab", k=60))
    ids = [tokenizer.token_to_id(letter) for letter in text]
    expected, stopped = slow_stop(text, stops)
    stream, out = TextStream(tokenizer, stops), ""
    for index, token in enumerate(ids):
        delta = stream.push([token])
        out += delta.text
        # Never more is out than what no stop string can take back.
        assert expected.startswith(out)
        if delta.stopped_at is not None:
            assert index == stopped
            break
    else:
        assert stopped is None
        out += stream.flush()
    assert out == expected


def test_of_stops_that_one_token_completes_the_earliest_cuts():
    tokenizer = tiny_tokenizer()
    with_token = tokenizer.token_to_id("with")
    assert with_token is not None
    assert TextStream(tokenizer, ["th", "wit"]).push([with_token]).text == ""
    assert TextStream(tokenizer, ["th", "h"]).push([with_token]).text == "wi"


def test_the_longest_stops_cost_no_more_than_short_ones():
    tokenizer = tiny_tokenizer()
    letter = tokenizer.token_to_id("a")
    stream = TextStream(tokenizer, ["a" * (MAX_STOP_LENGTH - 1) + "b"] * MAX_STOPS)
    start = time.perf_counter()
    out = "".join(stream.push([letter]).text for _ in range(4000)) + stream.flush()
    assert time.perf_counter() - start < 5  # copies of every prefix took minutes
    assert out == "a" * 4000


@pytest.mark.parametrize(
    ("stop", "match"),
    [
        (["x"] * (MAX_STOPS + 1), "17 stop strings; 16"),
        (["x" * (MAX_STOP_LENGTH + 1)], "1025 characters; 1024"),
        (["a", ""], "empty"),
        ("abc", "sequence"),
        ([3], "sequence"),
    ],
)
def test_stop_strings_have_limits(stop, match):
    with pytest.raises(AerieError, match=match) as caught:
        TextStream(tiny_tokenizer(), stop)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_long_runs_of_special_tokens_and_of_garbage_cost_no_more_than_text():
    tokenizer = tiny_tokenizer()
    special, letter = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("a")
    garbage = tokenizer.token_to_id("\u0142")  # the byte 0xA0 alone, in byte-level spelling
    assert tokenizer.decode([garbage]) == "\ufffd"
    start = time.perf_counter()
    for token, text in ((special, ""), (garbage, "\ufffd" * 4000)):
        detokenizer = Detokenizer(tokenizer)
        ids = [letter, *[token] * 4000, letter]
        assert "".join(detokenizer.push(i) for i in ids) + detokenizer.flush() == f"a{text}a"
    assert time.perf_counter() - start < 10


def test_special_tokens_between_the_halves_of_a_character_do_not_split_it():
    tokenizer = tiny_tokenizer()
    first, second = tokenizer.encode("é").ids
    special = tokenizer.token_to_id("<|im_end|>")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in (first, special, second)] == ["", "", "é"]


def test_chat_template_renders_the_default_system_prompt(engine):
    files = engine.target.tokenizer
    text = ChatTemplate(files.chat_template, files.special_tokens).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ undefined_thing.attribute }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ {}['a'].b }}",
        "{{ strftime_now(3) }}",
        "{{ '\\ud800' }}",
        "{{ 'x' * (2 ** 24 + 1) }}",
    ],
)
def test_whatever_a_chat_template_does_is_an_error_of_ours(source):
    with pytest.raises(AerieError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])
    assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{" + "(" * 5000 + "}}", "{% if 1 %}" * 3000, None, 3, ["{{ 1 }}"], {"default": "x"}]
)
def test_broken_chat_template_is_refused_at_load(source):
    with pytest.raises(AerieError) as caught:
        ChatTemplate(source, {})
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"role": "user", "content": None}, "message 1 has no content"),
        ({"role": "user"}, "message 1 has no content"),
        ({"role": "user", "content": 3}, "message 1 has content of type int"),
        ({"content": "Hi"}, "message 1 has no role"),
        ("Hi", "message 1 has no role"),
        ({"role": "user", "content": "\ud800"}, "half a character"),
    ],
)
def test_messages_without_text_are_refused_by_their_number(message, match):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(AerieError, match=match) as caught:
        template.render([{"role": "system", "content": "s"}, message])
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_template_helpers():
    source = "{{ messages[0].content | tojson }}{{ messages[0].content | tojson(ensure_ascii=True) }}{{ bos_token }}"
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "é"}])
    assert rendered == json.dumps("é", ensure_ascii=False) + json.dumps("é") + "<s>"
