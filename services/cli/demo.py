"""``aerie demo``: one prompt with and without the drafter, compared in the same run."""

import argparse

from services.bench.compare import compare_runs
from services.cli.options import load_engine, request_options
from services.cli.terminal import Printer
from services.embedded.engine import Result
from services.orchestrator.generation import Done


def demo(options: argparse.Namespace) -> int:
    """Stream the speculative answer, decode plainly, compare. Exit code 1 when the outputs differ."""
    common = request_options(options)
    with load_engine(options) as engine:
        tokens = engine.chat_tokens(options.prompt)
        seed = options.seed if options.seed is not None else 0
        common |= {"seed": seed}
        engine.generate(tokens, **{**common, "max_tokens": 8})  # builds kernels, faults in weights
        print(f"{options.prompt}\n")
        printer = Printer(engine, options.trace)
        ids: list[int] = []
        for item in engine.stream(tokens, **common):
            if isinstance(item, Done):
                speculative = Result("", tuple(ids), (), item.finish_reason, item.seed, item.stats)
            else:
                printer.write(item)
                ids += item.tokens
        printer.finish()
        plain = engine.generate(tokens, **common, drafter="off")
        agreement = compare_runs(engine, engine.request(tokens, **common), plain.token_ids, speculative.token_ids, seed)
        _summarise(plain, speculative)
        print(f"  output                     {agreement}")
    return 0 if agreement.agrees else 1


def _summarise(plain: Result, speculative: Result) -> None:
    s, p = speculative.stats, plain.stats
    speedup = s.tokens_per_second / p.tokens_per_second if p.tokens_per_second else float("nan")
    by_depth = " ".join(f"{share:.2f}" for share in s.acceptance_by_depth) or "none accepted"
    first = [x.first_token - x.started if x.first_token else 0.0 for x in (s, p)]
    print(f"\n  {'':26} {'EAGLE-3':>10} {'plain':>10}")
    print(f"  {'tokens/s':26} {s.tokens_per_second:10.1f} {p.tokens_per_second:10.1f}   speed-up {speedup:.2f}x")
    print(f"  {'time to first token, s':26} {first[0]:10.2f} {first[1]:10.2f}")
    print(f"  {'end to end, s':26} {first[0] + s.decode_seconds:10.2f} {first[1] + p.decode_seconds:10.2f}")
    print(f"  {'tokens a round (tau)':26} {s.acceptance_length:10.2f} {p.acceptance_length:10.2f}")
    print(f"  acceptance by depth        {by_depth}")
