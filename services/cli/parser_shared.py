"""Options that several commands take."""

import argparse


def add_threads(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of matrix products (default: one a core)")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ambiguous drafter checkpoints")
    group.add_argument(
        "--tap-convention",
        choices=("boundary", "layer-output"),
        help="how tap ids are counted (default: as the config suggests)",
    )
