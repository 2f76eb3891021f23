"""Targets run as on a GPU: single trees in one compiled forward of fixed shapes. The CPU runs it all the same."""

from pathlib import Path

from services.targets import cuda, seams
from services.targets.compiled import CompiledForward
from services.targets.loader import load_checkpoint
from services.targets.target import Target


def compile_target(target: Target) -> Target:
    """The same model behind the compiled forward."""
    compiled = CompiledForward(target.model, target._recorder)
    return Target(target.model, target._recorder, target.info, target.tokenizer, compiled)


def fuse_target(target: Target, folder: Path) -> Target:
    """As on CUDA: its decoder layers in few launches, here by their plain MLX references."""
    model = load_checkpoint(str(folder)).model
    assert cuda.swap_blocks(model) == len(model.layers)
    recorder = seams.install(model, seams.RowRope)
    return Target(model, recorder, target.info, target.tokenizer, CompiledForward(model, recorder))
