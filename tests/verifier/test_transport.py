"""Large features and large messages between a verifier and its clients, over a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from aerie.verifier.v1 import verifier_pb2, verifier_pb2_grpc

from services.orchestrator.grpc_ports import GrpcVerifierPort
from services.runtime.actor import Actor
from services.runtime.bridge import MESSAGE_BYTES
from services.runtime.gate import Gate
from services.runtime.grpc_server import start_server
from services.runtime.security import BULK_OPTIONS, CHANNEL_OPTIONS, OPEN
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Features, History, Open, PortError, Prefilled, Verdict, Verify
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from services.verifier.servicer import NAME, VerifierServicer
from services.wire.verifier import CREDIT_BYTES, FEATURE_BYTES

HIDDEN, TAPS, ROWS = 5120, (2, 20, 37), 2052
"""A 32B target, and what a drafter's window keeps of a prompt of 4096 tokens: 63 MB."""


class WideHost(Actor):
    """A host whose target is only wide: it answers at once, with rows that say which position they are of."""

    def __init__(self):
        super().__init__("wide verifier")
        self.sessions = {}

    async def handle(self, message):
        request = getattr(message, "message", None)
        if isinstance(request, Open):
            self.sessions[request.session] = request
            if request.taps:
                for start in range(0, ROWS, 512):
                    stop = min(start + 512, ROWS)
                    history = History(request.session, 0, rows(start, stop), tuple(range(start + 1, stop + 1)))
                    message.reply(history)
            message.reply(Prefilled(request.session, 0, 7, None, 0.0))
        elif isinstance(request, Verify):
            large = rows(0, 200) if request.round == 99 else Features(0, {})
            place = (request.session, 0, request.round, request.base_len)
            message.reply(Verdict(*place, (0,), (8,), None, large, 0.0))
        elif request is None:
            self.sessions.pop(message.session, None)


def rows(start, stop):
    values = np.repeat(np.arange(start, stop, dtype=np.float32)[:, None], HIDDEN, axis=1)
    return Features(start, dict.fromkeys(TAPS, values))


@asynccontextmanager
async def wide(tmp_path) -> AsyncIterator[tuple[WideHost, VerifierServicer, GrpcVerifierPort, grpc.aio.Channel]]:
    host = WideHost()
    host.start()
    servicer = VerifierServicer(host, Gate())
    server, address, _ = await start_server(
        f"unix:{tmp_path}/w", lambda s: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, s), [NAME]
    )
    own_connection = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with (
        grpc.aio.insecure_channel(address, options=own_connection) as channel,
        OPEN.open(address, BULK_OPTIONS) as bulk,
    ):
        yield host, servicer, GrpcVerifierPort(channel, bulk), channel
    await server.stop(0)
    await host.stop()


def play(scenario, tmp_path):
    async def run():
        async with wide(tmp_path) as world:
            await scenario(*world)

    asyncio.run(asyncio.wait_for(run(), 60))


def opening(session, taps=TAPS):
    return Open(session, (1, 2, 3), 3, 50, Sampler(), 0, taps=taps)


def test_features_of_a_long_prompt_pass_in_slices_and_by_credit(tmp_path):
    async def scenario(host, servicer, port, channel):
        stream = port.connect()
        await stream.send(opening("s"))
        held, other = [], []
        # Nothing is acknowledged: no more than the credit is under way.
        with contextlib.suppress(TimeoutError):
            while True:
                message = await asyncio.wait_for(stream.receive(), 0.5)
                (held if isinstance(message, History) else other).append(message)
        assert [type(message) for message in other] == [Prefilled]
        sizes = [history.features.nbytes for history in held]
        assert max(sizes) <= FEATURE_BYTES
        assert CREDIT_BYTES - FEATURE_BYTES < sum(sizes) <= CREDIT_BYTES
        assert servicer.outboxes.waiting(("s", 0)) == 2 * HIDDEN * len(TAPS) * ROWS
        # Meanwhile another session's rounds are quick.
        second = port.connect()
        await second.send(opening("t", taps=()))
        assert isinstance(await second.receive(), Prefilled)
        for round_ in range(5):
            await second.send(Verify("t", 0, round_, 4 + round_, DraftTree.root(7)))
            async with asyncio.timeout(0.5):
                assert isinstance(await second.receive(), Verdict)
        # With credit the rest comes, each row once and in order.
        for history in held:
            stream.acknowledge(history.features.nbytes)
        while sum(len(history.tokens) for history in held) < ROWS:
            history = await stream.receive()
            held.append(history)
            stream.acknowledge(history.features.nbytes)
        positions = np.concatenate([history.features.rows[20][:, 0] for history in held])
        expected = np.arange(ROWS, dtype=np.float32).view(np.uint32) >> 16  # these need no more than bfloat16's bits
        exact = np.arange(ROWS) < 256
        np.testing.assert_array_equal(positions[exact], expected[exact])
        assert sum((history.tokens for history in held), ()) == tuple(range(1, ROWS + 1))
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not servicer.outboxes.waiting(("s", 0)):
                break
        assert servicer.outboxes.waiting(("s", 0)) == 0
        await stream.close()
        await second.close()
        async with asyncio.timeout(5):
            while len(servicer.outboxes) or host.sessions:
                await asyncio.sleep(0.01)

    play(scenario, tmp_path)


