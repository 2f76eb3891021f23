"""What one generation did: rounds, acceptance and where the time went."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from services.speculation.messages import Drafted, Prefilled, Verdict


@dataclass
class Stats:
    """Consumer of a session's messages.

    Attributes:
        prompt_tokens, completion_tokens: Lengths in tokens; the completion counts an EOS token.
        rounds: Verify forwards after the prefill.
        started, first_token, last_token: ``time.perf_counter`` marks.
        prefill_seconds: ``Open`` to first token on the verifier.
        draft_seconds, verify_seconds: Compute reported by drafter and verifier; priming is drafting.
        queue_seconds: Waits for their devices, reported by both.
        network_seconds: What is left between a message and its answer.
        fallback_rounds: Rounds of one node although a drafter was attached.
        late_rounds: Those of them whose draft came too late.
        accepted: Of each round, the drafts that were accepted.
    """

    prompt_tokens: int
    started: float = field(default_factory=time.perf_counter)
    completion_tokens: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    first_token: float | None = None
    last_token: float | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    queue_seconds: float = 0.0
    network_seconds: float = 0.0
    fallback_rounds: int = 0
    late_rounds: int = 0
    accepted: list[int] = field(default_factory=list)

    def on_prefilled(self, message: Prefilled) -> None:
        self.first_token = self.last_token = time.perf_counter()
        self.prefill_seconds = message.seconds
        self.completion_tokens = 1

    def on_drafted(self, message: Drafted, wait: float) -> None:
        """A tree, ``wait`` seconds after it was asked for."""
        self.draft_seconds += message.seconds
        self._on_answer(message.seconds, message.queue_seconds, wait)
        self.drafted_rounds += 1

    def on_verdict(self, message: Verdict, wait: float) -> None:
        """A verdict, ``wait`` seconds after its tree was sent."""
        self._on_answer(message.seconds, message.queue_seconds, wait)
        self.last_token = time.perf_counter()
        self.rounds += 1
        self.verify_seconds += message.seconds
        self.completion_tokens += len(message.tokens)
        self.accepted.append(len(message.tokens) - 1)

    def _on_answer(self, seconds: float, queued: float, wait: float) -> None:
        self.queue_seconds += queued
        self.network_seconds += max(0.0, wait - seconds - queued)

    def snapshot(self) -> "Stats":
        """A copy that later messages do not change."""
        return replace(self, accepted=list(self.accepted))

    @property
    def decode_seconds(self) -> float:
        """First token to last."""
        return self.last_token - self.first_token if self.first_token and self.last_token else 0.0

    @property
    def tokens_per_second(self) -> float:
        return (self.completion_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """τ: tokens of a round, the bonus token included."""
        return 1 + sum(self.accepted) / len(self.accepted) if self.accepted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry d - 1: of the rounds that accepted a draft at depth d - 1, the share that accepted one at d."""
        deepest = max(self.accepted, default=0)
        reached = [sum(a >= depth for a in self.accepted) for depth in range(deepest + 1)]
        return [reached[d] / reached[d - 1] for d in range(1, deepest + 1)]

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}

    def report(self) -> dict[str, Any]:
        """The ``stats`` object of ``--json``."""
        overhead = max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)
        return {
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_depth": self.acceptance_by_depth,
            "tokens_per_second": self.tokens_per_second,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "overhead_seconds": overhead,
            "queue_seconds": self.queue_seconds,
            "network_seconds": self.network_seconds,
            "fallback_rounds": self.fallback_rounds,
            "late_rounds": self.late_rounds,
        }
