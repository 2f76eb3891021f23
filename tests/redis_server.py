"""A Redis for tests: the one of AERIE_TEST_REDIS_URL, a container, or a process of this machine; never an imitation.

Without any of them tests are skipped; with AERIE_REQUIRE_REDIS=1 they fail, and with AERIE_REQUIRE_DOCKER=1 a container
must do. AERIE_TEST_REDIS_IMAGE names the image, which must be there: nothing is pulled.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

_OPTIONS = ["--save", "", "--appendonly", "no"]  # so that a restarted Redis has no data
_DEADLINE = 20.0


class RedisServer:
    """A Redis that somebody else runs. ``url`` reaches it; its data is to be left alone: use keys of your own."""

    controllable = False

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def address(self) -> str:
        """``host:port`` or ``unix:PATH``."""
        parts = urlsplit(self.url)
        return f"unix:{parts.path}" if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"

    def stop(self) -> None:
        """End it at once; its data is lost."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it again, without data, at the same URL."""
        raise NotImplementedError

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """It stays connected and answers nothing, until ``resume``."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """The test is over."""

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + _DEADLINE
        while True:
            try:
                with redis.Redis.from_url(self.url, socket_timeout=1) as client:
                    client.ping()
                return
            except (redis.RedisError, OSError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


class LocalRedis(RedisServer):
    """A process behind a Unix socket in a folder of its own."""

    controllable = True

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="aerie-redis-")
        path = Path(self._folder, "socket")
        super().__init__(f"unix://{path}")
        log = str(Path(self._folder, "log"))
        self._command = [program, "--port", "0", "--unixsocket", str(path), "--dir", self._folder, "--logfile", log]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([*self._command, *_OPTIONS])
        self.wait()

    def stop(self) -> None:
        if self._process:
            self._process.kill()  # also a paused one
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process, "Redis does not run"
        self._process.send_signal(number)


class ContainerRedis(RedisServer):
    """A container, its port fixed so that it keeps its URL."""

    controllable = True

    def __init__(self, image: str) -> None:
        from testcontainers.community.redis import RedisContainer

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["redis-server", *_OPTIONS, "--protected-mode", "no", "--bind", "0.0.0.0"]
        self._container = RedisContainer(image).with_bind_ports(6379, port).with_command(command)
        self._container.start()
        self._docker: Any = self._container.get_wrapped_container()
        super().__init__(f"redis://{self._container.get_container_host_ip()}:{port}/0")

    def start(self) -> None:
        self._docker.start()
        self.wait()

    def stop(self) -> None:
        self._docker.kill()
        self._docker.wait()

    def pause(self) -> None:
        self._docker.pause()

    def resume(self) -> None:
        self._docker.unpause()

    def close(self) -> None:
        self._container.stop()


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """The first Redis that can be had; skips or fails the test without one."""
    server = _find()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def own_redis() -> Iterator[RedisServer]:
    """One that a test may stop, restart and pause; skips where there is only somebody else's."""
    with redis_server() as server:
        if not server.controllable:
            pytest.skip("the Redis of AERIE_TEST_REDIS_URL is not ours to stop")
        yield server


def _find() -> RedisServer:
    if url := os.environ.get("AERIE_TEST_REDIS_URL"):
        return RedisServer(url)
    image = os.environ.get("AERIE_TEST_REDIS_IMAGE")
    if image and _docker_has(image):
        os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # its image would have to be pulled
        return ContainerRedis(image)
    if os.environ.get("AERIE_REQUIRE_DOCKER") == "1":
        pytest.fail(f"AERIE_REQUIRE_DOCKER=1, and docker has no image {image!r} (AERIE_TEST_REDIS_IMAGE)")
    if program := shutil.which("redis-server"):
        return LocalRedis(program)
    if os.environ.get("AERIE_REQUIRE_REDIS") == "1":
        pytest.fail("AERIE_REQUIRE_REDIS=1, and there is no redis-server")
    pytest.skip("needs redis-server, or AERIE_TEST_REDIS_URL")


def _docker_has(image: str) -> bool:
    import docker

    with suppress(docker.errors.DockerException):
        client = docker.from_env(timeout=10)
        try:
            client.images.get(image)
            return True
        finally:
            client.close()
    return False
