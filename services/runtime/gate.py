"""The door of a service: counts what runs inside, and closes for what comes while the service drains."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from services.speculation.errors import AerieError, Reason


class Gate:
    """Open until ``close``.

    Attributes:
        closed: Nothing new enters.
        running: How many are inside.
    """

    def __init__(self) -> None:
        self.closed = False
        self.running = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def enter(self, context: Any) -> AsyncIterator[None]:
        """Be inside.

        Raises:
            AerieError: SERVICE_UNAVAILABLE, the gate is closed: clients try elsewhere.
        """
        if self.closed:
            raise AerieError(Reason.SERVICE_UNAVAILABLE, "the service is shutting down")
        self.running += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._empty.set()

    def close(self) -> None:
        self.closed = True

    async def emptied(self, seconds: float) -> bool:
        """Wait until nobody is inside, ``seconds`` at most; says whether that is so."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), seconds)
        return not self.running
