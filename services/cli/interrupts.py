"""Ctrl-C: leave at once and quietly, or raise where an answer can be stopped."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn


def leave(*_: object) -> NoReturn:
    """End the process with exit code 130.

    Without unwinding: a native thread may be running the model, and an interpreter that shuts down under it aborts.
    """
    _handle(lambda *_: os._exit(130))  # a second Ctrl-C does not wait for a reader that has stopped reading
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        # The cursor is behind the text so far, or behind the terminal's ^C.
        os.write(2, b"\naerie: interrupted\n" if sys.stderr.isatty() else b"aerie: interrupted\n")
    os._exit(130)


def leave_on_interrupt() -> None:
    """From now on Ctrl-C means ``leave``, whatever the main thread waits for."""
    _handle(leave)


@contextlib.contextmanager
def raise_on_interrupt() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt."""
    _handle(signal.default_int_handler)
    try:
        yield
    finally:
        _handle(leave)


def _handle(handler: "signal._HANDLER") -> None:
    # A process that was started with Ctrl-C ignored (nohup, a shell's &) goes on ignoring it.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
