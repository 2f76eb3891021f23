"""Who may reach what: keys, certificates, addresses; and what a served process shows of itself."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.client import AerieError, ChannelSecurity, Client, Key, Reason
from tests.e2e.test_services import PROMPT, until, wait_for_drafters
from tests.processes import Service, Services

API_KEY, WORKER_KEY = "a-key-of-clients", "a-key-of-workers"


def read(url: str, key: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def aerie(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])


@pytest.fixture(scope="module")
def served(tiny: str, drafter: str) -> Iterator[Service]:
    """Everything in one process, with a key and an HTTP port; its log is JSON."""
    with Services(tiny, drafter) as services:
        options = ("--target", tiny, "--drafter", drafter, "--http", "127.0.0.1:0", "--log-format", "json")
        yield services.start("all", "all", *options, AERIE_API_KEY=API_KEY).wait_ready(http=True)


def test_clients_need_the_key(served):
    for security in (ChannelSecurity(), ChannelSecurity(Key("another"))):
        with Client(served.address, security=security) as client, pytest.raises(AerieError) as refused:
            client.generate(PROMPT, max_tokens=2)
        assert refused.value.reason is Reason.UNAUTHENTICATED
    with Client(served.address, security=ChannelSecurity(Key(API_KEY))) as client:
        assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5
    assert read(f"http://{served.http}/v1/models")[0] == 401
    status, body = read(f"http://{served.http}/v1/models", API_KEY)
    assert (status, json.loads(body)["object"]) == (200, "list")


def test_openais_client_and_the_metrics_that_it_leaves(served):
    with openai.OpenAI(base_url=f"http://{served.http}/v1", api_key=API_KEY, max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=30, temperature=0
        )
    assert answer.usage.completion_tokens <= 30
    assert answer.usage.model_extra["x-aerie"]["rounds"] >= 1
    assert read(f"http://{served.http}/health") == (200, '{"status":"ok"}')

    def counted() -> bool:
        page = read(f"http://{served.http}/metrics")[1]
        found = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:")}
        return found["vllm:spec_decode_num_drafts_total"] > 0 and found.get("vllm:request_success_total", 0) > 0

    until(counted, 5)


def test_health_needs_no_key_and_reflection_does(served):
    with grpc.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", *(f"aerie.{n}.v1.{n.title()}Service" for n in ("verifier", "drafter", "orchestrator"))):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_logs_are_structured_and_hold_no_key(served):
    text = served.log.read_text()
    assert API_KEY not in text
    for line in text.splitlines():
        assert json.loads(line)["service"] == "all"


def test_services_among_themselves_show_their_key(tiny, drafter):
    """A drafter with another key is refused by the verifier at once, and one is not asked by the orchestrator."""
    with Services(tiny, drafter) as services:
        key = {"AERIE_WORKER_KEY": WORKER_KEY}
        started = [
            services.start("v", "verifier", "--target", tiny, **key),
            services.start("d", "drafter", "--verifier", services.socket("v"), "--drafter", drafter, **key),
            services.start(
                "o", "orchestrator", "--verifier", services.socket("v"), "--drafter", services.socket("d"), **key
            ),
        ]
        for service in started:
            service.wait_ready()
        wait_for_drafters(services.socket("o"), 1)
        with Client(services.socket("o")) as client:
            assert client.generate(PROMPT, max_tokens=20, ignore_eos=True).stats["fallback_rounds"] <= 1
        stranger = services.start("x", "drafter", "--verifier", services.socket("v"), AERIE_WORKER_KEY="wrong")
        assert stranger.process.wait(30) == 1
        assert "UNAUTHENTICATED" in stranger.log.read_text()
        assert WORKER_KEY not in "".join(service.log.read_text() for service in started)


def test_everything_over_tls(tiny, drafter, tmp_path):
    ca = trustme.CA()
    certificate = ca.issue_cert("localhost")
    files = {name: tmp_path / name for name in ("ca", "cert", "key")}
    ca.cert_pem.write_to_path(files["ca"])
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    with Services(tiny, drafter) as services:
        serve = ("--tls-cert", str(files["cert"]), "--tls-key", str(files["key"]))
        dial = ("--ca", str(files["ca"]))

        def start(kind: str, *options: str) -> Service:
            service = Service(services.folder, kind, kind, "--listen", "localhost:0", *serve, *options)
            services.started.append(service)
            return service.wait_ready()

        verifier = start("verifier", "--target", tiny).address
        drafts = start("drafter", "--drafter", drafter, "--verifier", verifier, *dial).address
        front = start("orchestrator", "--verifier", verifier, "--drafter", drafts, *dial).address
        with Client(front, security=ChannelSecurity(ca=files["ca"])) as client:
            until(lambda: any(line.status for line in client.drafters()))
            assert len(client.generate(PROMPT, max_tokens=20, ignore_eos=True).token_ids) == 20
        healthy = aerie("health", front, verifier, drafts, *dial)
        assert (healthy.returncode, healthy.stdout.count("NOT_SERVING")) == (0, 0), healthy.stdout
        assert healthy.stdout.count(" SERVING") == 6
        assert aerie("health", front).returncode == 1
        with Client(front, retries=0) as client, pytest.raises(AerieError) as refused:
            client.generate(PROMPT, max_tokens=2)
        assert refused.value.reason is Reason.SERVICE_UNAVAILABLE


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--listen", "0.0.0.0:0"), "--insecure"),
        (("--listen", "nowhere"), "--listen is 'nowhere'"),
        (("--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0"), "--insecure"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "/none"), "both a certificate and its key"),
        (("--listen", "127.0.0.1:0", "--worker-key-file", "/none"), "cannot be read"),
        (("--listen", "127.0.0.1:0", "--redis", "nonsense"), "--redis"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_loads(tiny, options, says):
    done = aerie("serve", "verifier", "--target", tiny, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
