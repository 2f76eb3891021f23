"""Services as processes of their own, for tests: started, watched, killed, and gone at the end."""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_SECONDS = 60.0


class Service:
    """One ``aerie serve`` process.

    Attributes:
        address: Where its gRPC port listens.
        http: Where its HTTP port listens, if it has one.
    """

    def __init__(self, folder: Path, name: str, *arguments: str, **environment: str) -> None:
        self.name = name
        self.address, self.http = "", ""
        self.log = folder / f"{name}.log"
        self._errors = self.log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "AERIE_CACHE": str(folder / "cache"), **environment},
        )

    def wait_ready(self, http: bool = False) -> "Service":
        """Until it has said where it listens."""
        deadline = time.monotonic() + START_SECONDS
        out = self.process.stdout
        assert out
        said = b""
        while not self.address or (http and not self.http):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0] or not (part := os.read(out.fileno(), 4096)):
                raise AssertionError(f"{self.name} did not start: {self.log.read_text()}")
            said += part
            for line in said.decode().splitlines():
                kind, _, address = line.partition(": ")
                if kind == "http":
                    self.http = address
                else:
                    self.address = address
        return self

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Signal it and wait; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self._errors.close()


class Services:
    """Use as a context manager: a folder for sockets and logs, and every process that was started.

    Args:
        target, drafter: What verifiers and drafters load.

    Attributes:
        started: In their order.
    """

    def __init__(self, target: str, drafter: str) -> None:
        # Short, whatever the test is called: a unix socket's path has 104 bytes on macOS.
        self.folder = Path(tempfile.mkdtemp(prefix="aerie-"))
        self._target, self._drafter = target, drafter
        self.started: list[Service] = []

    def __enter__(self) -> "Services":
        return self

    def __exit__(self, *_: object) -> None:
        for service in self.started:
            service.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def socket(self, name: str) -> str:
        return f"unix:{self.folder / name}"

    def start(self, name: str, kind: str, *arguments: str, **environment: str) -> Service:
        """Start a service that listens at ``socket(name)``; it is not waited for."""
        service = Service(self.folder, name, kind, "--listen", self.socket(name), *arguments, **environment)
        self.started.append(service)
        return service

    def verifier(self, *arguments: str, name: str = "v") -> Service:
        return self.start(name, "verifier", "--target", self._target, *arguments)

    def drafter(self, *arguments: str, name: str = "d", verifier: str = "v") -> Service:
        where = ("--verifier", self.socket(verifier)) if verifier else ()
        return self.start(name, "drafter", *where, "--drafter", self._drafter, *arguments)

    def orchestrator(
        self, *arguments: str, name: str = "o", verifier: str = "v", drafters: tuple[str, ...] = ("d",)
    ) -> Service:
        found = ["--verifier", self.socket(verifier)] if verifier else []
        if drafters:
            found += ["--drafter", *(self.socket(drafter) for drafter in drafters)]
        return self.start(name, "orchestrator", *found, *arguments)
