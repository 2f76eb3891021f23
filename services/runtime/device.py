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
from typing import Any, TypeVar

T = TypeVar("T")


class Priority(IntEnum):
    """Order of queued work. Drafts go first: their trees then meet in one verify batch.

    A session drafts only after its verdict, so drafts cannot starve verification.
    """

    DRAFT = 0
    VERIFY = 1
    SLICE = 2
    """Slices of prefill, priming and history."""


class DeviceThread:
    """Runs submitted functions one at a time, by priority, then in order of arrival."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Callable[[], Any], Future[Any]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="aerie-device", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T], priority: Priority = Priority.SLICE) -> "Future[T]":
        """Queue ``function``; the future carries its result or exception."""
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("the device thread is closed")
            heapq.heappush(self._queue, (priority, next(self._order), function, future))
            self._wake.notify()
        return future

    async def run(self, function: Callable[[], T], priority: Priority = Priority.SLICE) -> T:
        """``submit`` for coroutines. Cancelling the caller drops work that has not started."""
        return await asyncio.wrap_future(self.submit(function, priority))

    def close(self) -> None:
        """Finish what is queued, then stop."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if not self._queue:
                    return
                _, _, function, future = heapq.heappop(self._queue)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
                del error
            else:
                future.set_result(result)
                del result
            # A finished closure can hold a model; do not keep it until the next one comes.
            del function, future
