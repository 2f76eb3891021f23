from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.bench.drafters import RandomDrafter
from services.embedded import Engine
from tests.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture
def load_tiny(tiny_folder: Path) -> Iterator[Callable[[], Engine]]:
    """Loads engines of a tiny target with the random drafter, and closes them."""
    engines = []

    def load() -> Engine:
        engine = Engine.load(str(tiny_folder), "off")
        engines.append(engine)
        engine.add_drafter(RandomDrafter(engine.info.vocab_size))
        return engine

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture
def tiny_engine(load_tiny: Callable[[], Engine]) -> Engine:
    return load_tiny()
