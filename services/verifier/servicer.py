"""``VerifierService``: streams of sessions, and what others need to know of the target."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from aerie.verifier.v1 import verifier_pb2 as pb
from aerie.verifier.v1 import verifier_pb2_grpc

from services.runtime.actor import ActorStopped
from services.runtime.bridge import Bridge
from services.runtime.gate import Gate
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import FromVerifier, History
from services.verifier.host import Closed, FromClient, VerifierHost
from services.verifier.outbox import Key, Outbox, Outboxes
from services.verifier.sessions import summarise
from services.wire import verifier as wire

NAME = pb.DESCRIPTOR.services_by_name["VerifierService"].full_name


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves one host.

    Args:
        host: Owns the target.
        gate: Refuses new sessions once it is closed.
    """

    def __init__(self, host: VerifierHost, gate: Gate) -> None:
        self.outboxes = Outboxes()
        self._host = host
        self._gate = gate

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        held: dict[Key, Outbox] = {}

        def write(message: FromVerifier) -> pb.SessionResponse | None:
            """History goes the other way: see ``Features``."""
            if not isinstance(message, History):
                return wire.write_response(message)
            key = (message.session, message.epoch)
            if key not in held:
                held[key] = self.outboxes.hold(key)
            held[key].put(message)
            return None

        bridge = Bridge(wire.read_request, write, FromClient, Closed)
        async with self._gate.enter(context):
            try:
                async for response in bridge.run(self._host, request_iterator):
                    yield response
            except ActorStopped as error:
                raise AerieError(Reason.SERVICE_UNAVAILABLE, str(error)) from None
            finally:
                for key, box in held.items():
                    box.close()
                    self.outboxes.release(key)

    async def Features(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.FeaturesResponse]:
        requests = aiter(request_iterator)
        try:
            key = wire.read_features_request(await anext(requests))
        except StopAsyncIteration:
            return  # the client left before it subscribed
        except AerieError:
            key = 0
        if isinstance(key, int):
            raise AerieError(Reason.INVALID_ARGUMENT, "the first message must subscribe to a session")
        box = self.outboxes.hold(key)
        listener = asyncio.create_task(_listen(requests, box), name=f"features of {key[0]}")
        try:
            async for part in box.slices():
                yield wire.write_history(part)
        finally:
            listener.cancel()
            self.outboxes.release(key)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        return wire.write_info(self._host.info)

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        files = self._host.tokenizer
        return wire.write_tokenizer(
            wire.TokenizerData(files.tokenizer_json, files.chat_template, dict(files.special_tokens))
        )

    async def GetTensors(self, request: pb.GetTensorsRequest, context: Any) -> AsyncIterator[pb.GetTensorsResponse]:
        for name in request.names:
            array = await self._host.shared_tensor(name)
            for chunk in wire.write_tensor_chunks(name, array):
                yield chunk

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        sessions = list(self._host.sessions.values())
        waiting = [self.outboxes.waiting((s.request.session, s.request.epoch)) for s in sessions]
        return wire.write_sessions([summarise(s, size) for s, size in zip(sessions, waiting, strict=True)])


async def _listen(requests: AsyncIterator[Any], box: Outbox) -> None:
    async for request in requests:
        size = wire.read_features_request(request)
        if isinstance(size, int):
            box.acknowledge(size)
