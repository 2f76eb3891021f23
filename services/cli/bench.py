"""``aerie bench``: the paired benchmark as a table and as JSON."""

import argparse
import json
from typing import Any

from services.bench.prompts import DEFAULT, read_prompts
from services.bench.runner import Options, PromptResult, machine, run_benchmark, summarise
from services.cli.main import UsageError
from services.cli.options import load_engine, tree


def bench(options: argparse.Namespace) -> int:
    """Run the benchmark. Exit code 1 when an output differs from plain decoding."""
    if options.repetitions < 3:
        raise UsageError(f"--repetitions must be 3 or more, not {options.repetitions}")
    if options.max_tokens < 2 or (options.limit is not None and options.limit < 1):
        raise UsageError("--max-tokens must be 2 or more and --limit 1 or more")
    prompts = read_prompts(options.prompts or DEFAULT)[: options.limit]
    settings = Options(
        options.max_tokens, options.repetitions, options.ignore_eos, tree(options), baseline=not options.no_mlx_lm
    )
    with load_engine(options) as engine:
        where = machine(engine)
        print(f"{where['target']} ({where['target_dtype']}) on {where['device_name']}, drafters: {where['drafters']}")
        print(" ".join(f"{head:>9}" for head in _HEADS))
        results = run_benchmark(engine, options.target, prompts, settings, _print_row)
        summary = summarise(results)
    _print_summary(summary)
    if options.json:
        report = {
            "machine": where,
            "options": {**vars(settings), "tree": vars(settings.tree)},
            "summary": summary,
            "prompts": [r.as_json() for r in results],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(r.agrees for r in results) else 1


_HEADS = ("kind", "tokens", "distinct", "plain", "spec", "mlx_lm", "spec/pl", "tau", "output")


def _print_row(r: PromptResult) -> None:
    speeds = [f"{r.median(arm):.1f}" if arm in r.arms else "-" for arm in ("plain", "speculative", "mlx_lm")]
    ratio = f"{r.ratio('speculative', 'plain'):.2f}" if "speculative" in r.arms else "-"
    cells = (r.kind, r.completion_tokens, f"{r.distinct:.2f}", *speeds, ratio, f"{r.acceptance_length:.2f}")
    print(" ".join(f"{cell:>9}" for cell in cells), f" {r.agreement}", flush=True)


def _print_summary(summary: dict[str, Any]) -> None:
    names = [n for n in next(iter(summary.values())) if "_over_" in n]
    heads = {n: n.replace("_over_", " / ").replace("speculative", "spec") for n in names}
    print(f"\n{'geometric means (min..max)':28} {'prompts':>7} " + " ".join(f"{h:>22}" for h in heads.values()))
    for group, row in summary.items():
        cells = [f"{row[n]['mean']:.2f} ({row[n]['min']:.2f}..{row[n]['max']:.2f})" for n in names]
        print(f"{group:28} {row['prompts']:7} " + " ".join(f"{c:>22}" for c in cells))
    print(f"\n{'medians':28} " + " ".join(f"{h:>22}" for h in ("first token, s", "end to end, s")))
    for arm in ("plain", "speculative", "mlx_lm"):
        if f"{arm}_first_seconds" in (row := summary["all"]):
            print(f"{arm:28} {row[f'{arm}_first_seconds']:22.2f} {row[f'{arm}_total_seconds']:22.2f}")
