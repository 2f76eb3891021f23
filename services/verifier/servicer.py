"""``VerifierService``: streams of sessions, and what others need to know of the target."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from aerie.verifier.v1 import verifier_pb2 as pb
from aerie.verifier.v1 import verifier_pb2_grpc

from services.runtime.actor import ActorStopped
from services.runtime.grpc_server import Bridge
from services.speculation.errors import AerieError
from services.verifier.host import Closed, FromClient, VerifierHost
from services.wire import verifier as wire

NAME = pb.DESCRIPTOR.services_by_name["VerifierService"].full_name
_BRIDGE = Bridge(wire.read_request, wire.write_response, FromClient, Closed)


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves one host."""

    def __init__(self, host: VerifierHost) -> None:
        self._host = host

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        try:
            async for response in _BRIDGE.run(self._host, request_iterator):
                yield response
        except ActorStopped as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        files = self._host.tokenizer
        return wire.write_tokenizer(
            wire.TokenizerData(files.tokenizer_json, files.chat_template, dict(files.special_tokens))
        )

    async def GetTensors(self, request: pb.GetTensorsRequest, context: Any) -> AsyncIterator[pb.GetTensorsResponse]:
        for name in request.names:
            try:
                array = await self._host.shared_tensor(name)
            except AerieError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            for chunk in wire.write_tensor_chunks(name, array):
                yield chunk

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        return wire.write_info(self._host.info)
