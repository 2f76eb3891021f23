"""``aerie generate`` and ``aerie chat``."""

import argparse
import json
import sys
from typing import Any

from services.cli.main import UsageError
from services.cli.options import load_engine, request_options
from services.cli.terminal import Printer
from services.embedded import Engine
from services.orchestrator.generation import Done
from services.speculation.errors import AerieError


def generate(options: argparse.Namespace) -> int:
    """Answer one prompt: streamed text, or one JSON object."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip() and not options.raw:
        raise UsageError("the prompt is empty")
    common = request_options(options)
    with load_engine(options) as engine:
        tokens = engine.orchestrator.encode(prompt) if options.raw else engine.chat_tokens(prompt)
        if options.json:
            print(json.dumps(_answer_json(engine, tokens, common), ensure_ascii=False))
        else:
            printer = Printer(engine, options.trace)
            _stream(engine, tokens, common, printer)
            printer.finish()
    return 0


def _answer_json(engine: Engine, tokens: tuple[int, ...], common: dict[str, Any]) -> dict[str, Any]:
    result = engine.generate(tokens, **common)
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "usage": result.stats.usage(),
        "stats": result.stats.report(),
    }


def _stream(engine: Engine, tokens: tuple[int, ...], common: dict[str, Any], printer: Printer) -> str:
    text = ""
    for item in engine.stream(tokens, **common):
        if not isinstance(item, Done):
            printer.write(item)
            text += item.text
    return text


def chat(options: argparse.Namespace) -> int:
    """A conversation: an empty line or end of input leaves it, Ctrl-C stops an answer."""
    common = request_options(options)
    messages: list[dict[str, str]] = []
    with load_engine(options) as engine:
        while True:
            try:
                turn = input("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if not turn.strip():
                return 0
            messages.append({"role": "user", "content": turn})
            printer = Printer(engine, options.trace)
            answer = ""
            try:
                answer = _stream(engine, engine.chat_tokens(messages), common, printer)
            except KeyboardInterrupt:
                print(" [stopped]", end="")
            except AerieError as error:
                print(f"aerie: {error}", file=sys.stderr)
                messages.pop()
                continue
            printer.finish()
            messages.append({"role": "assistant", "content": answer})
