"""How long to wait for a draft: a running estimate of a remote drafter's answers."""

FIRST_SECONDS = 1.0
"""Deadline of a draft before any has been answered."""
LEAST_SECONDS = 0.1
"""No deadline is shorter: an operating system's hiccup is not the drafter's fault."""
LOST_SECONDS = 2.0
"""A drafter that has answered before and is late by so much more is lost."""
PRIMING_SECONDS = 30.0
"""The first draft of a session waits for the drafter to read its prompt: that long, and it is lost."""


class DraftPace:
    """Mean and deviation of the seconds between ``Draft`` and its answer, as a transport estimates a round trip.

    Jacobson and Karels' estimator (RFC 6298): gains 1/8 and 1/4, deadline mean + 4 deviations.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self.deviation = 0.0

    def observe(self, seconds: float) -> None:
        if self.mean is None:
            self.mean, self.deviation = seconds, seconds / 2
            return
        self.deviation += (abs(seconds - self.mean) - self.deviation) / 4
        self.mean += (seconds - self.mean) / 8

    @property
    def deadline(self) -> float:
        """Seconds after which a round goes on with one node."""
        if self.mean is None:
            return FIRST_SECONDS
        return max(LEAST_SECONDS, self.mean + 4 * self.deviation)
