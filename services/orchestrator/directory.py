"""Which drafters take sessions: an actor that asks everyone whom the registry names, again and again.

Nothing here is on a round's path: sessions look at what is known, and hear when a drafter joins.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.orchestrator.pace import DraftPace
from services.runtime.actor import Actor
from services.runtime.bus import Bus
from services.runtime.registry import HEARTBEAT_SECONDS, Entry, Registry
from services.speculation.errors import AerieError
from services.speculation.messages import DrafterInfo, DrafterStatus, TargetInfo
from services.speculation.ports import DrafterPort

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""A drafter that takes longer to say how it is misses a beat."""
MISSED_BEATS = 3
"""A drafter that misses so many is offered no longer."""
Dial = Callable[[str], DrafterPort]
"""Address -> port; raises ConnectionError when nobody can be there."""


@dataclass(eq=False)
class Offer:
    """A drafter that takes sessions. One that was away and has come back is another offer.

    Attributes:
        name: Of the instance, unique.
        address: Where it is.
        port: Reaches it.
        status: What it said last.
        pace: How soon it answers; None for one that is awaited (in this process).
        sessions: Those of this orchestrator.
        missed: Beats that it missed in a row.
    """

    name: str
    address: str
    port: DrafterPort
    status: DrafterStatus
    pace: DraftPace | None
    sessions: int = 0
    missed: int = 0

    @property
    def info(self) -> DrafterInfo:
        return self.status.info

    @property
    def load(self) -> int:
        """Sessions: our own count is newer, the drafter's knows of other orchestrators."""
        return max(self.sessions, self.status.sessions)


@dataclass(frozen=True)
class Refresh:
    """Ask everyone now; ``done`` is told when everyone has answered."""

    done: "asyncio.Future[None] | None" = None


@dataclass(frozen=True)
class Gone:
    """A session's stream to this drafter broke."""

    offer: Offer


class Directory(Actor[Refresh | Gone]):
    """Keeps the offers in step with the registry.

    Args:
        registry: Names drafters and their addresses.
        dial: Makes ports.
        target: What they must fit.
        bus: Told of drafters that join and leave.
        local: Drafters are in this process: nobody is asked in between, and drafts have no deadline.

    Attributes:
        offers: By instance name.
        unfit: Instance names of those that are not offered, and why.
    """

    def __init__(self, registry: Registry, dial: Dial, target: TargetInfo, bus: Bus, local: bool = False) -> None:
        super().__init__("directory")
        self.offers: dict[str, Offer] = {}
        self.unfit: dict[str, str] = {}
        self._registry = registry
        self._dial = dial
        self._target = target
        self._bus = bus
        self._local = local
        self._listeners: set[Callable[[], None]] = set()
        self._ticker: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Ask everyone, and wait for the answers."""
        await self.ask(Refresh)

    def on_join(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` whenever a drafter joins; calling what is returned takes that back."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    async def started(self) -> None:
        if not self._local:
            self._ticker = asyncio.create_task(self._tick(), name="directory ticker")

    async def stopped(self) -> None:
        if self._ticker:
            self._ticker.cancel()

    async def handle(self, message: Refresh | Gone) -> None:
        if isinstance(message, Gone):
            if self.offers.get(message.offer.name) is message.offer:
                self._remove(message.offer.name, "a session's stream to it broke")
            return
        await self._refresh()
        if message.done and not message.done.done():
            message.done.set_result(None)

    async def on_error(self, message: Refresh | Gone, error: Exception) -> None:
        log.error("the directory could not refresh", exc_info=error)
        if isinstance(message, Refresh) and message.done and not message.done.done():
            message.done.set_exception(error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if not self.waiting:  # a registry that hangs must not fill the mailbox
                self.post(Refresh())

    async def _refresh(self) -> None:
        try:
            entries = await self._registry.list("drafter")
        except ConnectionError:
            entries = [Entry(o.name, "drafter", o.address) for o in self.offers.values()]  # what is known still holds
        names = {entry.name for entry in entries}
        for name in self.offers.keys() - names:
            self._remove(name, "it has left the registry")
        for name in self.unfit.keys() - names:
            del self.unfit[name]
        await asyncio.gather(*(self._probe(entry) for entry in entries))

    async def _probe(self, entry: Entry) -> None:
        known = self.offers.get(entry.name)
        if known and known.address != entry.address:
            self._remove(entry.name, "it has moved")
            known = None
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                port = self._dial(entry.address)
                status = await port.status()
        except TimeoutError:
            if known is None or known.missed + 1 >= MISSED_BEATS:
                self._refuse(entry.name, "it does not answer")
            else:
                known.missed += 1
            return
        except (ConnectionError, AerieError) as error:
            self._refuse(entry.name, str(error))
            return
        if why := why_unfit(status.info, self._target):
            self._refuse(entry.name, why, logging.WARNING)
        elif self.offers.get(entry.name) is known and known:
            known.status, known.missed = status, 0
        else:
            pace = None if self._local else DraftPace()
            self._add(Offer(entry.name, entry.address, port, status, pace))

    def _add(self, offer: Offer) -> None:
        self.unfit.pop(offer.name, None)
        self.offers[offer.name] = offer
        log.info("drafter %s joins: %s at %s", offer.name, offer.info.name, offer.address)
        self._bus.publish("drafter.joined", drafter=offer.name, family=offer.info.family)
        for listener in tuple(self._listeners):
            listener()

    def _refuse(self, name: str, why: str, level: int = logging.INFO) -> None:
        if self.unfit.get(name) != why:
            log.log(level, "drafter %s is not offered: %s", name, why)
        self.unfit[name] = why
        if name in self.offers:
            self._remove(name, why)

    def _remove(self, name: str, why: str) -> None:
        offer = self.offers.pop(name)
        log.info("drafter %s has left: %s", name, why)
        self._bus.publish("drafter.left", drafter=name, family=offer.info.family)


def why_unfit(info: DrafterInfo, target: TargetInfo) -> str | None:
    """Why a drafter cannot serve a target; None when it can."""
    if info.target_fingerprint not in (None, target.weights_fingerprint):
        return f"it was made for the target {info.target_fingerprint}, not {target.weights_fingerprint}"
    if not info.taps:
        return "it reads no tap"
    if len(set(info.taps)) < len(info.taps):
        return f"it reads a tap twice: {info.taps}"
    if wrong := [tap for tap in info.taps if tap != "final" and not 0 <= tap <= target.layers]:
        return f"it reads tap {wrong[0]}; the target has 0..{target.layers}"
    return None
