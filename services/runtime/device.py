"""The device thread: all MLX state of a process lives here.

In mlx 0.32 a lazy array evaluated on another thread raises, so models load, run and are freed on this one
thread. Only evaluated bytes, ints and NumPy arrays leave it.
"""

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

STALL_SECONDS = 1.5
"""A job that runs longer is no progress: readiness flips within 2 s."""


class Priority(IntEnum):
    """Order of queued work: drafts, verification, slices.

    Sessions whose verdicts came from one batch queue their drafts together. With verification first, the first
    tree would be verified at once and alone, and the sessions would fall out of step: one forward of the target
    each, where one serves all. With drafts first the trees meet in one batch, for a wait of a few drafts, which
    are short beside that forward. Drafts cannot starve verification: a session has one draft or one tree under
    way, never both, so at most one draft of each other session goes before a tree.
    """

    DRAFT = 0
    VERIFY = 1
    SLICE = 2
    """Slices of prefill, priming and history."""


class DeviceThread:
    """Runs submitted functions one at a time, by priority, then in order of arrival.

    The thread never ends: a native thread that exits runs MLX's thread-local destructors, which take the GIL and
    abort the process when the interpreter is shutting down. Use ``device_thread``. Should it die all the same, whoever
    waits for it, or asks it later, is told.

    Attributes:
        busy_since: When the running job began, ``time.monotonic``; None while there is none.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Callable[[], Any], Future[Any]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._dead = False
        self.busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="aerie-device", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T], priority: Priority = Priority.SLICE) -> "Future[T]":
        """Queue ``function``; the future carries its result or exception: ConnectionError when the thread is dead."""
        future: Future[T] = Future()
        with self._wake:
            if self._dead:
                future.set_exception(_death())
                return future
            heapq.heappush(self._queue, (priority, next(self._order), function, future))
            self._wake.notify()
        return future

    async def run(self, function: Callable[[], T], priority: Priority = Priority.SLICE) -> T:
        """``submit`` for coroutines. Cancelling the caller drops work that has not started."""
        return await asyncio.wrap_future(self.submit(function, priority))

    @property
    def alive(self) -> bool:
        return not self._dead and self._thread.is_alive()

    def stalled(self, limit: float = STALL_SECONDS) -> str | None:
        """Why the device makes no progress, or None: the thread is dead, or a job has run for ``limit`` seconds."""
        if not self.alive:
            return "the device thread has died"
        since = self.busy_since
        if since is not None and (seconds := time.monotonic() - since) > limit:
            return f"the device has been busy with one job for {seconds:.1f} s"
        return None

    def _run(self) -> None:
        try:
            self._run_jobs()
        except BaseException:
            log.critical("the device thread has died", exc_info=True)
        finally:
            with self._wake:
                self._dead = True
                waiting, self._queue = self._queue, []
            for entry in waiting:
                if isinstance(entry[-1], Future) and entry[-1].set_running_or_notify_cancel():
                    entry[-1].set_exception(_death())

    def _run_jobs(self) -> None:
        while True:
            with self._wake:
                self.busy_since = None
                while not self._queue:
                    self._wake.wait()
                _, _, function, future = heapq.heappop(self._queue)
                self.busy_since = time.monotonic()
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:
                    future.set_exception(error)
                    del error
                else:
                    future.set_result(result)
                    del result
            # A closure can hold a model; do not keep it until the next one comes.
            del function, future


def _death() -> ConnectionError:
    return ConnectionError("the device thread has died")


@cache
def device_thread() -> DeviceThread:
    """The device thread of this process."""
    return DeviceThread()
