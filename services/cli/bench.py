"""``aerie bench``: the paired benchmark as a table and as JSON."""

import argparse
from typing import Any

from services.bench.files import check_writable, write_report
from services.bench.prompts import DEFAULT, read_prompts
from services.bench.results import ARMS, Options, PromptResult, summarise
from services.cli.options import check_source, tree, usable_path
from services.cli.report import UsageError, complain
from services.cli.sources import open_source


def bench(options: argparse.Namespace) -> int:
    """Run the benchmark. Exit code 1 when an output differs from plain decoding."""
    check_source(options)
    if options.repetitions < 3:
        raise UsageError(f"--repetitions must be 3 or more, not {options.repetitions}")
    if options.max_tokens < 2:
        raise UsageError(f"--max-tokens must be 2 or more, not {options.max_tokens}")
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit must be 1 or more, not {options.limit}")
    settings = Options(
        options.max_tokens,
        options.repetitions,
        options.ignore_eos,
        tree(options),
        baseline=not options.no_mlx_lm and options.connect is None,  # a service has no such arm
        raw=options.raw,
    )
    prompts = read_prompts(usable_path("--prompts", options.prompts or DEFAULT))[: options.limit]
    out = options.json and usable_path("--json", options.json)
    if out:
        check_writable(out)
    with open_source(options) as source:
        if not options.raw:
            source.need_template("send the prompts with --raw")
        where = source.machine()
        if options.drafter == "auto" and not where["drafters"]:
            complain("no drafter fits the target: measuring plain decoding")
        drafters = ", ".join(where["drafters"]) or "none"
        print(f"{where['target']} {source.place()}, drafters: {drafters}")
        print(" ".join(f"{head:>9}" for head in _HEADS), flush=True)
        results = source.benchmark(prompts, settings, _print_row)
        summary = summarise(results)
    _print_summary(summary)
    if out:
        report = {
            "machine": where,
            "options": {**vars(settings), "tree": vars(settings.tree)},
            "summary": summary,
            "prompts": [r.as_json() for r in results],
        }
        write_report(out, report)
    return 0 if all(r.agrees for r in results) else 1


_HEADS = ("kind", "tokens", "distinct", "plain", "spec", "mlx_lm", "spec/pl", "tau", "output")


def _print_row(r: PromptResult) -> None:
    speeds = [f"{r.median(arm):.1f}" if r.timed and arm in r.arms else "-" for arm in ARMS]
    drafted = "speculative" in r.arms
    ratio = f"{r.ratio('speculative', 'plain'):.2f}" if r.timed and drafted else "-"
    tau = f"{r.acceptance_length:.2f}" if r.timed and drafted else "-"
    cells = (r.kind, r.completion_tokens, f"{r.distinct:.2f}", *speeds, ratio, tau)
    print(" ".join(f"{cell:>9}" for cell in cells), f" {r.agreement}", flush=True)


def _print_summary(summary: dict[str, Any]) -> None:
    if not summary:
        print("\nno answer was long enough to be timed")
        return
    if names := [n for n in summary["all"] if "_over_" in n]:
        heads = {n: n.replace("_over_", " / ").replace("speculative", "spec") for n in names}
        print(f"\n{'geometric means (min..max)':28} {'prompts':>7} " + " ".join(f"{h:>22}" for h in heads.values()))
        for group, row in summary.items():
            cells = [f"{row[n]['mean']:.2f} ({row[n]['min']:.2f}..{row[n]['max']:.2f})" for n in names]
            print(f"{group:28} {row['prompts']:7} " + " ".join(f"{c:>22}" for c in cells))
    fields = {"tokens_per_second": "tokens/s", "first_seconds": "first token, s", "total_seconds": "end to end, s"}
    print(f"\n{'medians':28} " + " ".join(f"{head:>22}" for head in fields.values()))
    for arm in ARMS:
        if f"{arm}_total_seconds" in (row := summary["all"]):
            print(f"{arm:28} " + " ".join(f"{row[f'{arm}_{field}']:22.2f}" for field in fields))
