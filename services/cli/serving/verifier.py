"""``aerie serve verifier``."""

import argparse

from aerie.verifier.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server

from services.cli.serving.lifecycle import run_process
from services.cli.serving.models import set_threads
from services.cli.serving.process import Hosted, Process
from services.cli.serving.watching_models import watch_verifier
from services.runtime.device import device_thread
from services.targets.loader import load_target
from services.verifier.host import VerifierHost
from services.verifier.servicer import NAME, VerifierServicer


def serve_verifier(options: argparse.Namespace) -> int:
    """Load the target and serve it."""
    set_threads(options, takes_turns=True)
    return run_process("verifier", options, _start)


async def _start(process: Process, options: argparse.Namespace) -> None:
    device = device_thread()
    target = await device.run(lambda: load_target(options.target))
    host = await device.run(lambda: VerifierHost(target, device, options.kv_bytes, process.bus))
    host.start()
    process.on_end(host.stop)
    servicer = VerifierServicer(host, process.gate)
    watch_verifier(process, host, servicer)
    process.entry_data = {"target": target.info.name, "target_fingerprint": target.info.weights_fingerprint}
    process.hosted.append(Hosted(NAME, lambda server: add_VerifierServiceServicer_to_server(servicer, server)))
