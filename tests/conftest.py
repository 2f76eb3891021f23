"""Shared fixtures. Importing services first puts a fast BLAS in place before MLX loads."""

from collections.abc import Iterator

import pytest

import services as services
from services.bench.drafters import RandomDrafter, RootDrafter
from services.embedded import Engine
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design, draw_weights
from tests.tiny import VOCAB_SIZE, write_tiny_llama


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """SmolLM2 with its EAGLE-3 drafter and the two test drafters, in this process."""
    with Engine.load("smollm2", "eagle3") as loaded:
        loaded.add_drafter(RandomDrafter(loaded.info.vocab_size))
        loaded.add_drafter(RootDrafter(loaded.info.vocab_size))
        yield loaded


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a chat template, for which no drafter ships."""
    return str(write_tiny_llama(tmp_path_factory.mktemp("targets") / "tiny"))


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random EAGLE-3 checkpoint that fits the tiny targets."""
    design = Design(hidden=32, target_hidden=32, vocab=VOCAB_SIZE, draft_vocab=VOCAB_SIZE, taps=(2, 3, 5))
    folder = tmp_path_factory.mktemp("drafters") / "sketch"
    tensors = checkpoints.tensors_of(draw_weights(design))
    tensors["lm_head.weight"] *= 30  # sure of itself: its trees have branches
    return str(checkpoints.write(folder, checkpoints.nvidia(design), tensors))
