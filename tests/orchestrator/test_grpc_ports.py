"""The gRPC ports keep the contract of ports, over a real server on a socket."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from aerie.drafter.v1.drafter_pb2_grpc import add_DrafterServiceServicer_to_server
from aerie.verifier.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.drafter import servicer as drafter_service
from services.orchestrator.grpc_ports import GrpcDrafterPort, GrpcVerifierPort
from services.runtime.device import device_thread
from services.runtime.gate import Gate
from services.runtime.grpc_server import start_server
from services.runtime.security import CHANNEL_OPTIONS
from services.speculation.messages import DrafterStatus
from services.targets.loader import load_target
from services.verifier import servicer as verifier_service
from tests import drafter_contract, port_contract, verifier_contract
from tests.embedded import test_ports
from tests.plain import decode
from tests.tiny import load_plain, write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(folder):
    return device_thread().submit(lambda: load_target(str(folder))).result()


@pytest.fixture(scope="module")
def plain_tokens(folder):
    return decode(load_plain(folder), verifier_contract.PROMPT, 12).tokens


@asynccontextmanager
async def served(local, tmp_path, servicer, add, name, make_port):
    """A local service behind a server and a channel."""
    async with local as service:
        host = service.port._host
        server, address, _ = await start_server(
            f"unix:{tmp_path}/s", lambda server: add(servicer(host, Gate()), server), [name]
        )
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield port_contract.replace_port(service, make_port(channel)), channel
        await server.stop(0)


def over_grpc(kind, target, tmp_path):
    if kind == "verifier":
        add, name = add_VerifierServiceServicer_to_server, verifier_service.NAME
        local, servicer = test_ports.verifier(target), verifier_service.VerifierServicer
        return served(local, tmp_path, servicer, add, name, lambda channel: GrpcVerifierPort(channel, channel))
    add, name = add_DrafterServiceServicer_to_server, drafter_service.NAME
    return served(test_ports.drafter(target), tmp_path, drafter_service.DrafterServicer, add, name, GrpcDrafterPort)


def play(scenario):
    asyncio.run(asyncio.wait_for(scenario, 60))


@pytest.mark.parametrize("check", port_contract.CHECKS)
@pytest.mark.parametrize("kind", ["verifier", "drafter"])
def test_grpc_ports_keep_the_contract(target, tmp_path, kind, check):
    async def scenario():
        async with over_grpc(kind, target, tmp_path) as (service, _):
            await check(service)

    play(scenario())


@pytest.mark.parametrize("check", verifier_contract.CHECKS)
def test_verifiers_over_grpc_keep_the_contract(target, plain_tokens, tmp_path, check):
    async def scenario():
        async with over_grpc("verifier", target, tmp_path) as (service, _):
            await check(service, plain_tokens)

    play(scenario())


@pytest.mark.parametrize("check", drafter_contract.CHECKS)
def test_drafters_over_grpc_keep_the_contract(target, tmp_path, check):
    async def scenario():
        async with over_grpc("drafter", target, tmp_path) as (service, _):
            await check(service)

    play(scenario())


@pytest.mark.parametrize("kind", ["verifier", "drafter"])
def test_what_the_other_side_says_of_itself(target, tmp_path, kind):
    async def scenario():
        async with over_grpc(kind, target, tmp_path) as (service, channel):
            if kind == "verifier":
                assert await service.port.info() == target.info
            else:
                assert await service.port.status() == DrafterStatus(test_ports.RandomDrafter(300).info, 0, 0.0)
            health = health_pb2_grpc.HealthStub(channel)
            name = {"verifier": verifier_service.NAME, "drafter": drafter_service.NAME}[kind]
            for asked in ("", name):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=asked))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

    play(scenario())


def test_nobody_listens(tmp_path):
    async def scenario():
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/none", options=CHANNEL_OPTIONS) as channel:
            port = GrpcVerifierPort(channel, channel)
            with pytest.raises(ConnectionError):
                await port.info()
            with pytest.raises(ConnectionError):
                await port.connect().receive()

    play(scenario())


@pytest.mark.parametrize("kind", ["verifier", "drafter"])
def test_a_deadline_ends_the_session_on_the_service(target, tmp_path, kind):
    async def scenario():
        async with over_grpc(kind, target, tmp_path) as (service, _):
            stream = service.port.connect(0.3)
            await stream.send(service.open("s", 0))
            await port_contract.until(lambda: "s" in service.sessions())
            await port_contract.drained(stream)
            await port_contract.until(lambda: not service.sessions())

    play(scenario())
