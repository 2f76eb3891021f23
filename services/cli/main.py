"""Entry point: dispatch, and every error in one line."""

import contextlib
import os
import re
import sys
from collections.abc import Sequence

from services.cli.interrupts import leave, leave_on_interrupt
from services.cli.parser import build_parser
from services.cli.report import UsageError, complain, complain_of_bug, report_in_one_line
from services.speculation.errors import AerieError, Reason

# Reasons that mean the command line is wrong rather than the machine.
_USAGE = frozenset({Reason.INVALID_ARGUMENT, Reason.PROMPT_EMPTY})

# How values that are refused begin their sentence, and the flags that set them.
_VALUES = """temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed
max_tokens"""
_FLAGS = {
    **{name: "--" + name.replace("_", "-") for name in _VALUES.split()},
    **{f"tree {name}": f"--tree-{name.replace('_', '')}" for name in ("nodes", "depth", "top_k")},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    leave_on_interrupt()
    if sys.stderr is None:  # started with 2>&-: print would write to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        return complain("standard output is closed", 1)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? for what it lacks
    try:
        code = _guard(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # a full disk shows here, not as a traceback at exit
    except BrokenPipeError:
        _abandon_output()
        return 1
    except OSError as error:
        _abandon_output()
        return complain(f"cannot write to standard output: {error.strerror}", 1)
    return code


def _guard(argv: Sequence[str]) -> int:
    """Turn whatever a command raises, but for a failing standard output, into one line and an exit code."""
    try:
        report_in_one_line()
        return _dispatch(argv)
    except UsageError as error:
        return complain(str(error), 2)
    except AerieError as error:
        return complain(f"{error.reason}: {_name_flag(error.message)}", 2 if error.reason in _USAGE else 1)
    except KeyboardInterrupt:
        leave()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno is None:  # no answer of the system: ConnectionError and TimeoutError of our own
            return complain_of_bug(error)
        if error.filename is None:
            raise
        return complain(f"{os.fsdecode(error.filename)}: {error.strerror}", 1)
    except Exception as error:
        return complain_of_bug(error)


def _dispatch(argv: Sequence[str]) -> int:
    for argument in argv:
        if argument != argument.encode(errors="replace").decode():
            raise UsageError(f"an argument is not UTF-8: {argument!a}")
    try:
        options = build_parser().parse_args(argv)
    except SystemExit:  # --help and --version
        return 0
    code: int = options.run(options)
    return code


def _name_flag(message: str) -> str:
    """A message that begins with a value's name, with its flag instead."""
    return re.sub(rf"^({'|'.join(_FLAGS)})\b", lambda found: _FLAGS[found[0]], message)


def _abandon_output() -> None:
    """Nobody takes the output: what is left of it must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
