"""``aerie serve``: one service of the three, until a signal ends it."""

import argparse
import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from aerie.drafter.v1.drafter_pb2_grpc import add_DrafterServiceServicer_to_server
from aerie.orchestrator.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from aerie.verifier.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from tokenizers import Tokenizer

from kernels import _blas
from services.cli.options import check_models, overrides
from services.drafter import servicer as drafter_service
from services.drafter.compiled import CompiledDrafting
from services.drafter.family import TraceableDraftModel
from services.drafter.host import DrafterHost
from services.drafter.loader import load_chosen
from services.orchestrator import servicer as orchestrator_service
from services.orchestrator.grpc_ports import CHANNEL_OPTIONS, GrpcDrafterPort, GrpcVerifierPort
from services.orchestrator.service import Orchestrator
from services.orchestrator.text import ChatTemplate
from services.runtime.bus import MemoryBus
from services.runtime.device import device_thread
from services.runtime.grpc_server import start_server
from services.runtime.registry import Entry, MemoryRegistry
from services.speculation.errors import AerieError, Reason
from services.targets.features import to_mlx
from services.targets.loader import load_target
from services.verifier import servicer as verifier_service
from services.verifier.host import VerifierHost

log = logging.getLogger(__name__)
WAIT_SECONDS = 60.0
"""A service waits no longer for the services that it needs."""
DRAIN_SECONDS = 30.0
"""Streams that run when the end is asked for have this long."""


def serve_verifier(options: argparse.Namespace) -> int:
    return _run(_verifier(options))


def serve_drafter(options: argparse.Namespace) -> int:
    return _run(_drafter(options))


def serve_orchestrator(options: argparse.Namespace) -> int:
    return _run(_orchestrator(options))


def _run(service: Any) -> int:
    asyncio.run(service)
    return 0


async def _verifier(options: argparse.Namespace) -> None:
    device = device_thread()
    _set_threads(options)
    target = await device.run(lambda: load_target(options.target))
    host = await device.run(lambda: VerifierHost(target, device, options.kv_bytes))
    host.start()

    def add(server: grpc.aio.Server) -> None:
        add_VerifierServiceServicer_to_server(verifier_service.VerifierServicer(host), server)

    await _serve_until_told("verifier", options.listen, add, verifier_service.NAME)
    await host.stop()


async def _drafter(options: argparse.Namespace) -> None:
    device = device_thread()
    _set_threads(options)
    async with grpc.aio.insecure_channel(options.verifier, options=CHANNEL_OPTIONS) as channel:
        port = GrpcVerifierPort(channel)
        info = await _patiently(port.info, f"the verifier at {options.verifier}")
        # Drafters share the target's embedding, and some its head.
        shared = {name: await port.tensor(name) for name in ("embed_tokens", "lm_head")}

    def load() -> TraceableDraftModel | None:
        return load_chosen(options.drafter, info, lambda name: to_mlx(shared.pop(name)), overrides(options))

    model = await device.run(load)
    if model is None:
        raise AerieError(Reason.DRAFTER_UNAVAILABLE, f"no drafter {options.drafter!r} for {info.name}")
    host = DrafterHost(model, device, CompiledDrafting(model) if info.device == "gpu" else None)
    host.start()

    def add(server: grpc.aio.Server) -> None:
        add_DrafterServiceServicer_to_server(drafter_service.DrafterServicer(host), server)

    await _serve_until_told("drafter", options.listen, add, drafter_service.NAME)
    await host.stop()


async def _orchestrator(options: argparse.Namespace) -> None:
    async with contextlib.AsyncExitStack() as stack:

        async def dial(address: str) -> grpc.aio.Channel:
            return await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))

        verifier = GrpcVerifierPort(await dial(options.verifier))
        info = await _patiently(verifier.info, f"the verifier at {options.verifier}")
        tokenizer = await verifier.tokenizer()
        registry = MemoryRegistry()
        for address in options.drafter:
            port = GrpcDrafterPort(await dial(address))
            drafter = await _patiently(port.info, f"the drafter at {address}")
            data = {
                "family": drafter.family,
                "taps": drafter.taps,
                "target_fingerprint": drafter.target_fingerprint,
            }
            registry.join(Entry(f"{drafter.name}@{address}", "drafter", port, data))
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens) if tokenizer.chat_template else None
        text = Tokenizer.from_str(tokenizer.tokenizer_json)
        orchestrator = Orchestrator(verifier, info, text, template, registry, MemoryBus())

        def add(server: grpc.aio.Server) -> None:
            servicer = orchestrator_service.OrchestratorServicer(orchestrator)
            add_OrchestratorServiceServicer_to_server(servicer, server)

        await _serve_until_told("orchestrator", options.listen, add, orchestrator_service.NAME)


async def _serve_until_told(kind: str, listen: str, add: Callable[[grpc.aio.Server], None], name: str) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new streams and give those that run some time."""
    server, address, health = await start_server(listen, add, [name])
    print(f"{kind}: {address}", flush=True)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told.set)
    await told.wait()
    await health.enter_graceful_shutdown()
    await server.stop(DRAIN_SECONDS)


async def _patiently(ask: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Ask until there is an answer. Raises AerieError: SERVICE_UNAVAILABLE after WAIT_SECONDS."""
    deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
    while True:
        try:
            return await ask()
        except ConnectionError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise AerieError(Reason.SERVICE_UNAVAILABLE, f"{what} does not answer: {error}") from None
            await asyncio.sleep(0.2)


def _set_threads(options: argparse.Namespace) -> None:
    check_models(options)
    if options.threads is not None:
        _blas.set_threads(options.threads)
