"""From parsed options to values of the services. Everything that needs no model is checked before one loads.

Nothing here imports MLX: commands that use a running orchestrator come by.
"""

import argparse
from pathlib import Path
from typing import Any

from services.cli.report import UsageError
from services.drafter.eagle3.config import Overrides
from services.orchestrator.routing import TreeOptions
from services.orchestrator.text import check_stops
from services.runtime.addresses import parse_address
from services.speculation.growth import MAX_TREE_NODES
from services.speculation.warpers import Sampler

MAX_THREADS = 1024
DEFAULT_TARGET = "smollm2"
_OF_MODELS = {"target": "--target", "threads": "--threads", "tap_convention": "--tap-convention"}
_OF_DIALLING = {"ca": "--ca", "cert": "--cert", "cert_key": "--cert-key", "key_file": "--key-file"}


def check_models(options: argparse.Namespace) -> None:
    """Refuse ``--target``, ``--drafter`` and ``--threads`` that cannot mean anything (UsageError)."""
    for flag in ("target", "drafter"):
        if not getattr(options, flag).strip():
            raise UsageError(f"--{flag} must not be empty")
    if options.threads is not None and not 1 <= options.threads <= MAX_THREADS:
        raise UsageError(f"--threads must be 1..{MAX_THREADS}, not {options.threads}")


def check_source(options: argparse.Namespace) -> None:
    """Refuse options of models with ``--connect``, and of dialling without (UsageError); fill in the target."""
    if options.connect is None:
        if given := _first_given(options, _OF_DIALLING):
            raise UsageError(f"{given} goes with --connect: no service is dialled")
        if options.target is None:
            options.target = DEFAULT_TARGET
        check_models(options)
        return
    if given := _first_given(options, _OF_MODELS):
        raise UsageError(f"{given} cannot go with --connect: the models are the service's")
    if not options.drafter.strip():
        raise UsageError("--drafter must not be empty")
    parse_address(options.connect, "--connect")


def _first_given(options: argparse.Namespace, flags: dict[str, str]) -> str | None:
    return next((flag for name, flag in flags.items() if getattr(options, name, None) is not None), None)


def overrides(options: argparse.Namespace) -> Overrides:
    return Overrides(tap_convention=options.tap_convention)


def tree(options: argparse.Namespace) -> TreeOptions:
    """The overrides of the tree preset (UsageError when out of range; a service has a limit of its own)."""
    if options.connect is None and options.tree_nodes is not None and not 1 <= options.tree_nodes <= MAX_TREE_NODES:
        raise UsageError(f"--tree-nodes must be 1..{MAX_TREE_NODES}, not {options.tree_nodes}")
    for flag, value in (("nodes", options.tree_nodes), ("depth", options.tree_depth), ("topk", options.tree_topk)):
        if value is not None and not 1 <= value < 2**32:
            raise UsageError(f"--tree-{flag} must be 1 or more, not {value}")
    return TreeOptions(options.tree_nodes, options.tree_depth, options.tree_topk)


def request_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``Request`` that generation commands share. Checked before any model loads."""
    check_source(options)
    if options.seed is not None and not 0 <= options.seed < 2**64:
        raise UsageError(f"--seed must be an unsigned 64-bit integer, not {options.seed}")
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, not {options.max_tokens}")
    if "" in options.stop:
        raise UsageError("--stop must not be empty")
    check_stops(options.stop)
    return {
        "max_tokens": options.max_tokens,
        "sampler": Sampler(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=tuple(_bias(text) for text in options.logit_bias),
        ),
        "seed": options.seed,
        "stop": tuple(options.stop),
        "ignore_eos": options.ignore_eos,
        "tree": tree(options),
    }


def check_prompt(options: argparse.Namespace) -> None:
    """Refuse a prompt without text (UsageError); raw spaces are text."""
    if not (options.prompt if options.raw else options.prompt.strip()):
        raise UsageError("the prompt is empty")


def usable_path(name: str, text: str | Path) -> Path:
    """A path that the system can look up, ``~`` expanded (UsageError otherwise)."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long; no such user; a zero byte
        detail = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{name} is no usable path: {detail}: {str(text)[:60]}") from None
    return path


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        if separator:
            return int(token), float(bias)
    except ValueError:
        pass
    raise UsageError(f"--logit-bias takes ID=BIAS, not {text!r}")
