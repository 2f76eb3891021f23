"""``DrafterService``: streams of sessions, and what the drafter is."""

from collections.abc import AsyncIterator
from typing import Any

from aerie.drafter.v1 import drafter_pb2 as pb
from aerie.drafter.v1 import drafter_pb2_grpc

from services.drafter.host import Closed, DrafterHost, FromClient
from services.runtime.actor import ActorStopped
from services.runtime.bridge import Bridge
from services.runtime.gate import Gate
from services.speculation.errors import AerieError, Reason
from services.wire import drafter as wire

NAME = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
_BRIDGE = Bridge(wire.read_request, wire.write_response, FromClient, Closed)


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves one host.

    Args:
        host: Owns the drafter.
        gate: Refuses new sessions once it is closed.
    """

    def __init__(self, host: DrafterHost, gate: Gate) -> None:
        self._host = host
        self._gate = gate

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        async with self._gate.enter(context):
            try:
                async for response in _BRIDGE.run(self._host, request_iterator):
                    yield response
            except ActorStopped as error:
                raise AerieError(Reason.SERVICE_UNAVAILABLE, str(error)) from None

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        return wire.write_status(self._host.status)
