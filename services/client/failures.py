"""What gRPC reports -> ``AerieError``, and whether a call is tried again."""

import asyncio
import random
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.speculation.errors import AerieError, Reason

FIRST_BACKOFF = 0.1
"""Seconds before a call is tried again for the first time; twice as many each further time."""
MOST_PATIENCE = 30.0
"""A service that asks for a longer pause, in seconds, is not asked again."""
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_LATE = "the deadline of the call has passed"
# What a status means that comes without a reason of ours: from a proxy, or from gRPC itself.
_MEANINGS = {
    grpc.StatusCode.UNAVAILABLE: Reason.SERVICE_UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED: Reason.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
}


class Attempts:
    """The tries of one call and the time that they have together.

    Args:
        address: Of the service, for messages.
        retries: How often a call is tried again.
        deadline: Seconds for all tries; None sets no limit.
    """

    def __init__(self, address: str, retries: int, deadline: float | None) -> None:
        self._address = address
        self._left = retries
        self._backoff = FIRST_BACKOFF
        self._now = asyncio.get_running_loop().time
        self._ends = None if deadline is None else self._now() + deadline

    def timeout(self) -> float | None:
        """Seconds that the next try has."""
        return None if self._ends is None else max(self._ends - self._now(), 0.0)

    def refusal(self, error: grpc.aio.AioRpcError) -> AerieError:
        """What a failed try tells the caller."""
        if self.timeout() == 0:  # services whose time is up may say so in other words
            return AerieError(Reason.DEADLINE_EXCEEDED, _LATE)
        return read_failure(error, self._address)[0]

    async def wait(self, error: grpc.aio.AioRpcError) -> None:
        """Wait for the next try.

        Raises:
            AerieError: There is none: the error is final, or the time or the tries are spent.
        """
        _, asked = read_failure(error, self._address)
        # What the service asks for is the least; the jitter keeps clients that failed together from returning so.
        pause = asked + self._backoff * random.uniform(0.5, 1.5)
        left = self.timeout()
        if (
            error.code() not in _RETRIED
            or not self._left
            or asked > MOST_PATIENCE
            or (left is not None and pause >= left)
        ):
            raise self.refusal(error)
        self._left -= 1
        self._backoff *= 2
        await asyncio.sleep(pause)


def read_failure(error: grpc.aio.AioRpcError, address: str) -> tuple[AerieError, float]:
    """What a service refuses and why, and the seconds that it asks to wait before another try (0: it does not say)."""
    reason, pause = None, 0.0
    for detail in _details(error):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = Reason.__members__.get(info.reason)
        elif detail.Unpack(retry):
            pause = retry.retry_delay.ToTimedelta().total_seconds()
    said = error.details() or error.code().name
    if reason is None:
        reason = _MEANINGS.get(error.code(), Reason.INTERNAL)
        if reason == Reason.DEADLINE_EXCEEDED:
            said = _LATE
        elif reason == Reason.SERVICE_UNAVAILABLE:
            said = f"no orchestrator answers at {address}: {said}"
    return AerieError(reason, said), pause


def _details(error: grpc.aio.AioRpcError) -> Any:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the details do not belong to the status
        return ()
    return status.details if status else ()
