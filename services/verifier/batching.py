"""How much of what waits goes into one batch: no job may hold the device, and so its neighbours, for long."""

from collections import deque
from dataclasses import replace

from services.verifier.work import Work

PREFILL_ROWS = 256
"""Prompt rows in one batch: running sessions wait no longer than that."""
TREE_ROWS = 256
"""Rows of trees in one batch, or one tree: more of them gain nothing from company."""
ROW_COST = 512
"""What a row costs whatever stands before it, counted in positions that it attends to."""
BATCH_COST = {"cpu": PREFILL_ROWS * ROW_COST}
"""Most of rows x (ROW_COST + positions before them): about 0.6 s on two cores, where attention of long prompts takes
most of the time. Counted, never timed: the same rows must meet in the same batches. Other devices have no such limit.
"""


def take_batch(ready: deque[Work], device: str) -> list[Work]:
    """Take the next batch off the queue: trees and slices, each up to its limit, at least one of what is there.

    Args:
        ready: What waits, the oldest first; it may grow meanwhile. What does not fit waits on, in its order.
        device: What kind of device runs it.
    """
    most = BATCH_COST.get(device)
    slices, trees = _Room(PREFILL_ROWS, most), _Room(TREE_ROWS, most)
    batch: list[Work] = []
    for _ in range(len(ready)):
        work = ready.popleft()
        if work.stale:
            continue
        room = trees if work.verify else slices
        length = room.take(len(work.verify.tree) if work.verify else work.rows_left, work.base, bool(work.verify))
        if length == 0:
            ready.append(work)
        else:
            batch.append(work if work.verify else replace(work, length=length))
    return batch


class _Room:
    """What is left of a batch.

    Args:
        rows: Most rows.
        cost: Most of their cost; None is no limit.
    """

    def __init__(self, rows: int, cost: int | None) -> None:
        self._rows, self._cost = rows, cost
        self._empty = True

    def take(self, wanted: int, base: int, whole: bool) -> int:
        """Rows that still fit after ``base`` positions: ``wanted`` or fewer, all or none if ``whole``."""
        each = ROW_COST + base
        fit = max(0, min(wanted, self._rows))
        if self._cost is not None:
            fit = min(fit, self._cost // each)
        if self._empty:
            fit = max(fit, 1)  # whatever it costs, work goes on
        if whole and fit:
            fit = wanted
        self._rows -= fit
        if self._cost is not None:
            self._cost = max(0, self._cost - fit * each)
        self._empty &= fit == 0
        return fit
