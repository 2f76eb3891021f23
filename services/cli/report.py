"""One line on standard error for a person: errors, warnings and log records. Details go to the file AERIE_LOG names."""

import contextlib
import logging
import os
import sys
import uuid
import warnings


class UsageError(Exception):
    """Wrong usage: exit code 2."""


def complain(message: str, code: int = 0) -> int:
    """Print ``aerie: message`` in one printable line; returns ``code``."""
    with contextlib.suppress(OSError):
        print("aerie:", printable(message), file=sys.stderr)
    return code


def printable(text: str) -> str:
    """On one line, with ? for what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def complain_of_bug(error: BaseException) -> int:
    """Say that we failed, by a number: what an exception says is for the log alone. Returns exit code 1."""
    incident = uuid.uuid4().hex[:8]
    _details.error("incident %s", incident, exc_info=error)
    return complain(f"INTERNAL: incident {incident} (AERIE_LOG=FILE keeps the details)", 1)


class _OneLine(logging.Handler):
    """Shows warnings of ours without their tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    complain(str(message))


_handler = _OneLine(logging.WARNING)
# A logger beside ours: its records reach the log file and not the terminal, which has said it already.
_details = logging.getLogger("aerie")


def report_in_one_line() -> None:
    """Send warnings and log records of this process through ``complain``, and all of them to AERIE_LOG.

    Raises:
        OSError: The file cannot be written.
    """
    warnings.showwarning = _show_warning
    logging.raiseExceptions = False  # a log file that cannot be written is no reason for a traceback
    logging.getLogger("services").addHandler(_handler)
    root = logging.getLogger()
    if path := os.environ.get("AERIE_LOG"):
        file = logging.FileHandler(path)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(file)
    elif not root.handlers:
        root.addHandler(logging.NullHandler())  # else what nobody handles is printed with its traceback
