"""Options that several commands take."""

import argparse
import math
from collections.abc import Callable


def add_threads(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of matrix products (default: one a core)")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ambiguous drafter checkpoints")
    group.add_argument(
        "--tap-convention",
        choices=("boundary", "layer-output"),
        help="how tap ids are counted (default: as the config suggests)",
    )


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag that takes whole numbers from ``least`` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number") from None
        if not least <= number < 2**63:
            raise argparse.ArgumentTypeError(f"{text[:40]} must be {least} or more")
        return number

    return read


def seconds(text: str) -> float:
    """The type of a flag that takes a duration."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds")
    return number
