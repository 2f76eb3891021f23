"""A tiny target with the two drafters that a test of losslessness wants."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.bench.drafters import RandomDrafter, RootDrafter
from services.embedded import Engine
from tests.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny(folder: Path) -> Iterator[Engine]:
    with Engine.load(str(folder), "off") as engine:
        engine.add_drafter(RandomDrafter(engine.info.vocab_size))
        engine.add_drafter(RootDrafter(engine.info.vocab_size))
        yield engine
