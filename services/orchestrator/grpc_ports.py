"""Ports to a verifier and a drafter in other processes."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
from aerie.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from aerie.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from numpy.typing import NDArray

from services.speculation.errors import AerieError
from services.speculation.messages import DrafterInfo, FromDrafter, FromVerifier, TargetInfo, ToDrafter, ToVerifier
from services.wire import drafter as drafter_wire
from services.wire import verifier as verifier_wire

Out = TypeVar("Out")
In = TypeVar("In")

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class GrpcStream(Generic[Out, In]):
    """One session's stream to another process (implements ``ports.Stream``). The call begins with its first use.

    Args:
        begin: Makes the call.
        write: Message -> request.
        read: Response -> message; raises AerieError for what no peer of ours sends.
    """

    def __init__(self, begin: Callable[[], Any], write: Callable[[Out], Any], read: Callable[[Any], In]) -> None:
        self._begin, self._write, self._read = begin, write, read
        self._call: Any = None
        self._closed = False

    async def send(self, message: Out) -> None:
        call = self._running()
        try:
            await call.write(self._write(message))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError(_describe(error)) from None
        except asyncio.CancelledError:
            self._check_own()
            raise

    async def receive(self) -> In:
        call = self._running()
        try:
            response = await call.read()
        except grpc.RpcError as error:
            raise ConnectionError(_describe(error)) from None
        except asyncio.CancelledError:
            self._check_own()
            raise
        if response is grpc.aio.EOF:
            raise ConnectionError(f"the service has ended the stream: {_describe(await _status(call))}")
        try:
            return self._read(response)
        except AerieError as error:
            raise ConnectionError(f"the service does not speak our language: {error}") from None

    async def close(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def _running(self) -> Any:
        if self._closed:
            raise ConnectionError("the stream is closed")
        if self._call is None:
            self._call = self._begin()
        return self._call

    def _check_own(self) -> None:
        """The end of the call looks like a cancellation of whoever waits for it: tell them apart."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling() and self._call.cancelled():
            raise ConnectionError("the stream is closed") from None


async def _status(call: Any) -> Any:
    return await call.details() or await call.code()


def _describe(error: Any) -> str:
    details = getattr(error, "details", None)
    return str(details() if callable(details) else error)


class GrpcVerifierPort:
    """A ``VerifierPort`` over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)

    async def info(self) -> TargetInfo:
        """Raises ConnectionError: The service is not there."""
        try:
            return verifier_wire.read_info(await self._stub.GetInfo(verifier_pb2.GetInfoRequest()))
        except grpc.RpcError as error:
            raise ConnectionError(_describe(error)) from None

    async def tokenizer(self) -> verifier_wire.TokenizerData:
        """Raises ConnectionError: The service is not there."""
        try:
            response = await self._stub.GetTokenizer(verifier_pb2.GetTokenizerRequest())
        except grpc.RpcError as error:
            raise ConnectionError(_describe(error)) from None
        return verifier_wire.read_tokenizer(response)

    async def tensor(self, name: str) -> NDArray[Any]:
        """A weight that drafters share with the target [V, hidden], as bits of bfloat16.

        Raises:
            ConnectionError: The service is not there, or has no such tensor.
        """
        try:
            chunks = [chunk async for chunk in self._stub.GetTensors(verifier_pb2.GetTensorsRequest(names=[name]))]
        except grpc.RpcError as error:
            raise ConnectionError(_describe(error)) from None
        return verifier_wire.read_tensor_chunks(chunks)

    def connect(self) -> GrpcStream[ToVerifier, FromVerifier]:
        return GrpcStream(self._stub.Session, verifier_wire.write_request, verifier_wire.read_response)


class GrpcDrafterPort:
    """A ``DrafterPort`` over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = drafter_pb2_grpc.DrafterServiceStub(channel)

    async def info(self) -> DrafterInfo:
        """Raises ConnectionError: The service is not there."""
        try:
            return drafter_wire.read_info(await self._stub.GetInfo(drafter_pb2.GetInfoRequest()))
        except grpc.RpcError as error:
            raise ConnectionError(_describe(error)) from None

    def connect(self) -> GrpcStream[ToDrafter, FromDrafter]:
        return GrpcStream(self._stub.Session, drafter_wire.write_request, drafter_wire.read_response)
