"""``aerie health`` against real servers: which names it asks for, and what it makes of the answers."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tests.cli.conftest import one_line

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
VERIFIER = "aerie.verifier.v1.VerifierService"
OTHER = "some.other.v1.Service"


class Server:
    """Reports ``states`` and lists services by reflection if ``listed`` says which."""

    def __init__(self, states: dict[str, int] | None, listed: tuple[str, ...] | None) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4))
        if states is not None:
            servicer = health.HealthServicer()
            servicer.set("", states.get("", SERVING))
            for name, state in states.items():
                servicer.set(name, state)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        if listed is not None:
            names = (*listed, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def serve() -> Iterator:
    servers = []

    def start(states=None, listed=None) -> str:
        servers.append(Server(states, listed))
        return servers[-1].address

    yield start
    for server in servers:
        server.stop()


def test_every_listed_service_is_asked_for(aerie, serve):
    address = serve({VERIFIER: SERVING, OTHER: SERVING}, (VERIFIER, OTHER))
    run = aerie("health", address)
    assert (run.code, run.err) == (0, "")
    assert run.out.splitlines() == [
        f"{address} (process) SERVING",
        f"{address} {VERIFIER} SERVING",
        f"{address} {OTHER} SERVING",
    ]


def test_known_names_are_asked_for_where_none_is_listed(aerie, serve):
    address = serve({VERIFIER: SERVING, OTHER: SERVING})
    assert aerie("health", address).out.splitlines() == [
        f"{address} (process) SERVING",
        f"{address} {VERIFIER} SERVING",
    ]


@pytest.mark.parametrize("name", ["", VERIFIER])
def test_one_that_does_not_serve_is_a_failure(aerie, serve, name):
    good, bad = serve({VERIFIER: SERVING}), serve({VERIFIER: SERVING, name: NOT_SERVING}, (VERIFIER,))
    run = aerie("health", good, bad)
    assert run.code == 1
    assert f"{bad} {name or '(process)'} NOT_SERVING" in run.out.splitlines()
    assert len(run.out.splitlines()) == 4


def test_nobody_there_is_unreachable(aerie, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    run = aerie("health", address, f"unix:{tmp_path}/none")
    assert (run.code, run.err) == (1, "")
    assert run.out.splitlines() == [f"{address} unreachable", f"unix:{tmp_path}/none unreachable"]


def test_a_server_that_never_answers_costs_the_timeout(aerie):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        run = aerie("health", address, "--timeout", "0.3")
    assert (run.code, run.out) == (1, f"{address} no answer\n")


def test_a_server_without_health_is_a_failure(aerie, serve):
    address = serve(None, (OTHER,))
    run = aerie("health", address)
    assert run.code == 1
    assert run.out.startswith(f"{address} UNIMPLEMENTED")
    assert run.out.count("\n") == 1


@pytest.mark.parametrize("address", ["host", ":50051", "host:", "host:http", "host:0", "host:65536", "unix:"])
def test_what_is_no_address_is_wrong_usage(aerie, address):
    run = aerie("health", address)
    assert run.code == 2
    assert one_line(run).startswith(f"'{address}' is no address")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_timeout_is_positive(aerie, seconds):
    run = aerie("health", "127.0.0.1:1", "--timeout", seconds)
    assert run.code == 2
    assert "--timeout" in one_line(run)


def test_the_probe_does_not_load_mlx():
    code = (
        "import sys; from services.cli.main import main; main(['health', '127.0.0.1:1'])\n"
        "print('mlx.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "127.0.0.1:1 unreachable\nFalse\n", done.stderr
