"""The orchestrator's eye on its verifier: there, the same target still, and where the registry says."""

import asyncio

from services.orchestrator.grpc_ports import GrpcVerifierPort, NotReady
from services.runtime.registry import Registry
from services.speculation.messages import TargetInfo

ANSWER_SECONDS = 0.5
"""Of what whoever asks gives to it, the rest is for the registry."""
MISSED_ANSWERS = 3
"""A verifier that leaves so many questions in a row unanswered gets no more requests: one that is frozen would hold
their clients until keepalives notice."""


class VerifierWatch:
    """Asked again and again; what it finds wrong for good, only a new start of the process mends.

    Args:
        port: The verifier.
        address: Where it is.
        info: What it said of itself when the orchestrator started: tokenizer and limits are those of that target.
        registry: Where the verifier was found; None when its address was given.

    Attributes:
        changed: Why the orchestrator must be started again, or None.
        silent: Why requests are refused at once, or None. One that answers and is not ready still queues them.
    """

    def __init__(self, port: GrpcVerifierPort, address: str, info: TargetInfo, registry: Registry | None) -> None:
        self.changed: str | None = None
        self.silent: str | None = None
        self._unanswered = 0
        self._port, self._address, self._info, self._registry = port, address, info, registry
        self._away = False

    async def ask(self) -> None:
        """Raises ConnectionError: The verifier is away, takes no sessions, or is not the one that it was."""
        if self.changed:
            raise ConnectionError(self.changed)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._port.check_ready()
        except (ConnectionError, TimeoutError) as error:
            self._away = True
            self._unanswered = 0 if isinstance(error, NotReady) else self._unanswered + 1
            self.silent = "the verifier does not answer" if self._unanswered >= MISSED_ANSWERS else None
            await self._look_elsewhere()
            raise ConnectionError(str(error) or "it does not answer") from None
        if self._away:
            await self._compare()
            self._away = False
        self.silent, self._unanswered = None, 0

    async def _compare(self) -> None:
        """After it was away: whoever answers now may serve another target."""
        info = await self._port.info()
        if info.weights_fingerprint != self._info.weights_fingerprint:
            self.changed = f"the verifier at {self._address} serves another target now: {info.name}"
            raise ConnectionError(self.changed)

    async def _look_elsewhere(self) -> None:
        if self._registry is None:
            return
        there = [entry.address for entry in await self._registry.list("verifier")]
        if there and self._address not in there:
            self.changed = f"the verifier has moved from {self._address} to {there[0]}"
