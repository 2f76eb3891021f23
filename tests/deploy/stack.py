"""The compose file, brought up by testcontainers with images that are there: nothing is built or pulled.

``.ci/docker`` makes the images and says by AERIE_TEST_IMAGE and AERIE_TEST_REDIS_IMAGE what they are called. Without
Docker or images the tests that need them are skipped; with AERIE_REQUIRE_DOCKER=1 they fail.
"""

import json
import os
import subprocess
from pathlib import Path

import docker
import pytest
from testcontainers.compose import ComposeContainer, DockerCompose

DEPLOY = Path(__file__).parents[2] / "deploy"


def need_docker() -> None:
    """Skip or fail the test where containers cannot run."""
    try:
        client = docker.from_env()
        for name in ("AERIE_TEST_IMAGE", "AERIE_TEST_REDIS_IMAGE"):
            client.images.get(os.environ[name])
        client.close()
    except (docker.errors.DockerException, KeyError) as error:
        refuse = pytest.fail if os.environ.get("AERIE_REQUIRE_DOCKER") == "1" else pytest.skip
        refuse(f"containers cannot run: {error}")


class Stack:
    """A project of the compose file. Use as a context manager; environment variables must stay as they are meanwhile.

    Args:
        profile: One of the file's; by default as ``deploy/.env`` says.
    """

    def __init__(self, profile: str | None = None) -> None:
        self.compose = DockerCompose(DEPLOY, "compose.yaml", profiles=[profile] if profile else None)

    def __enter__(self) -> "Stack":
        try:
            self.compose.start()
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode() + "".join(self.compose.get_logs())
            self.close()
            pytest.fail(f"compose up failed: {said}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.run("down", "--volumes", "--timeout", "5")

    def run(self, *arguments: str) -> str:
        """``docker compose ARGUMENTS...``; what it prints."""
        command = [*self.compose.docker_compose_command(), *arguments]
        done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def containers(self, service: str | None = None) -> list[ComposeContainer]:
        """All containers, also those that ended, or those of one service."""
        found = self.compose.get_containers(include_all=True)
        return [each for each in found if service in (None, each.Service)]

    def address(self, service: str, port: int) -> str:
        """Where a published port is reached."""
        return f"127.0.0.1:{self.compose.get_service_port(service, port)}"


def exit_code(container: ComposeContainer) -> int:
    command = ["docker", "inspect", "--format", "{{json .State}}", str(container.ID)]
    state = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert not state["Running"]
    return int(state["ExitCode"])
