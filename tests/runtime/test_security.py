"""Keys and TLS between real servers and clients."""

import asyncio
import logging
from dataclasses import replace

import grpc
import pytest
import trustme
from aerie.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.grpc_server import start_server
from services.runtime.security import ChannelSecurity, Key, ServerSecurity, read_keys
from services.speculation.errors import AerieError, Reason

SERVICE = "aerie.verifier.v1.VerifierService"
SECRET, OTHER = "s3cret-of-the-workers", "another-key"


class Echo(verifier_pb2_grpc.VerifierServiceServicer):
    """A call of three of the four kinds."""

    async def GetInfo(self, request, context):
        return verifier_pb2.GetInfoResponse(name="echo")

    async def GetTensors(self, request, context):
        for name in request.names:
            yield verifier_pb2.GetTensorsResponse(name=name)

    async def Session(self, requests, context):
        async for request in requests:
            yield verifier_pb2.SessionResponse(session=request.session)


async def ask_all(channel):
    """What each kind of call gives, or the status that it ends with."""
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    answers = []

    async def unary():
        return (await stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=5)).name

    async def stream():
        request = verifier_pb2.GetTensorsRequest(names=["a", "b"])
        return [response.name async for response in stub.GetTensors(request, timeout=5)]

    async def both_ways():
        call = stub.Session(timeout=5)
        try:
            await call.write(verifier_pb2.SessionRequest(session="s"))
            first = (await call.read()).session
            await call.write(verifier_pb2.SessionRequest(session="t"))
            second = (await call.read()).session
        except asyncio.InvalidStateError:  # written to a call that has ended
            return await call.code()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        return first + second

    for ask in (unary, stream, both_ways):
        try:
            answers.append(await ask())
        except grpc.aio.AioRpcError as error:
            answers.append(error.code())
    return answers


FINE = ["echo", ["a", "b"], "st"]
REFUSED = [grpc.StatusCode.UNAUTHENTICATED] * 3
NO_CONNECTION = [grpc.StatusCode.UNAVAILABLE] * 3


def play(server_security, clients, listen="127.0.0.1:0"):
    """Serve, and ask with each client's security: answers, and whether health is open to it."""

    async def run():
        def add(server):
            verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Echo(), server)

        server, address, _ = await start_server(listen, add, [SERVICE], server_security)
        results = []
        for security in clients:
            async with security.open(address.replace("127.0.0.1", "localhost")) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                try:
                    await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
                    results.append((await ask_all(channel), True))
                except grpc.aio.AioRpcError:
                    results.append((await ask_all(channel), False))
        await server.stop(0)
        return results

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_calls_without_a_right_key_are_refused_and_health_is_open(caplog):
    with caplog.at_level(logging.DEBUG):
        clients = [
            ChannelSecurity(Key(SECRET)),
            ChannelSecurity(Key(OTHER)),
            ChannelSecurity(),
            ChannelSecurity(Key("x")),
        ]
        results = play(ServerSecurity((Key(SECRET), Key(OTHER))), clients)
    assert results == [(FINE, True), (FINE, True), (REFUSED, True), (REFUSED, True)]
    assert SECRET not in caplog.text


def test_without_keys_everybody_is_let_in():
    assert play(ServerSecurity(), [ChannelSecurity(), ChannelSecurity(Key(SECRET))]) == [(FINE, True)] * 2


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder, ca, strange = tmp_path_factory.mktemp("tls"), trustme.CA(), trustme.CA()
    server, client = ca.issue_cert("localhost"), ca.issue_cert("worker@example.org")
    paths = {}
    for name, blob in {
        "ca": ca.cert_pem,
        "strange": strange.cert_pem,
        "cert": server.cert_chain_pems[0],
        "key": server.private_key_pem,
        "client": client.cert_chain_pems[0],
        "client_key": client.private_key_pem,
    }.items():
        paths[name] = folder / f"{name}.pem"
        blob.write_to_path(paths[name])
    return paths


def test_tls_with_a_key(certificates):
    server = ServerSecurity((Key(SECRET),), certificates["cert"], certificates["key"])
    good = ChannelSecurity(Key(SECRET), certificates["ca"])
    clients = [good, replace(good, key=None), replace(good, ca=certificates["strange"]), ChannelSecurity(Key(SECRET))]
    results = play(server, clients)
    assert results == [(FINE, True), (REFUSED, True), (NO_CONNECTION, False), (NO_CONNECTION, False)]


def test_clients_may_have_to_show_a_certificate(certificates):
    server = ServerSecurity((), certificates["cert"], certificates["key"], certificates["ca"])
    bare = ChannelSecurity(ca=certificates["ca"])
    shown = replace(bare, cert=certificates["client"], cert_key=certificates["client_key"])
    assert play(server, [shown, bare]) == [(FINE, True), (NO_CONNECTION, False)]


@pytest.mark.parametrize(
    "make",
    [
        lambda files: ServerSecurity(cert=files["cert"]).credentials(),
        lambda files: ServerSecurity(cert_key=files["key"]).credentials(),
        lambda files: ServerSecurity(client_ca=files["ca"]).credentials(),
        lambda files: ServerSecurity(cert=files["cert"], cert_key=files["cert"].parent / "none").credentials(),
        lambda files: ChannelSecurity(ca=files["ca"].parent).open("localhost:1"),
        lambda files: ChannelSecurity(ca=files["ca"], cert=files["client"]).open("localhost:1"),
        lambda files: ChannelSecurity(cert=files["client"], cert_key=files["client_key"]).open("localhost:1"),
    ],
)
def test_halves_and_missing_files_are_refused(certificates, make):
    with pytest.raises(AerieError) as refused:
        make(certificates)
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_keys_are_read_from_the_environment_and_from_files(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("k-alpha\nk-beta \n")
    monkeypatch.setenv("AERIE_TEST_KEY", "k-gamma,k-delta")
    keys = read_keys("AERIE_TEST_KEY", file)
    assert [key.reveal() for key in keys] == ["k-gamma", "k-delta", "k-alpha", "k-beta"]
    assert "k-" not in repr(keys) + str(keys) + f"{keys[0]} {ServerSecurity(keys)}"
    monkeypatch.delenv("AERIE_TEST_KEY")
    assert read_keys("AERIE_TEST_KEY", None) == ()
    for bad in ("", "a\n\nb", "two words", "schlüssel"):
        file.write_text(bad)
        with pytest.raises(AerieError):
            read_keys("AERIE_TEST_KEY", file)
    with pytest.raises(AerieError, match="cannot be read"):
        read_keys("AERIE_TEST_KEY", tmp_path)
    monkeypatch.setenv("AERIE_TEST_KEY", "a,,b")
    with pytest.raises(AerieError) as refused:
        read_keys("AERIE_TEST_KEY", None)
    assert "a,," not in refused.value.message
