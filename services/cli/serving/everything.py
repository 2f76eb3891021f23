"""``aerie serve all``: the three services in one process, behind one port."""

import argparse

from aerie.drafter.v1.drafter_pb2_grpc import add_DrafterServiceServicer_to_server
from aerie.verifier.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server

from services.cli.options import overrides
from services.cli.serving.lifecycle import run_process
from services.cli.serving.models import set_threads
from services.cli.serving.orchestrator import host_orchestrator
from services.cli.serving.process import Hosted, Process
from services.cli.serving.watching_models import watch_drafter, watch_verifier
from services.drafter import servicer as drafter_service
from services.drafter.host import DrafterHost
from services.drafter.loader import load_chosen
from services.embedded.parts import Parts
from services.orchestrator.service import Limits
from services.runtime.device import device_thread
from services.targets.loader import load_target
from services.verifier import servicer as verifier_service


def serve_all(options: argparse.Namespace) -> int:
    """Load target and drafter and serve them together."""
    set_threads(options, takes_turns=False)
    return run_process("all", options, _start)


async def _start(process: Process, options: argparse.Namespace) -> None:
    device = device_thread()
    target = await device.run(lambda: load_target(options.target))
    model = await device.run(lambda: load_chosen(options.drafter, target.info, target.tensor, overrides(options)))
    limits = Limits(options.max_sessions, options.max_queue)
    parts = await Parts.start(target, model, device, options.kv_bytes, limits, process.bus)
    process.on_end(parts.stop)
    verifier = verifier_service.VerifierServicer(parts.verifier, process.gate)
    process.hosted.append(
        Hosted(verifier_service.NAME, lambda server: add_VerifierServiceServicer_to_server(verifier, server))
    )
    watch_verifier(process, parts.verifier, verifier)
    for drafter in parts.drafters:
        watch_drafter(process, drafter)
        process.hosted.append(_host_drafter(process, drafter))
    host_orchestrator(process, parts.orchestrator, options)


def _host_drafter(process: Process, host: DrafterHost) -> Hosted:
    servicer = drafter_service.DrafterServicer(host, process.gate)
    return Hosted(drafter_service.NAME, lambda server: add_DrafterServiceServicer_to_server(servicer, server))
