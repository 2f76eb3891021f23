"""What the files of deploy/ say, without running them: they parse, and agree with the command line."""

import plistlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.parser import build_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PORTS = {"verifier": "50051", "drafter": "50052", "orchestrator": "50050"}


def interpolate(text: str) -> str:
    """As compose does where no variable is set."""
    return re.sub(r"\$\{\w+(?::?-([^}]*))?\}", lambda found: found[1] or "", text)


def read_compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(interpolate((DEPLOY / "compose.yaml").read_text()))["services"]
    return services


def in_profile(profile: str) -> set[str]:
    return {name for name, each in read_compose().items() if profile in each.get("profiles", [profile])}


def arguments_of(service: dict[str, Any]) -> list[str]:
    return shlex.split(service["command"])


def test_profiles_have_the_services_of_the_documentation():
    assert in_profile("mac") == {"redis", "orchestrator"}
    assert in_profile("containers") == {"redis", "verifier", "drafter", "orchestrator"}
    assert "COMPOSE_PROFILES=containers" in (DEPLOY / ".env").read_text().splitlines()
    assert read_compose()["drafter"]["deploy"]["replicas"] == 2


def test_every_service_has_a_probe_and_few_rights():
    for name, service in read_compose().items():
        probe = service["healthcheck"]["test"]
        if name == "redis":
            assert probe == ["CMD", "redis-cli", "ping"]
        else:
            assert probe == ["CMD", "aerie", "health", f"127.0.0.1:{PORTS[name]}"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_ports_are_published_on_this_machine_alone():
    published = {name: each["ports"] for name, each in read_compose().items() if "ports" in each}
    assert published == {
        "redis": ["127.0.0.1:6379:6379"],
        "orchestrator": ["127.0.0.1:50050:50050", "127.0.0.1:8000:8000"],
    }


@pytest.mark.parametrize("kind", PORTS)
def test_compose_commands_are_those_of_the_command_line(kind):
    service = read_compose()[kind]
    options = build_parser().parse_args(arguments_of(service))
    assert (options.command, options.kind) == ("serve", kind)
    assert options.listen == f"0.0.0.0:{PORTS[kind]}"
    assert float(service["stop_grace_period"].removesuffix("s")) > options.drain


def test_the_orchestrator_stops_first_and_redis_last():
    services = read_compose()
    assert set(services["orchestrator"]["depends_on"]) == {"redis", "verifier", "drafter"}
    assert set(services["drafter"]["depends_on"]) == {"redis", "verifier"}
    assert set(services["verifier"]["depends_on"]) == {"redis"}
    # Those of another profile must not be missed.
    for name, how in services["orchestrator"]["depends_on"].items():
        assert (how.get("required") is False) == (name != "redis")


def test_kubernetes_probes_and_commands():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/aerie.yaml").read_text()))
    deployments = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "Deployment"}
    assert set(deployments) == {"redis", *PORTS}
    for name, port in PORTS.items():
        pod = deployments[name]["template"]["spec"]
        (container,) = pod["containers"]
        options = build_parser().parse_args(container["args"])
        assert (options.kind, options.listen) == (name, f"0.0.0.0:{port}")
        # Without a service's name it is liveness that is asked for.
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["grpc"] == {"port": int(port)}
        service = f"aerie.{name}.v1.{name.title()}Service"
        assert container["readinessProbe"]["grpc"] == {"port": int(port), "service": service}
        assert pod["terminationGracePeriodSeconds"] > options.drain
        assert container["securityContext"]["runAsNonRoot"] is True
    services = [each["spec"] for each in documents if each["kind"] == "Service"]
    selected = {(each["selector"]["role"], port["port"]) for each in services for port in each["ports"]}
    assert selected == {("redis", 6379), ("verifier", 50051), ("orchestrator", 50050), ("orchestrator", 8000)}


@pytest.mark.parametrize("kind", ["verifier", "drafter"])
def test_launchd_agents(kind):
    agent = plistlib.loads((DEPLOY / f"launchd/aerie.{kind}.plist").read_bytes())
    options = build_parser().parse_args(agent["ProgramArguments"][1:])
    assert agent["Label"] == f"aerie.{kind}"
    assert options.kind == kind
    # Docker's containers reach what listens on a Mac's loopback by this name.
    assert options.listen == f"127.0.0.1:{PORTS[kind]}"
    assert options.advertise == f"host.docker.internal:{PORTS[kind]}"
    assert agent["ExitTimeOut"] > options.drain


def test_commands_of_the_documentation_are_those_of_the_command_line():
    blocks = re.findall(r"^```\n(.*?)^```", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("aerie ")]
    assert len(lines) >= 6
    for line in lines:
        build_parser().parse_args(shlex.split(line, comments=True)[1:])


def test_the_image_is_built_from_what_the_context_lets_through():
    let = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
        for word in line.replace("wheel[s]", "wheels").split()
    }
    assert copied == let
    assert re.search(r"^USER \d+$", text, re.MULTILINE)  # a number: Kubernetes cannot tell whether a name is root


def test_nothing_here_names_a_registry():
    for path in (*DEPLOY.rglob("*"), *(ROOT / ".ci").iterdir()):
        if path.is_file():
            addresses = re.findall(r"\w+://[^\s/:\"'<>)]+", path.read_text())
            allowed = ("apple.com", "redis://", "unix://", "$", "localhost", "127.0.0.1")
            assert [each for each in addresses if not any(part in each for part in allowed)] == [], path
