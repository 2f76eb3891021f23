"""Traced text: colours, counts, and nothing but the text of the answer."""

import io
import re

import pytest

from services.cli.terminal import Printer, TracePrinter, wants_colours
from services.orchestrator.generation import Chunk
from services.orchestrator.text import TextStream
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def chunks_of(text, depths, stop=(), size=2):
    """The chunks of a generation of ``text`` in rounds of ``size`` tokens, as the orchestrator makes them."""
    ids = TOKENIZER.encode(text).ids
    depths = [depths[i % len(depths)] for i in range(len(ids))]
    stream = TextStream(TOKENIZER, stop)
    for start in range(0, len(ids), size):
        tokens = ids[start : start + size]
        delta = stream.push(tokens)
        kept = len(tokens) if delta.stopped_at is None else delta.stopped_at + 1
        yield Chunk(delta.text, tuple(tokens[:kept]), tuple(depths[start : start + kept]))
        if delta.stopped_at is not None:
            return
    if rest := stream.flush():
        yield Chunk(rest, (), ())


def trace(monkeypatch, chunks, force="1"):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", force)
    out = io.StringIO()
    printer = TracePrinter(TOKENIZER, out)
    for chunk in chunks:
        printer.write(chunk)
    printer.finish()
    body, legend = out.getvalue().rsplit("\n[", 1)
    return body, "[" + legend, printer.text


def uncoloured(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_each_token_has_the_colour_of_its_depth(monkeypatch):
    body, legend, _ = trace(monkeypatch, chunks_of("xyzq", [0, 1, 2, 0]))
    assert body == "x\x1b[38;5;75my\x1b[0m\x1b[38;5;80mz\x1b[0mq"
    assert uncoloured(legend) == "[tokens by origin: the target's own: 2, depth 1: 1, depth 2: 1]\n"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", [(), ("fox jum",), ("over the",), ("dogs", "lazy cat"), ("é",)])
def test_traced_text_is_the_text_of_the_answer(monkeypatch, size, stop):
    text = "The quick brown fox jumps over the lazy dog, naïve café 👩 fox jum"
    expected = text[: min([text.find(s) for s in stop if s in text], default=len(text))]
    body, _, written = trace(monkeypatch, chunks_of(text, [0, 1, 2, 3], stop, size))
    assert uncoloured(body) == written == expected


def test_legend_shows_the_depths_in_use_alone(monkeypatch):
    _, legend, _ = trace(monkeypatch, chunks_of("xyz", [0]))
    assert legend == "[tokens by origin: the target's own: 3]\n"
    _, legend, _ = trace(monkeypatch, chunks_of("xy", [4, 9]))
    assert uncoloured(legend) == "[tokens by origin: depth 4: 1, depth 9: 1]\n"


def test_without_colours_the_counts_remain(monkeypatch):
    body, legend, _ = trace(monkeypatch, chunks_of("xyzq", [0, 1]), force="")
    assert body == "xyzq"
    assert legend == "[tokens by origin: the target's own: 2, depth 1: 2]\n"


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"NO_COLOR": "", "FORCE_COLOR": ""}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
    ],
)
def test_who_wants_colours(monkeypatch, environment, terminal, coloured):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    assert wants_colours(out) is coloured


def test_plain_printer_writes_text_as_it_comes():
    out = io.StringIO()
    printer = Printer(out)
    printer.write(Chunk("a", (1,), (0,)))
    assert out.getvalue() == "a"
    printer.finish()
    assert (out.getvalue(), printer.text) == ("a\n", "a")
