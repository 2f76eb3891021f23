"""Ports to a verifier and a drafter in other processes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from aerie.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from aerie.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from services.runtime.actor import log_incident
from services.runtime.bridge import MESSAGE_BYTES
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Attach,
    DrafterStatus,
    FromDrafter,
    FromVerifier,
    Open,
    SessionSummary,
    TargetInfo,
    ToDrafter,
    ToVerifier,
)
from services.wire import drafter as drafter_wire
from services.wire import verifier as verifier_wire

log = logging.getLogger(__name__)
Out = TypeVar("Out")
In = TypeVar("In")

VERIFIER = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name
DRAFTER = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name
ASK_SECONDS = 5.0
"""Questions without an answer for so long get none."""
FILE_SECONDS = 600.0
"""A tokenizer or a tensor that has not come by then does not come."""


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
        call, request = self._running(), self._write(message)
        if (size := request.ByteSize()) > MESSAGE_BYTES:  # sent, it would end the stream
            raise AerieError(Reason.RESOURCE_EXHAUSTED, f"a message of {size} bytes; {MESSAGE_BYTES} are the most")
        try:
            await call.write(request)
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


class GrpcVerifierStream:
    """A session on a verifier (implements ``ports.VerifierStream``); its history comes on a call of its own.

    Args:
        session: The stream of rounds.
        features: Makes the call for history, on another channel.
    """

    def __init__(self, session: GrpcStream[ToVerifier, FromVerifier], features: Callable[[], Any]) -> None:
        self._session = session
        self._features = features
        self._history: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[FromVerifier | ConnectionError] = asyncio.Queue()
        self._owed = 0  # bytes to acknowledge
        self._owing = asyncio.Event()

    async def send(self, message: ToVerifier) -> None:
        reads_features = isinstance(message, Open | Attach) and bool(message.taps)
        if isinstance(message, Open | Attach) and reads_features and (self._history is None or self._history.done()):
            pump = _pump_history(self._features, message, self._inbox, self._acknowledgements)
            self._history = asyncio.create_task(pump, name=f"features of {message.session}")
        await self._session.send(message)

    async def receive(self) -> FromVerifier:
        if self._reader is None:
            self._reader = asyncio.create_task(_pump_session(self._session, self._inbox))
        message = await self._inbox.get()
        if isinstance(message, ConnectionError):
            self._inbox.put_nowait(message)  # for whoever asks again
            raise ConnectionError(str(message))
        return message

    def acknowledge(self, size: int) -> None:
        self._owed += size
        self._owing.set()

    async def _acknowledgements(self) -> int:
        await self._owing.wait()
        self._owing.clear()
        owed, self._owed = self._owed, 0
        return owed

    async def close(self) -> None:
        await self._session.close()
        for task in (self._history, self._reader):
            if task:
                task.cancel()
        self._inbox.put_nowait(ConnectionError("the stream is closed"))


async def _pump_session(
    session: GrpcStream[ToVerifier, FromVerifier], inbox: "asyncio.Queue[FromVerifier | ConnectionError]"
) -> None:
    try:
        while True:
            inbox.put_nowait(await session.receive())
    except ConnectionError as error:
        inbox.put_nowait(error)
    except Exception as error:  # whoever waits must hear of it
        inbox.put_nowait(ConnectionError(log_incident(log, "a stream failed", error)))


async def _pump_history(
    begin: Callable[[], Any],
    opened: Open | Attach,
    inbox: "asyncio.Queue[FromVerifier | ConnectionError]",
    acknowledgements: Callable[[], Awaitable[int]],
) -> None:
    """Bring slices to the inbox and acknowledge what has gone on. Without them a drafter is not primed, no more."""
    call = begin()

    async def acknowledge() -> None:
        while True:
            await call.write(verifier_wire.write_acknowledge(await acknowledgements()))

    acknowledger: asyncio.Task[None] | None = None
    try:
        await call.write(verifier_wire.write_subscribe(opened.session, opened.epoch))
        acknowledger = asyncio.create_task(acknowledge())
        while (response := await call.read()) is not grpc.aio.EOF:
            inbox.put_nowait(verifier_wire.read_history(opened.session, opened.epoch, response))
    except (grpc.RpcError, AerieError, asyncio.InvalidStateError) as error:
        log.warning("the features of session %s are lost: %s", opened.session, _describe(error))
    finally:
        call.cancel()
        if acknowledger:
            acknowledger.cancel()


async def _asked(call: Any) -> Any:
    """The answer of a unary call.

    Raises:
        ConnectionError: There is none.
        AerieError: UNAUTHENTICATED, our key is not the service's.
    """
    try:
        return await call
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:  # waiting would not help
            raise AerieError(Reason.UNAUTHENTICATED, f"the service refuses us: {_describe(error)}") from None
        raise ConnectionError(_describe(error)) from None


class NotReady(ConnectionError):
    """The service answers, and says that it takes no sessions now."""


async def check_ready(channel: grpc.aio.Channel, service: str) -> None:
    """Raises ConnectionError: The service is not there, or takes no sessions (NotReady)."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await _asked(health_pb2_grpc.HealthStub(channel).Check(request, timeout=ASK_SECONDS))
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise NotReady("it is not ready")


