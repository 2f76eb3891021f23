from dataclasses import dataclass

import mlx.nn as nn
import pytest
from tokenizers import Tokenizer

from services.targets.compiled import CompiledForward
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


def compile_target(target: Target) -> Target:
    """The same model, run as on a GPU: single trees in one compiled forward of fixed shapes."""
    compiled = CompiledForward(target.model, target._recorder)
    return Target(target.model, target._recorder, target.info, target.tokenizer, compiled)


@pytest.fixture(scope="session", params=[*WRITERS, *(f"compiled {name}" for name in WRITERS)])
def family(request, tmp_path_factory) -> Family:
    shape = {"num_hidden_layers": 4, "sliding_window_pattern": 2}  # the pattern is Gemma's: half of the layers slide
    name = request.param.removeprefix("compiled ")
    folder = WRITERS[name](tmp_path_factory.mktemp(name), **shape)
    target = load_target(str(folder))
    return Family(name, target if name == request.param else compile_target(target), load_plain(folder))


@pytest.fixture(scope="session")
def smollm2() -> Target:
    return load_target()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Target) -> Tokenizer:
    return Tokenizer.from_str(smollm2.tokenizer.tokenizer_json)
