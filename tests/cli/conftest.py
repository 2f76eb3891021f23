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
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design, draw_weights
from tests.tiny import VOCAB_SIZE, write_tiny_llama


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a chat template, for which no drafter ships."""
    return str(write_tiny_llama(tmp_path_factory.mktemp("targets") / "tiny"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same target without a chat template."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("targets") / "bare")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return str(folder)


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random EAGLE-3 checkpoint that fits the tiny targets."""
    design = Design(hidden=32, target_hidden=32, vocab=VOCAB_SIZE, draft_vocab=VOCAB_SIZE, taps=(2, 3, 5))
    folder = tmp_path_factory.mktemp("drafters") / "sketch"
    tensors = checkpoints.tensors_of(draw_weights(design))
    return str(checkpoints.write(folder, checkpoints.nvidia(design), tensors))


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
