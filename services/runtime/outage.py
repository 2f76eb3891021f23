"""What a task does while a store that it talks to is away: wait longer each time, and say so once."""

import logging


class Outage:
    """The attempts of one task to reach one store.

    Args:
        log: Where a line goes when the store leaves, and one when it is back, however often it was tried.
        task: What is tried, for the log.
        first: Seconds to wait after the first failure; twice as long after each one that follows.
        longest: Seconds never exceeded.
    """

    def __init__(self, log: logging.Logger, task: str, first: float = 0.1, longest: float = 1.0) -> None:
        self._log = log
        self._task = task
        self._first = first
        self._longest = longest
        self._delay = 0.0

    def failed(self, error: BaseException) -> float:
        """An attempt failed; returns the seconds until the next one."""
        if not self._delay:
            self._log.warning("%s fails, trying on: %s", self._task, error)
        self._delay = min(2 * self._delay or self._first, self._longest)
        return self._delay

    def over(self) -> None:
        """An attempt succeeded."""
        if self._delay:
            self._log.info("%s works again", self._task)
        self._delay = 0.0
