from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
import pytest

from services.runtime.device import device_thread
from services.targets.loader import load_target
from services.targets.target import Target
from tests.compiled import compile_target
from tests.tiny import load_plain, write_tiny_gemma3, write_tiny_llama


@dataclass
class Tiny:
    """One tiny checkpoint on the device thread, and again as mlx-lm's own model on the test's."""

    target: Target
    plain: nn.Module


def load_both(folder: Path) -> Tiny:
    return Tiny(device_thread().submit(lambda: load_target(str(folder))).result(), load_plain(folder))


@pytest.fixture(scope="session", params=["ragged", "compiled"])
def tiny(request, tmp_path_factory) -> Tiny:
    """As a CPU runs it, and as a GPU does."""
    both = load_both(write_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=3))
    if request.param == "compiled":
        both.target = device_thread().submit(lambda: compile_target(both.target)).result()
    return both


@pytest.fixture(scope="session")
def sliding(tmp_path_factory) -> Tiny:
    """Gemma 3 with a window of 16 in every other layer."""
    shape = {"num_hidden_layers": 4, "sliding_window_pattern": 2}
    return load_both(write_tiny_gemma3(tmp_path_factory.mktemp("gemma3"), **shape))


@pytest.fixture(scope="session")
def short(tmp_path_factory) -> Tiny:
    """A context of 48 positions."""
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 48}
    return load_both(write_tiny_llama(tmp_path_factory.mktemp("short"), **shape))
