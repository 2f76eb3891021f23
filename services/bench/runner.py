"""The paired benchmark: plain decoding, speculation and mlx-lm in turn, prompt by prompt."""

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from kernels import _blas
from services.bench.baseline import BaselineRun, MlxLmBaseline
from services.bench.compare import compare_runs
from services.bench.prompts import Prompt
from services.bench.results import Options, PromptResult, Timing, distinct_share, worst
from services.embedded import Engine
from services.embedded.engine import Result
from services.orchestrator.service import Request
from services.speculation.exactness import Agreement


def run_benchmark(
    engine: Engine, target: str, prompts: Sequence[Prompt], options: Options, tell: Callable[[PromptResult], None]
) -> list[PromptResult]:
    """Run all arms over all prompts.

    Args:
        engine: With a drafter, unless only plain decoding is wanted.
        target: Its name, to load an untouched copy for mlx-lm.
        prompts: User turns.
        options: Shared by the arms.
        tell: Called after each prompt.
    """
    baseline = engine.on_device(lambda: MlxLmBaseline(target)) if options.baseline else None
    drafts = bool(engine.drafters)

    def request(prompt: Prompt, drafter: str) -> Request:
        return engine.request(
            engine.orchestrator.encode(prompt.text) if options.raw else prompt.text,
            max_tokens=options.max_tokens,
            ignore_eos=options.ignore_eos,
            tree=options.tree,
            drafter=drafter,
        )

    # First runs build kernels and fault in weights: run every arm once, unmeasured.
    warm = request(prompts[0], "off")
    engine.run_all([warm])
    if drafts:
        engine.run_all([request(prompts[0], "auto")])
    if baseline:
        engine.on_device(lambda: baseline.run(warm.tokens, 8, True))

    results = []
    for prompt in prompts:
        arms: dict[str, list[Timing]] = {}
        plain: list[Result] = []
        speculative: list[Result] = []
        for _ in range(options.repetitions):
            plain.append(_timed(engine, request(prompt, "off"), arms.setdefault("plain", [])))
            if drafts:
                speculative.append(_timed(engine, request(prompt, "auto"), arms.setdefault("speculative", [])))
            if baseline:
                tokens = request(prompt, "off").tokens
                run: BaselineRun = engine.on_device(
                    partial(baseline.run, tokens, options.max_tokens, options.ignore_eos)
                )
                arms.setdefault("mlx_lm", []).append(Timing(run.tokens_per_second, run.first_seconds, run.last_seconds))
        agreement = compare_all(engine, request(prompt, "off"), plain[0], [*plain[1:], *speculative])
        results.append(
            PromptResult(
                kind=prompt.kind,
                prompt=prompt.text,
                completion_tokens=len(plain[0].token_ids),
                distinct=distinct_share(plain[0].token_ids),
                agreement=str(agreement),
                agrees=agreement.agrees,
                acceptance_length=(speculative or plain)[-1].stats.acceptance_length,
                arms=arms,
            )
        )
        tell(results[-1])
    return results


def compare_all(engine: Engine, request: Request, plain: Result, others: Sequence[Result]) -> Agreement:
    """The worst agreement of several runs with the first plain one; no others agree."""
    answers = dict.fromkeys(run.token_ids for run in others)  # repetitions are the same nearly always
    agreements = [compare_runs(engine, request, plain.token_ids, answer, plain.seed) for answer in answers]
    return worst(agreements)


def _timed(engine: Engine, request: Request, timings: list[Timing]) -> Result:
    start = time.perf_counter()
    result = engine.run_all([request])[0]
    stats = result.stats
    first = (stats.first_token or start) - start
    timings.append(Timing(stats.tokens_per_second, first, (stats.last_token or start) - start))
    return result


def machine(engine: Engine) -> dict[str, Any]:
    """Where and with what it ran."""
    import mlx.core as mx

    return {
        "device": str(mx.default_device()),
        "device_name": mx.device_info().get("device_name", platform.processor())
        if engine.info.device == "gpu"
        else _cpu(),
        "blas": _blas.loaded,
        "target": engine.info.name,
        "target_dtype": engine.info.feature_dtype,
        "drafters": [host.info.name for host in engine.drafters],
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm")},
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
