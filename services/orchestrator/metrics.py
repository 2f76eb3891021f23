"""What rounds and sessions count for Prometheus, under vLLM's names where there are such: a consumer of events."""

import logging
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.orchestrator.service import Orchestrator
from services.runtime.actor import log_incident
from services.runtime.bus import BusEvent, Subscription

log = logging.getLogger(__name__)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PARTS = ("draft", "verify", "network", "queue")


class RoundMetrics:
    """Turns events into metrics.

    Args:
        orchestrator: Whose sessions run and wait.
        registry: Where the metrics are.
    """

    def __init__(self, orchestrator: Orchestrator, registry: CollectorRegistry) -> None:
        model, names = orchestrator.info.name, ["model_name"]

        def counter(name: str, text: str, *labels: str) -> Counter:
            made = Counter(name, text, [*names, *labels], registry=registry)
            if not labels:
                made.labels(model)  # a rate needs its zero
            return made

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, [*names, *labels], registry=registry, buckets=_SECONDS)

        def gauge(name: str, text: str, read: Any) -> None:
            Gauge(name, text, names, registry=registry).labels(model).set_function(read)

        self._model = model
        gauge("vllm:num_requests_running", "Sessions that run.", lambda: orchestrator.running)
        gauge("vllm:num_requests_waiting", "Sessions that wait for their turn.", lambda: orchestrator.waiting)
        gauge("aerie_drafters", "Drafters that take sessions.", lambda: len(orchestrator.directory.offers))
        self._drafts = counter("vllm:spec_decode_num_drafts", "Trees that were verified.")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens that drafters proposed.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth, from 0.", "position"
        )
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = counter("vllm:generation_tokens", "Tokens that were generated.")
        self._finished = counter("vllm:request_success", "Sessions that ended, by reason.", "finished_reason")
        self._first = histogram("vllm:time_to_first_token_seconds", "Seconds to the first token.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Seconds of whole sessions.")
        self._rounds = counter("aerie_rounds", "Rounds.")
        self._fallbacks = counter("aerie_fallback_rounds", "Rounds of one node although a drafter was attached.")
        self._late = counter("aerie_late_drafts", "Drafts that missed their round's deadline.")
        self._seconds = histogram("aerie_round_seconds", "Where the time of rounds goes.", "part")
        self._refused = counter("aerie_requests_refused", "Requests that were refused, by reason.", "reason")
        self._lost = counter("aerie_drafters_lost", "Drafters that sessions lost.", "drafter")
        self._attached = counter("aerie_drafters_attached", "Drafters that joined running sessions.")
        self._resyncs = counter("aerie_drafter_resyncs", "Drafters that were primed again.")

    async def consume(self, events: Subscription) -> None:
        """Count what comes, until cancelled."""
        async for event in events:
            try:
                self.count(event)
            except Exception as error:  # one event that cannot be counted must not end all counting
                log_incident(log, f"a {event.topic} event was not counted", error)

    def count(self, event: BusEvent) -> None:
        """One event; those of other kinds count for nothing."""
        data = event.data
        match event.topic:
            case "round.committed":
                self._count_round(data)
            case "session.opened":
                self._prompt.labels(self._model).inc(data["prompt_tokens"])
            case "session.finished":
                self._generated.labels(self._model).inc(data["completion_tokens"])
                reason = "abort" if data["reason"] == "cancelled" else data["reason"]  # vLLM's word
                self._finished.labels(self._model, reason).inc()
                self._whole.labels(self._model).observe(data["seconds"])
                if data["first_token_seconds"] is not None:
                    self._first.labels(self._model).observe(data["first_token_seconds"])
            case "session.refused":
                self._refused.labels(self._model, data["reason"]).inc()
            case "drafter.lost":
                self._lost.labels(self._model, data["drafter"]).inc()
            case "drafter.attached":
                self._attached.labels(self._model).inc()
            case "drafter.resynced":
                self._resyncs.labels(self._model).inc()

    def _count_round(self, data: Mapping[str, Any]) -> None:
        self._rounds.labels(self._model).inc()
        if data["drafted"]:
            self._drafts.labels(self._model).inc()
            self._draft_tokens.labels(self._model).inc(data["nodes"] - 1)
            self._accepted.labels(self._model).inc(data["accepted"])
            for position in range(data["accepted"]):
                self._accepted_at.labels(self._model, str(position)).inc()
        elif data["attached"]:
            self._fallbacks.labels(self._model).inc()
        if data["late"]:
            self._late.labels(self._model).inc()
        parts = {part: data[f"{part}_seconds"] for part in PARTS}
        parts["other"] = max(0.0, data["round_seconds"] - sum(parts.values()))
        for part, seconds in parts.items():
            self._seconds.labels(self._model, part).observe(seconds)
