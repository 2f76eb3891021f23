"""The services as containers: what they answer, while they are scaled, killed and stopped."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from aerie.orchestrator.v1 import orchestrator_pb2, orchestrator_pb2_grpc

from services.bench.compare import compare_runs
from services.client import Client
from services.embedded import Engine
from tests.deploy.stack import Stack, exit_code, need_docker

pytestmark = [pytest.mark.docker, pytest.mark.real]
PROMPT = "Tell me a story about a river."
OPTIONS = {"max_tokens": 64, "ignore_eos": True, "seed": 7}


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """Of compose: our images, names and ports of our own."""
    need_docker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AERIE_IMAGE", os.environ["AERIE_TEST_IMAGE"])
        patch.setenv("AERIE_REDIS_IMAGE", os.environ["AERIE_TEST_REDIS_IMAGE"])
        for port in ("AERIE_PORT", "AERIE_HTTP_PORT", "AERIE_REDIS_PORT"):
            patch.setenv(port, "0")
        for name in ("AERIE_API_KEY", "AERIE_WORKER_KEY", "AERIE_KEY", "AERIE_REDIS_PASSWORD", "COMPOSE_PROFILES"):
            patch.delenv(name, raising=False)
        patch.setenv("COMPOSE_PROJECT_NAME", f"aerie-test-{os.getpid()}")
        yield patch


@pytest.fixture(scope="module")
def stack(environment: pytest.MonkeyPatch) -> Iterator[Stack]:
    with Stack() as up:
        yield up


@pytest.fixture(scope="module")
def address(stack: Stack) -> str:
    return stack.address("orchestrator", 50050)


@pytest.fixture(scope="module")
def check(engine: Engine):
    """Compare output tokens with what the engine in this process answers: another token must be a tie."""
    expected = {}

    def agree(tokens: tuple[int, ...], temperature: float = 0.0) -> None:
        request = engine.request(PROMPT, temperature=temperature, drafter="off", **OPTIONS)
        if temperature not in expected:
            expected[temperature] = engine.run_all([request])[0].token_ids
        assert len(tokens) == OPTIONS["max_tokens"]
        assert compare_runs(engine, request, expected[temperature], tokens, OPTIONS["seed"]).agrees

    return agree


class Running(threading.Thread):
    """A request that streams. ``end`` waits for it; returns its tokens, and why its drafter was lost if it was."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._begun = threading.Event()
        self._tokens: list[int] = []
        self._lost: str | None = None
        self._error: BaseException | None = None
        self.start()
        assert self._begun.wait(60), self._error

    def run(self) -> None:
        try:
            with Client(self._address) as client:
                for item in client.stream(PROMPT, **OPTIONS):
                    self._tokens += getattr(item, "tokens", ())
                    self._lost = getattr(item, "drafter_lost", None)
                    if len(self._tokens) > 2:  # rounds with a drafter have begun
                        self._begun.set()
        except BaseException as error:
            self._error = error

    def end(self) -> tuple[tuple[int, ...], str | None]:
        self.join(120)
        assert not self.is_alive()
        if self._error:
            raise self._error
        return tuple(self._tokens), self._lost


def drafters(address: str) -> list[orchestrator_pb2.DrafterSummary]:
    """Those that take sessions."""
    with grpc.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        answer = stub.ListDrafters(orchestrator_pb2.ListDraftersRequest(), timeout=10)
    return [each for each in answer.drafters if each.ready]


def until(number: int, address: str) -> list[orchestrator_pb2.DrafterSummary]:
    """The drafters, once the orchestrator knows so many."""
    end = time.monotonic() + 30
    while len(found := drafters(address)) != number:
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found


def test_all_services_are_healthy(stack, address):
    health = sorted((each.Service, each.Health) for each in stack.containers())
    kinds = ("drafter", "drafter", "orchestrator", "redis", "verifier")
    assert health == [(kind, "healthy") for kind in kinds]
    command = [sys.executable, "-m", "services.cli.main", "health", address]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{address} aerie.orchestrator.v1.OrchestratorService SERVING\n" in said
    until(2, address)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_containers_answer_the_tokens_of_one_process(address, check, temperature):
    with Client(address) as client:
        answer = client.generate(PROMPT, temperature=temperature, **OPTIONS)
    check(answer.token_ids, temperature)
    assert answer.stats["acceptance_length"] > 1.2  # with a drafter


def test_a_killed_drafter_changes_no_token(stack, address, check):
    until(2, address)
    request = Running(address)
    (used,) = [each for each in drafters(address) if each.sessions]
    container = used.address.partition(":")[0]  # a container is called by its id
    subprocess.run(["docker", "kill", container], check=True, capture_output=True)
    tokens, lost = request.end()
    check(tokens)
    assert lost
    until(1, address)


def test_drafters_are_added_while_requests_run(stack, address, check):
    done = threading.Event()

    def ask() -> list[tuple[int, ...]]:
        answers = []
        while not done.is_set():
            answers.append(Running(address).end()[0])
        return answers

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            stack.run("up", "--detach", "--wait", "--no-recreate", "--scale", "drafter=3")
            until(3, address)
        finally:
            done.set()
        answers = asking.result()
    for tokens in answers:
        check(tokens)
    assert {each.Health for each in stack.containers("drafter")} == {"healthy"}


def test_stopping_lets_a_running_request_finish(stack, address, check):
    request = Running(address)
    began = time.monotonic()
    stack.run("stop")
    assert time.monotonic() - began < 45
    tokens, lost = request.end()
    check(tokens)
    assert lost is None  # the drafters stopped after the orchestrator
    codes = sorted((each.Service, exit_code(each)) for each in stack.containers())
    assert codes == [(kind, 0) for kind in ("drafter", "drafter", "drafter", "orchestrator", "redis", "verifier")]


def test_the_mac_profile_serves_with_workers_outside_of_containers(environment, check, tmp_path):
    """As on a Mac, where Docker has no Metal; here the workers are processes of this Linux machine."""
    environment.setenv("COMPOSE_PROJECT_NAME", f"aerie-test-mac-{os.getpid()}")
    stack, workers = Stack("mac"), []
    try:
        stack.run("up", "--detach", "--wait", "redis")
        redis = f"redis://{stack.address('redis', 6379)}"
        verifier, drafter = free_port(), free_port()
        workers.append(start_worker("verifier", verifier, redis, tmp_path))
        workers.append(start_worker("drafter", drafter, redis, tmp_path, "--verifier", f"127.0.0.1:{verifier}"))
        stack.compose.start()
        assert sorted(each.Service for each in stack.containers()) == ["orchestrator", "redis"]
        address = stack.address("orchestrator", 50050)
        until(1, address)
        with Client(address) as client:
            answer = client.generate(PROMPT, **OPTIONS)
        check(answer.token_ids)
        assert answer.stats["acceptance_length"] > 1.2
    finally:
        for worker in workers:
            worker.terminate()
        codes = [worker.wait(60) for worker in workers]
        stack.close()
    assert codes == [0, 0]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def start_worker(kind: str, port: int, redis: str, folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "services.cli.main", "serve", kind, "--redis", redis, *options]
    command += ["--listen", f"0.0.0.0:{port}", "--advertise", f"host.docker.internal:{port}", "--insecure"]
    with (folder / kind).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
