"""A tiny target with a drafter of random trees, served; and waiting for what happens elsewhere."""

import time
from collections.abc import Callable, Iterator

import pytest

from services.bench.drafters import RandomDrafter
from services.runtime.device import device_thread
from services.targets.loader import load_target
from services.targets.target import Target
from tests.served import Served
from tests.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_tiny_llama(tmp_path_factory.mktemp("target"))
    return device_thread().submit(lambda: load_target(str(folder))).result()


@pytest.fixture(scope="session")
def served(target: Target) -> Iterator[Served]:
    with Served(target, RandomDrafter(target.info.vocab_size)) as served:
        yield served


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
