"""What is over a limit is refused with a pause to come back after, and costs those that run nothing."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable

import grpc
import pytest
from aerie.orchestrator.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from services.client import AerieError, Client
from tests.e2e.test_services import LONG, PROMPT, stream, until, verifier_sessions
from tests.processes import Service, Services

ORCHESTRATOR = "aerie.orchestrator.v1.OrchestratorService"


def refusal(address: str) -> tuple[grpc.StatusCode, str, float]:
    """Status, reason and pause of a request that is refused."""
    with grpc.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        request = orchestrator_pb2.GenerateRequest(
            tokens=orchestrator_pb2.TokenIds(ids=PROMPT), max_tokens=LONG, ignore_eos=True
        )
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request, timeout=30))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in rpc_status.from_call(refused.value).details:
        for wanted in (info, retry):
            detail.Unpack(wanted)
    return refused.value.code(), info.reason, retry.retry_delay.ToTimedelta().total_seconds()


def refusal_over_http(service: Service) -> tuple[int, str, str]:
    body = {"model": "", "prompt": list(PROMPT), "max_tokens": LONG, "x-aerie-ignore-eos": True}
    with urllib.request.urlopen(f"http://{service.http}/v1/models", timeout=10) as models:
        body["model"] = json.load(models)["data"][0]["id"]
    request = urllib.request.Request(
        f"http://{service.http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value as answer:
        return answer.code, json.load(answer)["error"]["code"], answer.headers["Retry-After"]


def health(address: str) -> bool:
    """The orchestrator takes sessions."""
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=ORCHESTRATOR))
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def while_one_runs(services: Services, act: Callable[[], None]) -> None:
    tokens, _ = stream(services.socket("o"), LONG, at=5, act=act)
    assert len(tokens) == LONG
    until(lambda: not verifier_sessions(services.socket("v")))
    assert len(stream(services.socket("o"), LONG)[0]) == LONG  # there is room again


def test_the_budget_of_caches(tiny, drafter):
    with Services(tiny, drafter) as services:
        poor = services.verifier("--kv-bytes", "1").wait_ready()
        services.orchestrator(drafters=()).wait_ready()
        with Client(services.socket("o"), retries=0) as client, pytest.raises(AerieError) as refused:
            client.generate(PROMPT, max_tokens=LONG)
        needed = int(re.findall(r"needs (\d+) bytes", refused.value.message)[0])
        poor.end()
        services.verifier("--kv-bytes", str(needed * 3 // 2)).wait_ready()
        until(lambda: health(services.socket("o")))

        def second() -> None:
            code, reason, pause = refusal(services.socket("o"))
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
            assert pause > 0
            assert len(verifier_sessions(services.socket("v"))) == 1

        while_one_runs(services, second)


def test_the_queue_of_sessions(tiny, drafter):
    with Services(tiny, drafter) as services:
        services.verifier().wait_ready()
        limits = ("--max-sessions", "1", "--max-queue", "0", "--http", "127.0.0.1:0")
        front = services.orchestrator(*limits, drafters=()).wait_ready(http=True)

        def second() -> None:
            code, reason, pause = refusal(front.address)
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
            assert pause > 0
            status, code_, after = refusal_over_http(front)
            assert (status, code_) == (429, "resource_exhausted")
            assert int(after) >= 1

        while_one_runs(services, second)
