"""Who serves what, in memory: entries with leases that end unless they are renewed."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LEASE_SECONDS = 3.0


@dataclass(frozen=True)
class Entry:
    """One service instance: ``kind`` is verifier or drafter, ``port`` reaches it."""

    name: str
    kind: str
    port: Any
    data: Mapping[str, Any]


class MemoryRegistry:
    """Entries of one process. An entry without a lease lives until it is removed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, tuple[Entry, float | None]] = {}

    def join(self, entry: Entry, lease: float | None = None) -> None:
        """Add or replace an entry; with a lease of ``lease`` seconds, it must be renewed."""
        self._entries[entry.name] = (entry, None if lease is None else self._clock() + lease)

    def renew(self, name: str, lease: float = LEASE_SECONDS) -> bool:
        """Extend a lease; False when the entry is gone and must join again."""
        if name not in {entry.name for entry in self.list()}:
            return False
        entry, end = self._entries[name]
        self._entries[name] = (entry, None if end is None else self._clock() + lease)
        return True

    def leave(self, name: str) -> None:
        self._entries.pop(name, None)

    def list(self, kind: str | None = None) -> list[Entry]:
        """Living entries, by name."""
        now = self._clock()
        self._entries = {n: (e, end) for n, (e, end) in self._entries.items() if end is None or end > now}
        return sorted(
            (e for e, _ in self._entries.values() if kind is None or e.kind == kind), key=lambda entry: entry.name
        )
