"""``aerie demo``: one prompt with and without the drafter, compared in the same run."""

import argparse
from typing import Any

from services.bench.compare import compare_runs
from services.cli.options import check_prompt, request_options
from services.cli.report import UsageError
from services.cli.sources import turn
from services.cli.sources_local import check_template, load_engine, prompt_tokens
from services.cli.terminal import Printer, make_printer
from services.embedded import Engine
from services.orchestrator.generation import Done
from services.orchestrator.stats import Stats


def demo(options: argparse.Namespace) -> int:
    """Stream the speculative answer, decode plainly, compare. Exit code 1 when the outputs differ."""
    common = request_options(options)
    if options.drafter == "off":
        raise UsageError("demo compares a drafter with plain decoding: --drafter off leaves nothing to compare")
    check_prompt(options)
    print(f"loading {options.target} ...", flush=True)
    with load_engine(options) as engine:
        if not options.raw:
            check_template(engine, "send the prompt with --raw")
        tokens = prompt_tokens(engine, turn(options.prompt, options.raw))
        seed = options.seed if options.seed is not None else 0
        common |= {"seed": seed}
        engine.generate(tokens, **{**common, "max_tokens": 8})  # builds kernels, faults in weights
        print(f"{options.prompt}\n", flush=True)
        ids, speculative = _stream(engine, tokens, common, make_printer(engine.orchestrator.tokenizer, options.trace))
        print("\nnow plain decoding, for comparison ...", flush=True)
        plain = engine.generate(tokens, **{**common, "drafter": "off"})
        agreement = compare_runs(engine, engine.request(tokens, **common), plain.token_ids, ids, seed)
        name = engine.drafters[0].info.name if engine.drafters else "no drafter"
    _summarise(name, speculative.stats, plain.stats)
    if speculative.drafter_lost:
        print(f"  drafter lost on the way     {speculative.drafter_lost}")
    print(f"  output                     {agreement}")
    return 0 if agreement.agrees else 1


def _stream(
    engine: Engine, tokens: tuple[int, ...], common: dict[str, Any], printer: Printer
) -> tuple[list[int], Done]:
    ids: list[int] = []
    for item in engine.stream(tokens, **common):
        if isinstance(item, Done):
            printer.finish()
            return ids, item
        printer.write(item)
        ids += item.tokens
    raise RuntimeError("a generation ended without Done")


def _summarise(name: str, s: Stats, p: Stats) -> None:
    timed = s.tokens_per_second and p.tokens_per_second
    speedup = f"   speed-up {s.tokens_per_second / p.tokens_per_second:.2f}x" if timed else ""
    by_depth = " ".join(f"{share:.2f}" for share in s.acceptance_by_depth) or "none accepted"
    first = [x.first_token - x.started if x.first_token else 0.0 for x in (s, p)]
    rows = {
        "tokens/s": (_or_dash(s.tokens_per_second, 1), _or_dash(p.tokens_per_second, 1) + speedup),
        "time to first token, s": (f"{first[0]:.2f}", f"{first[1]:10.2f}"),
        "end to end, s": (f"{first[0] + s.decode_seconds:.2f}", f"{first[1] + p.decode_seconds:10.2f}"),
        "tokens a round (tau)": (_or_dash(s.acceptance_length, 2), _or_dash(p.acceptance_length, 2)),
    }
    print(f"\n  {'':26} {name[-16:]:>16} {'plain':>10}")
    for head, (left, right) in rows.items():
        print(f"  {head:26} {left.strip():>16} {right}")
    print(f"  acceptance by depth        {by_depth}")


def _or_dash(value: float, digits: int) -> str:
    """A figure, or a dash where there is none: an answer of one token has no pace and no rounds."""
    return f"{value:10.{digits}f}" if value else f"{'-':>10}"
