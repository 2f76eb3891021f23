"""What a benchmark finds, prompt by prompt and as a whole, wherever the target runs: nothing here imports MLX."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.orchestrator.routing import TreeOptions
from services.speculation.exactness import Agreement

ARMS = ("plain", "speculative", "mlx_lm")

LOOP_SHARE = 0.8
"""An answer loops when its share of distinct 4-grams is this or less."""


@dataclass(frozen=True)
class Options:
    """What every arm runs with; ``raw`` prompts go without the chat template."""

    max_tokens: int = 96
    repetitions: int = 3
    ignore_eos: bool = False
    tree: TreeOptions = field(default_factory=TreeOptions)
    baseline: bool = True
    raw: bool = False


@dataclass(frozen=True)
class Timing:
    """One run of one arm; an answer of one token has no pace (0)."""

    tokens_per_second: float
    first_seconds: float
    total_seconds: float


@dataclass
class PromptResult:
    """All repetitions of one prompt."""

    kind: str
    prompt: str
    completion_tokens: int
    distinct: float
    agreement: str
    agrees: bool
    acceptance_length: float
    arms: dict[str, list[Timing]]

    @property
    def timed(self) -> bool:
        """Every arm has a pace."""
        return all(self.median(arm) > 0 for arm in self.arms)

    @property
    def loops(self) -> bool:
        return self.distinct <= LOOP_SHARE

    def median(self, arm: str, field_name: str = "tokens_per_second") -> float:
        return statistics.median(getattr(t, field_name) for t in self.arms[arm])

    def ratio(self, arm: str, over: str) -> float:
        return self.median(arm) / self.median(over)

    def as_json(self) -> dict[str, Any]:
        arms = {name: [vars(t) for t in timings] for name, timings in self.arms.items()}
        return {**vars(self), "loops": self.loops, "arms": arms}


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of distinct n-grams: an answer loops when it is 0.8 or less."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def worst(agreements: Iterable[Agreement]) -> Agreement:
    """The one that agrees least; none at all agree."""
    return min(agreements, key=lambda a: (a.agrees, a.identical), default=Agreement(True))


def summarise(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Geometric means of the per-prompt ratios of medians, with their spread.

    Prompts without a pace in some arm are left out; the groups without any other too.
    """
    results = [r for r in results if r.timed]
    groups = {"all": results, "not looping": [r for r in results if not r.loops]}
    for kind in dict.fromkeys(r.kind for r in results):
        # A kind may be called like a group of all kinds.
        groups[f"kind {kind}" if kind in ("all", "not looping") else kind] = [r for r in results if r.kind == kind]
    arms = set(results[0].arms) if results else set()
    pairs = {
        "speculative_over_plain": ("speculative", "plain"),
        "speculative_over_mlx_lm": ("speculative", "mlx_lm"),
        "plain_over_mlx_lm": ("plain", "mlx_lm"),
    }
    summary: dict[str, Any] = {}
    for group, members in groups.items():
        if not members:
            continue
        row: dict[str, Any] = {"prompts": len(members)}
        for arm in sorted(arms):
            row[f"{arm}_tokens_per_second"] = statistics.median(r.median(arm) for r in members)
            row[f"{arm}_first_seconds"] = statistics.median(r.median(arm, "first_seconds") for r in members)
            row[f"{arm}_total_seconds"] = statistics.median(r.median(arm, "total_seconds") for r in members)
        for name, (a, b) in pairs.items():
            if {a, b} <= arms:
                ratios = [r.ratio(a, b) for r in members]
                row[name] = {"mean": statistics.geometric_mean(ratios), "min": min(ratios), "max": max(ratios)}
        if "speculative" in arms:
            row["acceptance_length"] = statistics.mean(r.acceptance_length for r in members)
        summary[group] = row
    return summary