def test_a_session_that_ends_in_mid_history_frees_it(tmp_path):
    async def scenario(host, servicer, port, channel):
        stream = port.connect()
        await stream.send(opening("s"))
        await stream.receive()
        await stream.close()
        async with asyncio.timeout(5):
            while len(servicer.outboxes) or host.sessions:
                await asyncio.sleep(0.01)

    play(scenario, tmp_path)


def test_messages_over_the_limit_are_refused_with_the_session_intact(tmp_path):
    """100 MB from the client, and an answer of 6 MB a tap: in-band, both ways."""

    async def scenario(host, servicer, port, channel):
        stream = port.connect()
        await stream.send(opening("s", taps=()))
        await stream.receive()
        huge = Open("s", tuple([2**31] * (20 * 2**20)), 1, 1, Sampler(), 0)
        with pytest.raises(AerieError) as refused:
            await stream.send(huge)
        assert refused.value.reason is Reason.RESOURCE_EXHAUSTED
        await stream.send(Verify("s", 0, 0, 4, DraftTree.root(7)))
        assert isinstance(await stream.receive(), Verdict)
        assert 200 * 2 * HIDDEN * 3 < MESSAGE_BYTES
        await stream.send(Verify("s", 0, 99, 4, DraftTree.root(7)))
        assert len((await stream.receive()).features) == 200
        await stream.close()

    play(scenario, tmp_path)


def test_an_answer_over_the_limit_is_an_error_of_its_session(tmp_path, monkeypatch):
    monkeypatch.setattr("services.runtime.bridge.MESSAGE_BYTES", 2**20)

    async def scenario(host, servicer, port, channel):
        stream = port.connect()
        await stream.send(opening("s", taps=()))
        await stream.receive()
        await stream.send(Verify("s", 0, 99, 4, DraftTree.root(7)))
        error = await stream.receive()
        assert isinstance(error, PortError)
        assert (error.session, error.reason) == ("s", Reason.RESOURCE_EXHAUSTED)
        await stream.send(Verify("s", 0, 1, 4, DraftTree.root(7)))
        assert isinstance(await stream.receive(), Verdict)
        await stream.close()

    play(scenario, tmp_path)


def test_a_tokenizer_may_be_larger_than_a_message(tmp_path):
    """Some are 33 MB; over the channel of rounds they do not come."""

    async def scenario(host, servicer, port, channel):
        host.tokenizer = SimpleNamespace(tokenizer_json="x" * (40 * 2**20), chat_template=None, special_tokens={})
        assert len((await port.tokenizer()).tokenizer_json) == 40 * 2**20
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await verifier_pb2_grpc.VerifierServiceStub(channel).GetTokenizer(verifier_pb2.GetTokenizerRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(scenario, tmp_path)


def test_a_stranger_who_sends_100_mb_ends_his_own_stream_alone(tmp_path):
    async def scenario(host, servicer, port, channel):
        stream = port.connect()
        await stream.send(opening("s", taps=()))
        await stream.receive()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/w") as raw:  # without our limits
            call = verifier_pb2_grpc.VerifierServiceStub(raw).Session()
            opened = verifier_pb2.Open(tokens=[2**31] * (20 * 2**20))
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(verifier_pb2.SessionRequest(session="x", open=opened))
                await call.read()
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stream.send(Verify("s", 0, 0, 4, DraftTree.root(7)))
        assert isinstance(await stream.receive(), Verdict)
        await stream.close()

    play(scenario, tmp_path)


def test_pings_of_idle_clients_are_no_offence(tmp_path):
    """A client that pings every second: gRPC's own default would end its connection in four."""

    async def scenario(host, servicer, port, channel):
        options = (
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_timeout_ms", 1000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        )
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/w", options=options) as pinging:
            call = verifier_pb2_grpc.VerifierServiceStub(pinging).Session()
            opened = verifier_pb2.Open(tokens=[1, 2, 3], prompt_len=3, max_tokens=9)
            await call.write(verifier_pb2.SessionRequest(session="s", open=opened))
            await call.read()
            reading = asyncio.ensure_future(call.read())
            await asyncio.sleep(6.0)
            assert not reading.done()
            call.cancel()

    play(scenario, tmp_path)


def test_features_are_for_subscribers(tmp_path):
    async def scenario(host, servicer, port, channel):
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Features()
        await call.write(verifier_pb2.FeaturesRequest(acknowledge=verifier_pb2.Acknowledge(bytes=5)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    play(scenario, tmp_path)
