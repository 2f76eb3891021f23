"""Which rows of a session a drafter keeps, and is therefore sent."""

SINK_ROWS = 4
"""First positions, kept whatever the window: their massive activations serve attention as a sink."""
WINDOW = 2048
"""Rows that a drafter looks back at most, besides the first SINK_ROWS."""


def kept_ranges(start: int, stop: int, length: int) -> tuple[tuple[int, int], ...]:
    """The parts of positions [start, stop) that are in [0, SINK_ROWS) or the last WINDOW of ``length``."""
    oldest = max(SINK_ROWS, length - WINDOW)
    parts = ((start, min(stop, SINK_ROWS)), (max(start, oldest), stop))
    kept = [(a, b) for a, b in parts if a < b]
    if len(kept) == 2 and kept[0][1] == kept[1][0]:
        return ((kept[0][0], kept[1][1]),)
    return tuple(kept)
