"""Losslessness on the real model: speculative output against plain decoding, arm by arm.

``python -m services.bench.lossless --out docs/results/lossless.json`` is ``make verify``. On the CPU a forward of one
row costs about as much as one of eight, so the sessions that run alone take most of its time.
"""

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.bench.compare import compare_runs
from services.bench.drafters import RandomDrafter, RootDrafter
from services.bench.files import check_writable, write_report
from services.bench.prompts import DEFAULT, Prompt, read_prompts
from services.bench.runner import machine
from services.embedded import Engine
from services.embedded.engine import Result
from services.orchestrator.routing import TreeOptions
from services.orchestrator.service import Request
from services.speculation.errors import AerieError
from services.speculation.warpers import Sampler

MAX_TIES = 1e-4
"""Most ties a token over a whole run, float32."""

SAMPLERS: dict[str, Sampler] = {
    "greedy": Sampler(),
    "t1.0": Sampler(temperature=1.0),
    "t0.7": Sampler(temperature=0.7),
    "t0.7 top-p 0.9": Sampler(temperature=0.7, top_p=0.9),
    "t1.0 top-k 40": Sampler(temperature=1.0, top_k=40),
    "t1.0 top-k 50 top-p 0.95 min-p 0.02, penalties, bias": Sampler(
        temperature=1.0,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias=((198, 0.5), (28, -1.0)),
    ),
}
NEIGHBOURS = 8
"""Sessions side by side; each has one fewer beside it."""

FULL = ("greedy", "t1.0")
"""Settings that run on every prompt, with every drafter, alone and side by side."""

FEW_DRAFTERS = ("eagle3", "random")
"""Drafters of the other settings, which run on a few prompts side by side."""

DRAFTERS = {"eagle3": TreeOptions(), "random": TreeOptions(nodes=4, depth=3, top_k=2), "root": TreeOptions()}
"""Drafter arms and their trees."""


@dataclass
class Arm:
    """Outcome of one drafter under one sampler, alone or in a batch: tokens that were compared, drafters lost."""

    sampler: str
    drafter: str
    batch: int
    tokens: int = 0
    prompts: int = 0
    identical: int = 0
    rounds: int = 0
    lost: int = 0
    seconds: float = 0.0
    ties: list[dict[str, Any]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.sampler:14.14} {self.drafter:7} batch {self.batch}: {self.identical} of {self.prompts} identical, "
            f"{len(self.ties)} ties, {len(self.differences)} differences, {self.seconds:.0f} s"
        )


def load_engine() -> Engine:
    """SmolLM2 with the shipped drafter and the two test drafters."""
    engine = Engine.load("smollm2", "eagle3")
    engine.add_drafter(RandomDrafter(engine.info.vocab_size))
    engine.add_drafter(RootDrafter(engine.info.vocab_size))
    return engine


def run_plain(engine: Engine, prompts: Sequence[Prompt], sampler: Sampler, max_tokens: int) -> list[Result]:
    """Plain decoding of every prompt, in batches of sessions."""
    requests = [_request(engine, p, i, sampler, max_tokens, "off") for i, p in enumerate(prompts)]
    return _run(engine, requests, NEIGHBOURS)


def run_arm(
    engine: Engine,
    prompts: Sequence[Prompt],
    plain: Sequence[Result],
    sampler: str,
    drafter: str,
    batch: int,
    max_tokens: int,
    samplers: dict[str, Sampler] = SAMPLERS,
) -> Arm:
    """One drafter against plain decoding, ``batch`` sessions side by side."""
    arm, start = Arm(sampler, drafter, batch), time.monotonic()
    requests = [_request(engine, p, i, samplers[sampler], max_tokens, drafter) for i, p in enumerate(prompts)]
    for index, (request, result) in enumerate(zip(requests, _run(engine, requests, batch), strict=True)):
        expected = plain[index].token_ids
        agreement = compare_runs(engine, request, expected, result.token_ids, result.seed)
        arm.prompts += 1
        parted = agreement.tie_at if agreement.differs_at is None else agreement.differs_at
        arm.tokens += len(expected) if parted is None else min(parted + 1, len(expected))
        arm.rounds += result.stats.rounds
        arm.lost += result.drafter_lost is not None
        arm.identical += agreement.identical
        if agreement.tie_at is not None:
            arm.ties.append({"prompt": index, "token": agreement.tie_at})
        if agreement.differs_at is not None:
            arm.differences.append({"prompt": index, "token": agreement.differs_at})
    arm.seconds = round(time.monotonic() - start, 1)
    return arm


