"""``aerie chat``: a conversation, turn by turn."""

import argparse
import contextlib
import sys
from typing import Any

from services.cli.interrupts import raise_on_interrupt
from services.cli.options import request_options
from services.cli.report import UsageError, complain
from services.cli.sources import Source, open_source
from services.cli.terminal import Printer
from services.speculation.errors import AerieError

HELP = "/exit or end of input leaves, /reset forgets the conversation, /help says this; Ctrl-C stops an answer."


def chat(options: argparse.Namespace) -> int:
    """Answer line by line until ``/exit`` or the end of input; Ctrl-C stops an answer, or leaves at the prompt."""
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    common = request_options(options)
    with open_source(options) as source:
        source.need_template("aerie chat needs one")
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if on_terminal:
            drafters = ", ".join(source.drafters) or "none"
            print(f"aerie chat: target {source.target}, drafter {drafters}. {HELP}", flush=True)
        messages: list[dict[str, str]] = []
        answered = True
        while (turn := _read_turn(on_terminal)) is not None:
            match turn.strip():
                case "":
                    pass
                case "/exit":
                    return 0
                case "/reset":
                    messages.clear()
                case "/help":
                    print(HELP, flush=True)
                case command if command.startswith("/") and command[1:].isalpha():
                    print(f"no such command: {command}; {HELP}", flush=True)
                case _:
                    answered &= _answer(source, messages, turn, common, source.printer(options.trace))
    return 0 if answered or on_terminal else 1  # a script must learn of it; a person has read it


def _read_turn(on_terminal: bool) -> str | None:
    """The next line that is text; None at the end."""
    while True:
        try:
            with raise_on_interrupt():
                if on_terminal:
                    line = input("> ")
                    line.encode()  # some locales let other bytes through, as surrogates
                    return line
                data = _read_line()
                return data.decode().rstrip("\r\n") if data else None
        except UnicodeError:
            complain("that line is not UTF-8; it was ignored")
        except (EOFError, KeyboardInterrupt):
            print(flush=True)
            return None


def _read_line() -> bytes:
    assert sys.stdin is not None
    try:
        return sys.stdin.buffer.readline()
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror}") from None


def _answer(
    source: Source, messages: list[dict[str, str]], turn: str, common: dict[str, Any], printer: Printer
) -> bool:
    """Stream the answer and remember both; a turn that got no text at all is forgotten. False: it was refused."""
    messages.append({"role": "user", "content": turn})
    try:
        with raise_on_interrupt(), contextlib.closing(source.stream(messages, common)) as chunks:
            for chunk in chunks:
                printer.write(chunk)
        printer.finish()
    except KeyboardInterrupt:
        print("\n[stopped]", flush=True)
        if not printer.text:
            messages.pop()
            return True
    except AerieError as error:
        complain(str(error))
        messages.pop()
        return False
    messages.append({"role": "assistant", "content": printer.text})
    return True
