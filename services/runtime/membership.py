"""An actor that keeps one service instance in the registry for as long as the actor runs."""

import asyncio
import contextlib
import logging

from services.runtime.actor import Actor, ActorStopped
from services.runtime.outage import Outage
from services.runtime.registry import HEARTBEAT_SECONDS, LEASE_SECONDS, Entry, Registry, write_entry

LEAVE_SECONDS = 1.0

log = logging.getLogger(__name__)


class Membership(Actor[Entry | None]):
    """Joins at its start, renews the lease every heartbeat, joins again when the lease is gone, leaves at its end.

    A registry that does not answer is tried again, and delays nobody but this actor. ``tell`` it a new Entry to
    replace the data; None, its own message, is a heartbeat.

    Args:
        registry: Where to be listed.
        entry: What to be listed as.
        heartbeat: Seconds between two renewals.
        lease: Seconds after the last renewal until the entry is gone.
    """

    def __init__(
        self,
        registry: Registry,
        entry: Entry,
        heartbeat: float = HEARTBEAT_SECONDS,
        lease: float = LEASE_SECONDS,
    ) -> None:
        super().__init__(f"membership of {entry.name}")
        write_entry(entry)
        self._registry = registry
        self._entry = entry
        self._heartbeat = heartbeat
        self._lease = lease
        self._outage = Outage(log, self.name, longest=heartbeat)
        self._timer: asyncio.TimerHandle | None = None
        self.joined = False

    def post(self, message: Entry | None) -> None:
        """Queue an update.

        Raises:
            ValueError: The entry has another name, or data that no entry may have.
            ActorStopped: The actor does not run, or drains.
        """
        if message is not None:
            write_entry(message)
            if message.name != self._entry.name:
                raise ValueError(f"{self._entry.name} cannot become {message.name}: an instance keeps its name")
        super().post(message)

    async def started(self) -> None:
        await self._beat()

    async def handle(self, message: Entry | None) -> None:
        if message is not None:
            self._entry, self.joined = message, False
        await self._beat()

    async def stopped(self) -> None:
        self._stop_timer()
        self.joined = False
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._registry.leave(self._entry.name)
        except (ConnectionError, TimeoutError) as error:
            log.info("%s: left without saying so, the lease will end: %s", self.name, error)

    async def _beat(self) -> None:
        """Be in the registry, then once more a heartbeat later, or sooner if it did not answer."""
        self._stop_timer()
        try:
            self.joined = self.joined and await self._registry.renew(self._entry.name, self._lease)
            if not self.joined:
                await self._registry.join(self._entry, self._lease)
                self.joined = True
        except ConnectionError as error:
            delay = self._outage.failed(error)
        else:
            self._outage.over()
            delay = self._heartbeat
        self._timer = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        with contextlib.suppress(ActorStopped):  # it drains, and leaves next
            self.post(None)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
