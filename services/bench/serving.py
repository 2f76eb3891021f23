"""What serving costs: three processes and one, alternating on the same prompts (``python -m services.bench.serving``).

Prints, for each form, tokens a second and a round's milliseconds by part, and the ratio of the two; exits with 1 when
their tokens differ. Nothing else should run meanwhile.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from services.bench.prompts import read_prompts
from services.cli.parser_shared import at_least
from services.client import AerieError, Client
from services.embedded import Engine

PARTS = ("draft", "verify", "network", "queue", "overhead")
"""``overhead`` is all that is neither draft nor verify: network and queue are in it."""


def main() -> int:
    """Run and print; 1 when the two forms disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=at_least(1), default=6, help="prompts, of all kinds (default: 6)")
    parser.add_argument("--max-tokens", type=at_least(2), default=96, help="of an answer (default: 96)")
    parser.add_argument("--repetitions", type=at_least(1), default=3, help="of each prompt (default: 3)")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"three processes": [], "embedded": []}
    prompts = [prompt.text for prompt in read_prompts()]
    prompts = prompts[:: max(1, len(prompts) // options.limit)][: options.limit]
    with three_processes() as address, Client(address) as client, Engine.load("smollm2", "eagle3") as engine:
        client.generate(prompts[0], max_tokens=32)  # once unmeasured
        engine.generate(prompts[0], max_tokens=32)
        for _ in range(options.repetitions):
            for prompt in prompts:
                served = client.generate(prompt, max_tokens=options.max_tokens)
                alone = engine.generate(prompt, max_tokens=options.max_tokens)
                if served.token_ids != alone.token_ids:
                    print(f"the tokens differ: {prompt!r}", file=sys.stderr)
                    return 1
                runs["three processes"].append(figures(served.stats))
                runs["embedded"].append(figures(alone.stats.report()))
    pairs = zip(*(runs[form] for form in runs), strict=True)
    ratios = [three["tokens_per_second"] / one["tokens_per_second"] for three, one in pairs]
    medians = {form: {name: median(run[name] for run in done) for name in done[0]} for form, done in runs.items()}
    ratio = {"median": median(ratios), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}
    print(json.dumps({**medians, "ratio": ratio, "runs": len(ratios)}, indent=1))
    return 0


def figures(stats: Any) -> dict[str, float]:
    """Tokens a second, and milliseconds of a round."""
    rounds = max(stats["rounds"], 1)
    parts = {f"{part}_ms": 1000 * stats[f"{part}_seconds"] / rounds for part in PARTS}
    return {"tokens_per_second": stats["tokens_per_second"], **parts}


def median(values: Any) -> float:
    return round(statistics.median(values), 3)


@contextmanager
def three_processes() -> Iterator[str]:
    """A verifier, a drafter and an orchestrator on unix sockets; where the last one listens."""
    with tempfile.TemporaryDirectory(prefix="aerie-") as folder:
        sockets = {kind: f"unix:{Path(folder, kind)}" for kind in ("verifier", "drafter", "orchestrator")}
        told: dict[str, list[str]] = {
            "verifier": [],
            "drafter": ["--verifier", sockets["verifier"]],
            "orchestrator": ["--verifier", sockets["verifier"], "--drafter", sockets["drafter"]],
        }
        started = []
        try:
            for kind, arguments in told.items():
                command = ["serve", kind, "--listen", sockets[kind], "--log-level", "error", *arguments]
                aerie = [sys.executable, "-m", "services.cli.main", *command]
                started.append(subprocess.Popen(aerie, stdout=subprocess.DEVNULL))
            with Client(sockets["orchestrator"], retries=0) as client:
                wait_for_drafter(client)
            yield sockets["orchestrator"]
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(60)


def wait_for_drafter(client: Client, seconds: float = 120.0) -> None:
    """Raises TimeoutError: No drafter has joined by then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(AerieError):  # the orchestrator is not there yet
            if any(line.status for line in client.drafters()):
                return
        time.sleep(0.5)
    raise TimeoutError("no drafter has joined")


if __name__ == "__main__":
    sys.exit(main())
