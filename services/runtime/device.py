"""The device thread: all MLX state of a process lives here.

In mlx 0.32 a lazy array evaluated on another thread raises, so models load, run and are freed on this one
thread. Only evaluated bytes, ints and NumPy arrays leave it.
"""

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


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
    abort the process when the interpreter is shutting down. Use ``device_thread``.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Callable[[], Any], Future[Any]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="aerie-device", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T], priority: Priority = Priority.SLICE) -> "Future[T]":
        """Queue ``function``; the future carries its result or exception."""
        future: Future[T] = Future()
        with self._wake:
            heapq.heappush(self._queue, (priority, next(self._order), function, future))
            self._wake.notify()
        return future

    async def run(self, function: Callable[[], T], priority: Priority = Priority.SLICE) -> T:
        """``submit`` for coroutines. Cancelling the caller drops work that has not started."""
        return await asyncio.wrap_future(self.submit(function, priority))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    self._wake.wait()
                _, _, function, future = heapq.heappop(self._queue)
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


@cache
def device_thread() -> DeviceThread:
    """The device thread of this process."""
    return DeviceThread()
