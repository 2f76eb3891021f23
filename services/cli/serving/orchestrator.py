"""``aerie serve orchestrator``: needs no model, and no MLX."""

import argparse

from aerie.orchestrator.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from tokenizers import Tokenizer

from services.cli.serving.lifecycle import patiently, run_process
from services.cli.serving.process import DEFAULT_DRAFTER, Hosted, Process
from services.cli.serving.verifier_watch import VerifierWatch
from services.cli.serving.watching import watch_dependency, watch_rounds
from services.orchestrator.directory import Directory
from services.orchestrator.openai.app import build_app
from services.orchestrator.openai.server import HttpServer
from services.orchestrator.service import Limits, Orchestrator
from services.orchestrator.servicer import NAME, OrchestratorServicer
from services.orchestrator.text import ChatTemplate
from services.runtime.registry import Entry, MemoryRegistry, Registry


def serve_orchestrator(options: argparse.Namespace) -> int:
    """Serve clients with a verifier and drafters that run elsewhere."""
    return run_process("orchestrator", options, _start)


async def _start(process: Process, options: argparse.Namespace) -> None:
    address = await patiently(lambda: process.find_verifier(options.verifier), "a verifier in the registry")
    verifier = process.verifier_port(address)
    info = await patiently(verifier.info, f"the verifier at {address}")
    files = await patiently(verifier.tokenizer, f"the verifier at {address}")
    directory = Directory(await _drafters(process, options), process.drafter_port, info, process.bus)
    directory.start()
    watch = VerifierWatch(verifier, address, info, None if options.verifier else process.registry)
    watch_dependency(process, "verifier", watch.ask)
    process.fatal.append(lambda: watch.changed)
    process.on_end(directory.stop)
    await directory.refresh()
    template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
    limits = Limits(options.max_sessions, options.max_queue)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    orchestrator = Orchestrator(
        verifier, info, tokenizer, template, directory, process.bus, limits, unavailable=lambda: watch.silent
    )
    process.entry_data = {"target_fingerprint": info.weights_fingerprint}
    host_orchestrator(process, orchestrator, options)


async def _drafters(process: Process, options: argparse.Namespace) -> Registry:
    """Where drafters are found: in Redis, or where the command line says."""
    if process.registry and not options.drafter:
        return process.registry
    named = MemoryRegistry()
    for address in options.drafter or [DEFAULT_DRAFTER]:
        await named.join(Entry(f"drafter@{address}", "drafter", address))
    return named


def host_orchestrator(process: Process, orchestrator: Orchestrator, options: argparse.Namespace) -> None:
    """Serve an orchestrator over gRPC, and over HTTP where ``--http`` says so."""
    servicer = OrchestratorServicer(orchestrator, process.gate)
    watch_rounds(process, orchestrator)
    process.cut_off.append(orchestrator.cut_off)
    process.hosted.append(Hosted(NAME, lambda server: add_OrchestratorServiceServicer_to_server(servicer, server)))
    if options.http:
        keys = frozenset(key.reveal() for key in process.api_keys)
        ready = lambda: process.readiness is not None and process.readiness.actor.reason is None  # noqa: E731
        app = build_app(orchestrator, keys, ready=ready, routes=[process.metrics.route()])
        process.http = HttpServer(app, options.tls_cert, options.tls_key, options.tls_client_ca)
