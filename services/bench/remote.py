"""The paired benchmark on a running orchestrator: plain decoding and speculation in turn, as a client sees them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.bench.prompts import Prompt
from services.bench.results import Options, PromptResult, Timing, distinct_share, worst
from services.client import ChunkMessage, Client
from services.orchestrator.routing import TreeOptions
from services.speculation.exactness import EPSILON_FLOAT32, Agreement, compare


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, the tokens of its rounds on average, and its times at the client."""

    tokens: tuple[int, ...]
    acceptance_length: float
    timing: Timing


class RemoteBenchmark:
    """Runs prompts on a service.

    Args:
        client: Of the orchestrator.
        drafter: What the speculative arm asks for; None leaves that arm out.
        options: Shared by the arms.
    """

    def __init__(self, client: Client, drafter: str | None, options: Options) -> None:
        self._client = client
        self._arms = {"plain": "off", **({"speculative": drafter} if drafter else {})}
        self._options: dict[str, Any] = {
            "max_tokens": options.max_tokens,
            "ignore_eos": options.ignore_eos,
            "raw": options.raw,
            **tree_options(options.tree),
        }
        self._repetitions = options.repetitions

    def run(self, prompts: Sequence[Prompt], tell: Callable[[PromptResult], None]) -> list[PromptResult]:
        """Run all arms over all prompts; ``tell`` is called after each prompt."""
        for drafter in self._arms.values():  # once unmeasured: a service may build kernels for it
            self._generate(prompts[0].text, drafter)
        results = []
        for prompt in prompts:
            runs: dict[str, list[Run]] = {arm: [] for arm in self._arms}
            for _ in range(self._repetitions):
                for arm, drafter in self._arms.items():
                    runs[arm].append(self._generate(prompt.text, drafter))
            plain, *others = (run.tokens for arm in runs.values() for run in arm)
            agreement = worst(self._compare(prompt.text, plain, other) for other in dict.fromkeys(others))
            results.append(
                PromptResult(
                    kind=prompt.kind,
                    prompt=prompt.text,
                    completion_tokens=len(plain),
                    distinct=distinct_share(plain),
                    agreement=str(agreement),
                    agrees=agreement.agrees,
                    acceptance_length=(runs.get("speculative") or runs["plain"])[-1].acceptance_length,
                    arms={arm: [run.timing for run in done] for arm, done in runs.items()},
                )
            )
            tell(results[-1])
        return results

    def _generate(self, prompt: str, drafter: str) -> Run:
        tokens: list[int] = []
        marks: list[float] = []
        acceptance_length = 0.0
        start = time.perf_counter()
        with self._client.stream(prompt, drafter=drafter, **self._options) as items:
            for item in items:
                if not isinstance(item, ChunkMessage):
                    acceptance_length = item.stats["acceptance_length"]
                elif item.tokens:
                    tokens += item.tokens
                    marks.append(time.perf_counter() - start)
        decoding = marks[-1] - marks[0]
        pace = (len(tokens) - 1) / decoding if decoding > 0 else 0.0
        return Run(tuple(tokens), acceptance_length, Timing(pace, marks[0], marks[-1]))

    def _compare(self, prompt: str, plain: Sequence[int], other: Sequence[int]) -> Agreement:
        """How ``other`` relates to plain decoding; the service itself says how near its tokens are where they part."""

        def is_tie(index: int) -> bool:
            options = {**self._options, "max_tokens": index + 1, "top_logprobs": 2}
            again = self._client.generate(prompt, drafter="off", **options)
            if again.token_ids[:index] != tuple(plain[:index]):
                return False  # it has parted before: nothing is known of this place
            (_, best), (_, second) = again.log_probs[index].top
            return best - second < EPSILON_FLOAT32

        return compare(plain, other, is_tie)


def tree_options(tree: TreeOptions) -> dict[str, int | None]:
    """As clients name them."""
    return {"tree_nodes": tree.nodes, "tree_depth": tree.depth, "tree_top_k": tree.top_k}
