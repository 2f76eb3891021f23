import pytest

from services.speculation import window
from services.speculation.window import kept_ranges


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11, 12, 13, 40])
def test_ranges_hold_the_sinks_and_the_last_window_and_nothing_else(monkeypatch, length):
    monkeypatch.setattr(window, "WINDOW", 8)
    for start in range(length):
        for stop in range(start + 1, length + 1):
            ranges = kept_ranges(start, stop, length)
            kept = [position for a, b in ranges for position in range(a, b)]
            assert kept == [p for p in range(start, stop) if p < 4 or p >= length - 8]
            assert all(a < b for a, b in ranges)
            assert len(ranges) < 2 or ranges[0][1] < ranges[1][0]
