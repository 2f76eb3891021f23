"""Shared fixtures. Importing services first puts a fast BLAS in place before MLX loads."""

from collections.abc import Iterator

import pytest

import services as services
from services.bench.drafters import RandomDrafter, RootDrafter
from services.embedded import Engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """SmolLM2 with its EAGLE-3 drafter and the two test drafters, in this process."""
    with Engine.load("smollm2", "eagle3") as loaded:
        loaded.add_drafter(RandomDrafter(loaded.info.vocab_size))
        loaded.add_drafter(RootDrafter(loaded.info.vocab_size))
        yield loaded
