"""``aerie health``: whether servers serve, service by service. Starts fast: it is the probe of containers."""

import argparse
import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.cli.dialling import security_of
from services.cli.report import UsageError, printable
from services.runtime.security import ChannelSecurity

PROCESS = "(process)"
"""How the empty name is shown, which stands for the whole process."""
SERVING = "SERVING"
_KNOWN = (
    "aerie.verifier.v1.VerifierService",
    "aerie.drafter.v1.DrafterService",
    "aerie.orchestrator.v1.OrchestratorService",
)


def health(options: argparse.Namespace) -> int:
    """Print a line for each address and service; 0 if all of them serve, else 1."""
    for address in options.addresses:
        _check_address(address)
    if not options.timeout > 0:
        raise UsageError("--timeout must be more than 0 seconds")
    security = security_of(options)
    answers = asyncio.run(_ask_all(options.addresses, options.timeout, security))
    for address, states in zip(options.addresses, answers, strict=True):
        for name, state in states:
            print(*filter(None, (address, name, state)))
    return 0 if all(state == SERVING for states in answers for _, state in states) else 1


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if address.startswith("unix:"):
        usable = len(address) > len("unix:")
    else:
        usable = bool(host and colon) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not usable:
        raise UsageError(f"{address!r} is no address: host:port or unix:PATH")


async def _ask_all(addresses: Sequence[str], timeout: float, security: ChannelSecurity) -> list[list[tuple[str, str]]]:
    return await asyncio.gather(*(_ask(address, timeout, security) for address in addresses))


async def _ask(address: str, timeout: float, security: ChannelSecurity) -> list[tuple[str, str]]:
    """Names and states of what serves there, or one state of no name."""
    try:
        async with asyncio.timeout(timeout), security.open(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            names = ("", *await _names(channel))
            states = await asyncio.gather(*(_state(stub, name) for name in names))
    except TimeoutError:
        return [("", "no answer")]
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return [("", "unreachable")]
        return [("", printable(f"{error.code().name}: {error.details()}"))]
    # A server lists services, such as reflection itself, whose health it does not report.
    known = [(name or PROCESS, state) for name, state in zip(names, states, strict=True) if state]
    return known or [("", "reports no health")]


async def _names(channel: grpc.aio.Channel) -> Sequence[str]:
    """What the server lists, or the services that we know where it lists nothing."""
    request = reflection_pb2.ServerReflectionRequest(list_services="*")
    try:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter((request,)))
        async for response in call:
            return sorted(service.name for service in response.list_services_response.service)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise
    return _KNOWN


async def _state(stub: health_pb2_grpc.HealthStub, name: str) -> str | None:
    """The state in words, or None where the server knows nothing of the name."""
    try:
        response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise
    state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return state
