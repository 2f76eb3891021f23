"""``aerie generate``: answer one prompt."""

import argparse
import contextlib
import json
import sys

from services.cli.options import check_prompt, request_options
from services.cli.report import UsageError
from services.cli.sources import open_source, turn


def generate(options: argparse.Namespace) -> int:
    """Answer one prompt: streamed text, or one JSON object."""
    common = request_options(options)
    if options.prompt == "-":
        options.prompt = _read_stdin()
    check_prompt(options)
    with open_source(options) as source:
        if not options.raw:
            source.need_template("send the prompt with --raw")
        prompt = turn(options.prompt, options.raw)
        if options.json:
            print(json.dumps(source.answer(prompt, common).as_json(), ensure_ascii=False))
            return 0
        printer = source.printer(options.trace)
        with contextlib.closing(source.stream(prompt, common)) as chunks:
            for chunk in chunks:
                printer.write(chunk)
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
