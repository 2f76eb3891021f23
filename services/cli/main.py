"""Entry point: options, dispatch and errors in one line."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from services import __version__
from services.speculation.errors import AerieError, Reason


class UsageError(Exception):
    """Wrong usage: exit code 2."""


# Reasons that mean the command line is wrong rather than the machine.
_USAGE = frozenset({Reason.INVALID_ARGUMENT, Reason.PROMPT_EMPTY})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for a failure, 2 for wrong usage."""
    options = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except UsageError as error:
        return _complain(str(error), 2)
    except AerieError as error:
        return _complain(str(error), 2 if error.reason in _USAGE else 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _complain(message: str, code: int) -> int:
    print(f"aerie: {message}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aerie", description="Lossless speculative decoding with EAGLE-3 on MLX.")
    parser.add_argument("--version", action="version", version=f"aerie {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help="a user turn; - reads standard input")
    generate.add_argument("--raw", action="store_true", help="send the prompt as it is, without the chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_generation(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to the target")
    _add_generation(chat)
    chat.set_defaults(run=_chat)

    demo = commands.add_parser("demo", help="answer a prompt with and without the drafter and compare")
    demo.add_argument(
        "prompt", nargs="?", default="Write a Python function that reverses a string, and explain how it works."
    )
    _add_generation(demo)
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="plain decoding, speculation and mlx-lm, alternating in one run")
    bench.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL of {"kind", "prompt"} (24 built-in prompts)')
    bench.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    bench.add_argument("--repetitions", type=int, default=3, metavar="N", help="runs of each arm (at least 3)")
    bench.add_argument("--max-tokens", type=int, default=96, metavar="N")
    bench.add_argument("--no-mlx-lm", action="store_true", help="leave out mlx_lm.stream_generate")
    bench.add_argument("--ignore-eos", action="store_true")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    _add_models(bench)
    _add_tree(bench)
    bench.set_defaults(run=_bench)

    inspect = commands.add_parser("inspect", help="what a drafter checkpoint is, and whether it fits a target")
    inspect.add_argument("checkpoint", type=Path)
    inspect.add_argument("--target", metavar="TARGET", help="check the fit with this target")
    _add_overrides(inspect)
    inspect.set_defaults(run=_inspect)
    return parser


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="R")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="R")
    sampling.add_argument("--logit-bias", action="append", default=[], metavar="ID=BIAS", help="may be repeated")
    sampling.add_argument("--seed", type=int, metavar="N", help="unsigned 64-bit; drawn and reported when absent")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    parser.add_argument("--trace", action="store_true", help="colour the text by how each token came")
    _add_models(parser)
    _add_tree(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target", default="smollm2", metavar="TARGET", help="smollm2, a Hub id, a folder or a .gguf file"
    )
    models.add_argument("--drafter", default="auto", metavar="DRAFTER", help="auto, eagle3, off or a checkpoint folder")
    models.add_argument("--threads", type=int, metavar="N", help="CPU threads of matrix products")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ambiguous drafter checkpoints")
    group.add_argument("--tap-convention", choices=("boundary", "layer-output"), help="how tap ids are counted")


def _add_tree(parser: argparse.ArgumentParser) -> None:
    tree = parser.add_argument_group("draft tree (presets by device)")
    tree.add_argument("--tree-nodes", type=int, metavar="N", help="nodes, the root included")
    tree.add_argument("--tree-depth", type=int, metavar="N", help="depth of the deepest node")
    tree.add_argument("--tree-topk", type=int, metavar="N", help="children of a node, and nodes expanded at a depth")


# Commands import what they need: --help and --version start without MLX.


def _generate(options: argparse.Namespace) -> int:
    from services.cli.generate import generate

    return generate(options)


def _chat(options: argparse.Namespace) -> int:
    from services.cli.generate import chat

    return chat(options)


def _demo(options: argparse.Namespace) -> int:
    from services.cli.demo import demo

    return demo(options)


def _bench(options: argparse.Namespace) -> int:
    from services.cli.bench import bench

    return bench(options)


def _inspect(options: argparse.Namespace) -> int:
    from services.cli.inspect import inspect

    return inspect(options)


if __name__ == "__main__":
    sys.exit(main())