def _request(engine: Engine, prompt: Prompt, index: int, sampler: Sampler, max_tokens: int, drafter: str) -> Request:
    tree = DRAFTERS.get(drafter, TreeOptions())
    return engine.request(
        prompt.text, max_tokens=max_tokens, sampler=sampler, seed=1000 + index, drafter=drafter, tree=tree
    )


def _run(engine: Engine, requests: Sequence[Request], batch: int) -> list[Result]:
    """Results of all requests, ``batch`` sessions at a time: a batch that is not full is filled with repeats."""
    results: list[Result] = []
    for start in range(0, len(requests), batch):
        chunk = requests[start : start + batch]
        repeats = itertools.islice(itertools.cycle(requests), batch - len(chunk))
        results += engine.run_all([*chunk, *repeats])[: len(chunk)]
    return results


def verify(prompts: Sequence[Prompt], max_tokens: int, few: int, few_tokens: int) -> dict[str, Any]:
    """Every arm; returns the report.

    Args:
        prompts: All of them run under the FULL settings.
        max_tokens: Of an answer under those.
        few, few_tokens: Prompts, spread over all, and tokens of an answer under the other settings.
    """
    start, arms = time.monotonic(), []
    spread = prompts[:: max(1, len(prompts) // few)][:few]
    with load_engine() as engine:
        where = machine(engine)
        for name, sampler in SAMPLERS.items():
            full = name in FULL
            chosen, length = (prompts, max_tokens) if full else (spread, few_tokens)
            plain = run_plain(engine, chosen, sampler, length)
            for drafter in DRAFTERS if full else FEW_DRAFTERS:
                for batch in (NEIGHBOURS, 1) if full else (NEIGHBOURS,):
                    arm = run_arm(engine, chosen, plain, name, drafter, batch, length)
                    arms.append(arm)
                    print(f"{time.monotonic() - start:6.0f} s  {arm}", flush=True)
    tokens = sum(arm.tokens for arm in arms)
    ties = sum(len(arm.ties) for arm in arms)
    differences = sum(len(arm.differences) for arm in arms)
    return {
        # A session that lost its drafter shows nothing.
        "passed": not differences and ties <= MAX_TIES * tokens and not any(arm.lost for arm in arms),
        "commit": _commit(),
        "machine": where,
        "seconds": round(time.monotonic() - start),
        "max_tokens": max_tokens,
        "few_tokens": few_tokens,
        "tokens": tokens,
        "ties": ties,
        "differences": differences,
        "arms": [vars(arm) for arm in arms],
    }


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not a checkout"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, default=DEFAULT)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--few", type=int, default=12, help="prompts of the settings that do not run on all")
    parser.add_argument("--few-tokens", type=int, default=128, help="tokens of an answer under those settings")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if min(options.max_tokens, options.few, options.few_tokens) < 1:
        parser.error("--max-tokens, --few and --few-tokens must be 1 or more")
    try:
        if options.out:
            check_writable(options.out)
        report = verify(read_prompts(options.prompts), options.max_tokens, options.few, options.few_tokens)
    except AerieError as error:
        parser.exit(1, f"{error}\n")
    if options.out:
        write_report(options.out, report)
    print(", ".join(f"{report[name]} {name}" for name in ("tokens", "ties", "differences", "seconds")))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
