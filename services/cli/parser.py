"""The options of every command. Commands import what they need: --help and --version start without MLX."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from services import __version__
from services.cli.parser_serving import _add_dialling as add_dialling
from services.cli.parser_serving import add_serving
from services.cli.parser_shared import add_overrides, add_threads
from services.cli.report import UsageError


class _Parser(argparse.ArgumentParser):
    """Complains in one line, and takes no abbreviations: they would break scripts as flags are added."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse's own swallows a failing write


def build_parser() -> argparse.ArgumentParser:
    what = "Lossless speculative decoding with EAGLE-3 on MLX, in one process or as services."
    parser = _Parser(prog="aerie", description=what)
    parser.add_argument("--version", action="version", version=f"aerie {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help="a user turn; - reads standard input")
    _add_raw(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_generation(generate)
    _add_connect(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to the target; /help lists what it understands")
    _add_generation(chat)
    _add_connect(chat)
    chat.set_defaults(run=_chat)

    demo = commands.add_parser("demo", help="answer a prompt with and without the drafter and compare")
    demo.add_argument(
        "prompt", nargs="?", default="Write a Python function that reverses a string, and explain how it works."
    )
    _add_raw(demo)
    _add_generation(demo)
    demo.set_defaults(run=_demo, connect=None)

    bench = commands.add_parser("bench", help="plain decoding, speculation and mlx-lm, alternating in one run")
    bench.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL of {"kind", "prompt"} (24 built-in prompts)')
    bench.add_argument("--limit", type=int, metavar="N", help="only the first N prompts (default: all)")
    bench.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="runs of each arm, 3 or more (default: 3)"
    )
    bench.add_argument("--max-tokens", type=int, default=96, metavar="N", help="most tokens of an answer (default: 96)")
    bench.add_argument("--no-mlx-lm", action="store_true", help="leave out mlx_lm.stream_generate")
    bench.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    _add_raw(bench)
    _add_models(bench)
    _add_tree(bench)
    _add_connect(bench)
    bench.set_defaults(run=_bench)

    inspect = commands.add_parser("inspect", help="what a drafter checkpoint is, and whether it fits a target")
    inspect.add_argument("checkpoint", help="a checkpoint folder, or eagle3 for the shipped one")
    inspect.add_argument("--target", metavar="TARGET", help="check the fit with this target")
    add_overrides(inspect)
    inspect.set_defaults(run=_inspect)

    add_serving(commands)
    return parser


def _add_raw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--raw", action="store_true", help="send the prompt as it is, without the chat template")


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens of an answer (default: 256)"
    )
    sampling = parser.add_argument_group(
        "sampling",
        "Above temperature 0 a token is drawn from those that --top-k, --top-p and --min-p leave; "
        "at 0 these three change nothing.",
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="leave the likeliest tokens that together reach probability P (default: 1, all)",
    )
    sampling.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="leave the K likeliest tokens (default: 0, all)"
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="leave tokens at least P times as likely as the likeliest (default: 0, all)",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1, makes tokens of prompt and answer less likely (default: 1, off)",
    )
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="taken once from the logit of each token of the answer (default: 0)",
    )
    sampling.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="taken for each time that a token is in the answer (default: 0)",
    )
    sampling.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="added to the logit of a token id; may be repeated",
    )
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="unsigned 64-bit (default: drawn; generate --json reports it)"
    )
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="colour the text by how each token came, and count them (NO_COLOR and FORCE_COLOR are honoured)",
    )
    _add_models(parser)
    _add_tree(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        metavar="TARGET",
        help="smollm2, a Hub id, a folder or a .gguf file (default: smollm2)",
    )
    models.add_argument(
        "--drafter",
        default="auto",
        metavar="DRAFTER",
        help="auto (a shipped one that fits, else none), eagle3, off or a checkpoint folder (default: auto)",
    )
    add_threads(models)
    add_overrides(parser)


def _add_tree(parser: argparse.ArgumentParser) -> None:
    tree = parser.add_argument_group("draft tree (default: a preset for the device)")
    tree.add_argument("--tree-nodes", type=int, metavar="N", help="nodes, the root included; 1 is plain decoding")
    tree.add_argument("--tree-depth", type=int, metavar="N", help="depth of the deepest node")
    tree.add_argument("--tree-topk", type=int, metavar="N", help="children of a node, and nodes expanded at a depth")


def _add_connect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect",
        metavar="ADDR",
        help="let the orchestrator at host:port or unix:PATH answer; no model is loaded here, and --drafter names one "
        "of its own",
    )
    add_dialling(parser)


def _generate(options: argparse.Namespace) -> int:
    from services.cli.generate import generate

    return generate(options)


def _chat(options: argparse.Namespace) -> int:
    from services.cli.chat import chat

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
