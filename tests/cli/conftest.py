"""The command in this process, on tiny checkpoints."""

import io
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from services.cli.main import main
from tests.tiny import write_tiny_llama


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same target without a chat template."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("targets") / "bare")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return str(folder)


@pytest.fixture
def aerie(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Run ``aerie ARGUMENTS...`` with ``stdin`` bytes; what the command sets for its process is put back."""
    handler = signal.getsignal(signal.SIGINT)
    loggers = {name: list(logging.getLogger(name).handlers) for name in (None, "services")}

    def run(*arguments: str, stdin: bytes = b"") -> Run:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        code = main(arguments)
        return Run(code, *capsys.readouterr())

    with warnings.catch_warnings():
        yield run
    signal.signal(signal.SIGINT, handler)
    for name, handlers in loggers.items():
        logging.getLogger(name).handlers = handlers


def one_line(run: Run) -> str:
    """The message of a run that printed one line and nothing else."""
    assert run.out == ""
    assert run.err.startswith("aerie: ")
    assert run.err.count("\n") == 1
    return run.err.removeprefix("aerie: ").strip()
