"""Actors: asyncio tasks with a bounded mailbox, ask with a deadline, and drain."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Generic, TypeVar

M = TypeVar("M")
log = logging.getLogger(__name__)


class MailboxFull(Exception):
    """The actor does not keep up with what it is told."""


class ActorStopped(ConnectionError):
    """The actor has stopped or failed."""


def log_incident(log: logging.Logger, what: str, error: BaseException) -> str:
    """Log a failure of ours under a number; returns "incident <number>", all that may leave the process."""
    incident = f"incident {uuid.uuid4().hex[:8]}"
    log.error("%s, %s", what, incident, exc_info=error)
    return incident


class Actor(Generic[M]):
    """A task that handles one message at a time.

    Subclasses implement ``handle``. An exception in it goes to ``on_error``, which re-raises by default and so
    ends the task; a supervisor may restart it.

    Args:
        name: Shown in logs and task names.
        capacity: Most messages that wait; ``tell`` raises MailboxFull beyond it.
    """

    def __init__(self, name: str, capacity: int = 1024) -> None:
        self.name = name
        self._capacity = capacity
        self._mailbox: asyncio.Queue[M] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._draining = False

    async def handle(self, message: M) -> None:
        raise NotImplementedError

    async def started(self) -> None:
        """Runs in the actor's task before the first message."""

    async def stopped(self) -> None:
        """Runs in the actor's task after the last message, also after a failure."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def ended(self) -> BaseException | None:
        """Wait until the actor has ended; returns what it failed with, None when it was stopped."""
        if self._task is None:
            raise ActorStopped(f"{self.name} has not started")
        await asyncio.wait((self._task,))
        return None if self._task.cancelled() else self._task.exception()

    def on_stop(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once the actor has stopped, for whatever reason. Calling what is returned takes that back."""
        task = self._task
        if task is None:
            raise ActorStopped(f"{self.name} has not started")

        def stopped(_: object) -> None:
            callback()

        def unsubscribe() -> None:
            task.remove_done_callback(stopped)

        task.add_done_callback(stopped)
        return unsubscribe

    @property
    def waiting(self) -> int:
        """Messages in the mailbox."""
        return self._mailbox.qsize()

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def tell(self, message: M) -> None:
        """Queue a message.

        Raises:
            MailboxFull: ``capacity`` messages wait already.
            ActorStopped: The actor does not run, or drains.
        """
        if self.alive and not self._draining and self._mailbox.qsize() >= self._capacity:
            raise MailboxFull(f"{self.name} has {self._capacity} messages waiting")
        self.post(message)

    def post(self, message: M) -> None:
        """``tell`` whatever the capacity: for the end of a stream and the like, which must never be lost.

        Raises:
            ActorStopped: The actor does not run, or drains.
        """
        if not self.alive or self._draining:
            raise ActorStopped(f"{self.name} has stopped")
        self._mailbox.put_nowait(message)

    async def ask(self, make: Callable[["asyncio.Future[Any]"], M], deadline: float | None = None) -> Any:
        """Tell ``make(reply)`` and wait for the reply.

        Raises:
            TimeoutError: No reply within ``deadline`` seconds.
            ActorStopped: The actor stopped before replying.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.tell(make(reply))
        assert self._task is not None
        async with asyncio.timeout(deadline):
            await asyncio.wait((reply, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise ActorStopped(f"{self.name} stopped before it replied")
        return reply.result()

    async def drain(self, deadline: float | None = None) -> None:
        """Handle what has been told, take nothing more, then stop; cancelled at the deadline."""
        self._draining = True
        if self._task is None:
            return
        handled = asyncio.create_task(self._mailbox.join())
        try:
            # A failed actor leaves messages that nobody handles.
            await asyncio.wait((handled, self._task), timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        finally:
            handled.cancel()
        await self.stop()

    async def stop(self) -> None:
        """Cancel the actor and wait for it."""
        if self._task is None:
            return
        self._task.cancel()
        # Not ``await self._task``: its cancellation could not be told from that of the caller, or from the actor's own.
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # logged when it was raised; asyncio need not do so again

    async def on_error(self, message: M, error: Exception) -> None:
        raise error

    async def _run(self) -> None:
        try:
            await self.started()
            while True:
                message = await self._mailbox.get()
                try:
                    await self.handle(message)
                except Exception as error:
                    await self.on_error(message, error)
                finally:
                    self._mailbox.task_done()
                    del message
        except Exception:
            log.exception("%s failed", self.name)
            raise
        finally:
            await self.stopped()
