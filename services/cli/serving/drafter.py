"""``aerie serve drafter``."""

import argparse

from aerie.drafter.v1.drafter_pb2_grpc import add_DrafterServiceServicer_to_server

from services.cli.options import overrides
from services.cli.serving.lifecycle import patiently, run_process
from services.cli.serving.models import set_threads
from services.cli.serving.process import Hosted, Process
from services.cli.serving.shared import SharedTensors, default_cache
from services.cli.serving.watching_models import watch_drafter
from services.drafter.compiled import CompiledDrafting
from services.drafter.host import DrafterHost
from services.drafter.loader import load_chosen
from services.drafter.servicer import NAME, DrafterServicer
from services.runtime.device import device_thread
from services.speculation.errors import AerieError, Reason


def serve_drafter(options: argparse.Namespace) -> int:
    """Load a drafter, with the target's shared weights from its verifier, and serve it."""
    set_threads(options, takes_turns=True)
    return run_process("drafter", options, _start)


async def _start(process: Process, options: argparse.Namespace) -> None:
    device = device_thread()
    address = await patiently(lambda: process.find_verifier(options.verifier), "a verifier in the registry")
    port = process.verifier_port(address)
    info = await patiently(port.info, f"the verifier at {address}")
    shared = SharedTensors(port, info, default_cache())
    model = await device.run(lambda: load_chosen(options.drafter, info, shared.get, overrides(options)))
    if model is None:
        raise AerieError(Reason.DRAFTER_UNAVAILABLE, f"no drafter {options.drafter!r} for {info.name}")
    host = DrafterHost(model, device, CompiledDrafting(model) if info.device == "gpu" else None)
    host.start()
    process.on_end(host.stop)
    servicer = DrafterServicer(host, process.gate)
    watch_drafter(process, host)
    process.entry_data = {
        "drafter": model.info.name,
        "family": model.info.family,
        "target_fingerprint": info.weights_fingerprint,
    }
    process.hosted.append(Hosted(NAME, lambda server: add_DrafterServiceServicer_to_server(servicer, server)))
