from dataclasses import dataclass

import mlx.nn as nn
import pytest
from tokenizers import Tokenizer

from services.targets.loader import load_target
from services.targets.target import Target
from tests.compiled import compile_target, fuse_target
from tests.tiny import load_plain, write_tiny_gemma3, write_tiny_llama, write_tiny_qwen3

WRITERS = {"llama": write_tiny_llama, "qwen3": write_tiny_qwen3, "gemma3": write_tiny_gemma3}


@dataclass
class Family:
    """One tiny checkpoint behind our seams, and again as mlx-lm's own, untouched model."""

    name: str
    target: Target
    plain: nn.Module


@pytest.fixture(scope="session", params=[*WRITERS, *(f"compiled {name}" for name in WRITERS), "fused llama"])
def family(request, tmp_path_factory) -> Family:
    shape = {"num_hidden_layers": 4, "sliding_window_pattern": 2}  # the pattern is Gemma's: half of the layers slide
    name = request.param.split()[-1]
    folder = WRITERS[name](tmp_path_factory.mktemp(name), **shape)
    target = load_target(str(folder))
    if request.param.startswith("compiled"):
        target = compile_target(target)
    if request.param.startswith("fused"):
        target = fuse_target(target, folder)
    return Family(name, target, load_plain(folder))


@pytest.fixture(scope="session")
def smollm2() -> Target:
    return load_target()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Target) -> Tokenizer:
    return Tokenizer.from_str(smollm2.tokenizer.tokenizer_json)
