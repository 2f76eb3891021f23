"""Incremental text against decoding everything at once."""

import json

import pytest
from tokenizers import Tokenizer

from services.orchestrator.text import ChatTemplate, Detokenizer, TextStream
from services.speculation.errors import AerieError, Reason

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
    ],
)
def test_chat_templates_cannot_escape_their_sandbox(source):
    with pytest.raises(AerieError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_broken_chat_template_is_refused_at_load():
    with pytest.raises(AerieError) as caught:
        ChatTemplate("{% for %}", {})
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED


def test_template_helpers():
    rendered = ChatTemplate("{{ messages[0] | tojson }}{{ bos_token }}", {"bos_token": "<s>"}).render([{"a": "é"}])
    assert rendered == json.dumps({"a": "é"}, ensure_ascii=False) + "<s>"
