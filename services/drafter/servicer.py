"""``DrafterService``: streams of sessions, and what the drafter is."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from aerie.drafter.v1 import drafter_pb2 as pb
from aerie.drafter.v1 import drafter_pb2_grpc

from services.drafter.host import Closed, DrafterHost, FromClient
from services.runtime.actor import ActorStopped
from services.runtime.grpc_server import Bridge
from services.wire import drafter as wire

NAME = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
_BRIDGE = Bridge(wire.read_request, wire.write_response, FromClient, Closed)


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves one host."""

    def __init__(self, host: DrafterHost) -> None:
        self._host = host

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        try:
            async for response in _BRIDGE.run(self._host, request_iterator):
                yield response
        except ActorStopped as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        return wire.write_info(self._host.info, len(self._host.sessions))
