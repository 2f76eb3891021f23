from dataclasses import dataclass

import mlx.nn as nn
import pytest
from tokenizers import Tokenizer

from services.targets.loader import load_target
from services.targets.target import Target
from tests.tiny import load_plain, write_tiny_gemma3, write_tiny_llama, write_tiny_qwen3

WRITERS = {"llama": write_tiny_llama, "qwen3": write_tiny_qwen3, "gemma3": write_tiny_gemma3}


@dataclass
class Family:
    """One tiny checkpoint behind our seams, and again as mlx-lm's own, untouched model."""

    name: str
    target: Target
    plain: nn.Module


@pytest.fixture(scope="session", params=WRITERS)
def family(request, tmp_path_factory) -> Family:
    shape = {"num_hidden_layers": 4, "sliding_window_pattern": 2}  # the pattern is Gemma's: half of the layers slide
    folder = WRITERS[request.param](tmp_path_factory.mktemp(request.param), **shape)
    plain = load_plain(folder)
    return Family(request.param, load_target(str(folder)), plain)


@pytest.fixture(scope="session")
def smollm2() -> Target:
    return load_target()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Target) -> Tokenizer:
    return Tokenizer.from_str(smollm2.tokenizer.tokenizer_json)
