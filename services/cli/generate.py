"""``aerie generate``: answer one prompt."""

import argparse
import json
import sys
from typing import Any

from services.cli.options import check_prompt, load_engine, prompt_tokens, request_options
from services.cli.report import UsageError
from services.cli.terminal import make_printer
from services.embedded import Engine
from services.orchestrator.generation import Done


def generate(options: argparse.Namespace) -> int:
    """Answer one prompt: streamed text, or one JSON object."""
    common = request_options(options)
    if options.prompt == "-":
        options.prompt = _read_stdin()
    check_prompt(options)
    with load_engine(options) as engine:
        tokens = prompt_tokens(engine, options.prompt, options.raw)
        if options.json:
            print(json.dumps(_answer_json(engine, tokens, common), ensure_ascii=False))
            return 0
        printer = make_printer(engine, options.trace)
        for item in engine.stream(tokens, **common):
            if not isinstance(item, Done):
                printer.write(item)
        printer.finish()
    return 0


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    try:
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8") from None
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror}") from None


def _answer_json(engine: Engine, tokens: tuple[int, ...], common: dict[str, Any]) -> dict[str, Any]:
    result = engine.generate(tokens, **common)
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "depths": list(result.depths),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "usage": result.stats.usage(),
        "stats": result.stats.report(),
    }
