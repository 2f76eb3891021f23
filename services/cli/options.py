"""From parsed options to values of the services."""

import argparse
from typing import Any

from services.cli.main import UsageError
from services.drafter.eagle3.config import Overrides
from services.embedded import Engine
from services.orchestrator.routing import TreeOptions
from services.speculation.warpers import Sampler


def load_engine(options: argparse.Namespace) -> Engine:
    """The engine that ``--target``, ``--drafter`` and ``--threads`` ask for."""
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"--threads must be 1 or more, not {options.threads}")
    return Engine.load(options.target, options.drafter, options.threads, overrides=overrides(options))


def overrides(options: argparse.Namespace) -> Overrides:
    return Overrides(tap_convention=options.tap_convention)


def tree(options: argparse.Namespace) -> TreeOptions:
    return TreeOptions(options.tree_nodes, options.tree_depth, options.tree_topk)


def request_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``Request`` that generation commands share. Checked before any model loads."""
    if options.seed is not None and not 0 <= options.seed < 2**64:
        raise UsageError(f"--seed must be an unsigned 64-bit integer, not {options.seed}")
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, not {options.max_tokens}")
    if "" in options.stop:
        raise UsageError("--stop must not be empty")
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


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        if separator:
            return int(token), float(bias)
    except ValueError:
        pass
    raise UsageError(f"--logit-bias takes ID=BIAS, not {text!r}")
