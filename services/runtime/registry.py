"""Who serves what: entries with leases that end unless they are renewed.

Here in memory, for one process; ``redis_registry`` keeps the same entries for several. Entries hold JSON values only,
so both give back the same: what a reader does to an entry, or its writer afterwards, changes nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.runtime.json_object import read_object, write_object

KINDS = ("verifier", "drafter", "orchestrator")
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 3.0  # an instance is gone after three missed beats
NAME_LENGTH = 256


@dataclass(frozen=True)
class Entry:
    """One service instance.

    Attributes:
        name: Unique instance name, whatever the kind.
        kind: ``verifier``, ``drafter`` or ``orchestrator``.
        address: ``host:port`` or ``unix:PATH``.
        data: JSON values that say what it serves, such as ``family`` or ``target_fingerprint``.
    """

    name: str
    kind: str
    address: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Registry(Protocol):
    """Living entries. With the store behind it away, every method raises ConnectionError, and soon."""

    async def join(self, entry: Entry, lease: float | None = None) -> None:
        """Add an entry, or replace the one of its name; with a lease of ``lease`` seconds, it must be renewed.

        Raises:
            ValueError: A name, kind or data that no entry may have.
        """

    async def renew(self, name: str, lease: float) -> bool:
        """Extend a lease to ``lease`` seconds from now; False when the entry is gone and must join again."""
        ...

    async def leave(self, name: str) -> None:
        """Remove an entry, if it is there."""

    async def list(self, kind: str | None = None) -> list[Entry]:
        """Living entries, by name."""
        ...


class MemoryRegistry:
    """Entries of one process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._entries: dict[str, tuple[Entry, float | None]] = {}

    async def join(self, entry: Entry, lease: float | None = None) -> None:
        self._entries[entry.name] = (read_entry(write_entry(entry)), None if lease is None else self._now() + lease)

    async def renew(self, name: str, lease: float) -> bool:
        self._expire()
        if name not in self._entries:
            return False
        entry, end = self._entries[name]
        self._entries[name] = (entry, None if end is None else self._now() + lease)
        return True

    async def leave(self, name: str) -> None:
        self._entries.pop(name, None)

    async def list(self, kind: str | None = None) -> list[Entry]:
        self._expire()
        return [entry for _, (entry, _) in sorted(self._entries.items()) if kind in (None, entry.kind)]

    def _expire(self) -> None:
        now = self._now()
        self._entries = {n: (e, end) for n, (e, end) in self._entries.items() if end is None or end > now}


def write_entry(entry: Entry) -> str:
    """An entry as JSON.

    Raises:
        ValueError: A name, kind or data that no entry may have.
    """
    if not (0 < len(entry.name) <= NAME_LENGTH and entry.name.isprintable()):
        raise ValueError(f"{entry.name!r} cannot name an instance: 1..{NAME_LENGTH} printable characters can")
    if entry.kind not in KINDS:
        raise ValueError(f"{entry.kind!r} is no kind of service: {', '.join(KINDS)} are")
    return write_object({"name": entry.name, "kind": entry.kind, "address": entry.address, "data": dict(entry.data)})


def read_entry(text: str | bytes) -> Entry:
    """The entry that ``write_entry`` wrote.

    Raises:
        ValueError: It wrote no such thing.
    """
    values = read_object(text)
    name, kind, address, data = (values.get(key) for key in ("name", "kind", "address", "data"))
    if not (isinstance(name, str) and kind in KINDS and isinstance(address, str) and isinstance(data, dict)):
        raise ValueError("not an entry")
    return Entry(name, kind, address, data)