class GrpcVerifierPort:
    """A ``VerifierPort``.

    Args:
        channel: For rounds and questions.
        bulk: For history, so that it never delays a verdict.
    """

    def __init__(self, channel: grpc.aio.Channel, bulk: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._bulk = verifier_pb2_grpc.VerifierServiceStub(bulk)

    async def info(self) -> TargetInfo:
        """Raises ConnectionError: The service is not there."""
        return verifier_wire.read_info(
            await _asked(self._stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=ASK_SECONDS))
        )

    async def check_ready(self) -> None:
        """Raises ConnectionError: The service is not there, or takes no sessions."""
        await check_ready(self._channel, VERIFIER)

    async def tokenizer(self) -> verifier_wire.TokenizerData:
        """Raises ConnectionError: The service is not there."""
        # Some tokenizers' files are larger than any message of a round: the bulk channel takes them.
        call = self._bulk.GetTokenizer(verifier_pb2.GetTokenizerRequest(), timeout=FILE_SECONDS)
        return verifier_wire.read_tokenizer(await _asked(call))

    async def tensor(self, name: str) -> NDArray[Any]:
        """A weight that drafters share with the target, as bits of bfloat16.

        Raises:
            ConnectionError: The service is not there, or has no such tensor.
        """
        try:
            call = self._bulk.GetTensors(verifier_pb2.GetTensorsRequest(names=[name]), timeout=FILE_SECONDS)
            chunks = [chunk async for chunk in call]
        except grpc.RpcError as error:
            raise ConnectionError(_describe(error)) from None
        return verifier_wire.read_tensor_chunks(chunks)

    async def sessions(self) -> list[SessionSummary]:
        """Raises ConnectionError: The service is not there."""
        request = verifier_pb2.ListSessionsRequest()
        return verifier_wire.read_sessions(await _asked(self._stub.ListSessions(request, timeout=ASK_SECONDS)))

    def connect(self, seconds: float | None = None) -> GrpcVerifierStream:
        begin = partial(self._stub.Session, timeout=seconds)
        rounds: GrpcStream[ToVerifier, FromVerifier] = GrpcStream(
            begin, verifier_wire.write_request, verifier_wire.read_response
        )
        return GrpcVerifierStream(rounds, partial(self._bulk.Features, timeout=seconds))


class GrpcDrafterPort:
    """A ``DrafterPort`` over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = drafter_pb2_grpc.DrafterServiceStub(channel)

    async def status(self) -> DrafterStatus:
        """Raises ConnectionError: The service is not there, or takes no sessions."""
        await check_ready(self._channel, DRAFTER)
        answer = await _asked(self._stub.GetInfo(drafter_pb2.GetInfoRequest(), timeout=ASK_SECONDS))
        try:
            return drafter_wire.read_status(answer)
        except AerieError as error:
            raise ConnectionError(f"the service does not speak our language: {error}") from None

    def connect(self, seconds: float | None = None) -> GrpcStream[ToDrafter, FromDrafter]:
        begin = partial(self._stub.Session, timeout=seconds)
        return GrpcStream(begin, drafter_wire.write_request, drafter_wire.read_response)
