"""What ``grpc.health.v1`` says of a process: "" is liveness, a service's name is readiness."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from grpc_health.v1 import health, health_pb2

from services.runtime.actor import Actor

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
Check = Callable[[], str | None]
"""Why a service is not ready, or None."""


class Readiness(Actor[None]):
    """Asks every check again and again: a service is ready when all pass. Liveness lasts as long as the process.

    Args:
        servicer: Answers Check and Watch; it streams every change.
        services: Full names of the services.
        checks: By what they look at.

    Attributes:
        reason: Why the process is not ready, or None.
    """

    def __init__(self, servicer: health.aio.HealthServicer, services: list[str], checks: Mapping[str, Check]) -> None:
        super().__init__("readiness")
        self.reason: str | None = "starting"
        self._servicer = servicer
        self._services = services
        self._checks = checks
        self._ticker: asyncio.Task[None] | None = None
        self._drained = False

    async def started(self) -> None:
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.refresh()
        self._ticker = asyncio.create_task(self._tick(), name="readiness ticker")

    async def stopped(self) -> None:
        if self._ticker:
            self._ticker.cancel()

    async def handle(self, message: None) -> None:
        await self.refresh()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.post(None)

    async def refresh(self) -> None:
        """Ask every check now."""
        if self._drained:
            return
        failing = [f"{name}: {why}" for name, check in self._checks.items() if (why := check())]
        await self._become("; ".join(failing) or None)

    async def withdraw(self) -> None:
        """Not ready, for good."""
        self._drained = True  # first: a refresh that runs meanwhile must not undo it
        await self._become("draining")

    async def _become(self, reason: str | None) -> None:
        changed = (reason is None) != (self.reason is None) or (
            reason and self._first(reason) != self._first(self.reason)
        )
        self.reason, before = reason, self.reason
        if not changed:
            return
        if reason:
            log.warning("not ready: %s", reason)
        elif before != "starting":
            log.warning("ready again")
        states = health_pb2.HealthCheckResponse
        for name in self._services:
            await self._servicer.set(name, states.NOT_SERVING if reason else states.SERVING)

    @staticmethod
    def _first(reason: str | None) -> str:
        """What is failing, without the figures in it."""
        return (reason or "").split(":", 1)[0]
