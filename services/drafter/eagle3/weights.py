"""Strict loading of EAGLE-3 checkpoints: every tensor consumed, every shape checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from services.drafter.eagle3.config import NO_OVERRIDES, Eagle3Spec, Overrides, Shape, read_config
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TargetInfo
from services.targets.files import check_regular, exists, one_line, read_json

# Saved by some trainers, no part of the drafter.
_TRAINING_ONLY = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})


@dataclass(frozen=True, eq=False)
class Eagle3Checkpoint:
    """A drafter on disk, read and normalised, before it meets a target.

    Attributes:
        path: Its folder.
        spec: Its normal form.
        weights: Canonical names -> arrays in the stored type.
        draft_to_target: [Vd] int32 target id of each draft id, ascending (head rows are sorted to match).
        target_fingerprint: Of the target it was made for, when the checkpoint says.
    """

    path: Path
    spec: Eagle3Spec
    weights: dict[str, mx.array]
    draft_to_target: np.ndarray[Any, np.dtype[np.int32]]
    target_fingerprint: str | None

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights.values())


def canonical_name(name: str) -> str:
    """Map the published spellings (``midlayer.``, ``model.`` prefix) to one."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def read_checkpoint(path: Path, overrides: Overrides = NO_OVERRIDES) -> Eagle3Checkpoint:
    """Read a checkpoint folder: ``config.json`` and safetensors files. Pickle files are never opened.

    Raises:
        AerieError: CHECKPOINT_NOT_FOUND, CHECKPOINT_INVALID or FAMILY_NOT_BUILT.
    """
    if not exists(path / "config.json"):
        raise AerieError(Reason.CHECKPOINT_NOT_FOUND, f"{path} has no config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
        if pickles:
            hint = f"{pickles[0].name} is a pickle and is never loaded; convert the weights to safetensors"
            raise AerieError(Reason.CHECKPOINT_INVALID, f"{path}: {hint}")
        raise AerieError(Reason.CHECKPOINT_INVALID, f"{path} has no .safetensors file")
    check_regular(files, Reason.CHECKPOINT_INVALID)
    raw = read_json(path / "config.json", Reason.CHECKPOINT_INVALID)
    made_for = _read_target_fingerprint(raw)
    tensors = _read_tensors(files)
    try:
        spec = read_config(raw, {name: tuple(t.shape) for name, t in tensors.items()}, overrides)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise AerieError(Reason.CHECKPOINT_INVALID, f"{path}/config.json: {one_line(error)}") from None
    offsets, known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for name in _TRAINING_ONLY & set(tensors):
        del tensors[name]
    _check_tensors(spec, tensors)
    draft_to_target = _vocabulary(spec, offsets, known)
    order = np.argsort(draft_to_target, kind="stable")
    if (order != np.arange(len(order))).any() and "lm_head.weight" in tensors:
        # Ascending target ids make "smaller draft id" and "smaller target id" the same tie-break.
        tensors["lm_head.weight"] = tensors["lm_head.weight"][mx.array(order)]
        draft_to_target = draft_to_target[order]
    return Eagle3Checkpoint(path, spec, tensors, draft_to_target, made_for)


def _read_target_fingerprint(raw: dict[str, Any]) -> str | None:
    ours = raw.get("aerie") or {}
    made_for = ours.get("target_fingerprint") if isinstance(ours, dict) else ours
    if not isinstance(made_for, str | None):
        raise AerieError(Reason.CHECKPOINT_INVALID, f"aerie.target_fingerprint is {made_for!r:.40}, not text")
    return made_for


def _read_tensors(files: list[Path]) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise AerieError(
                Reason.CHECKPOINT_INVALID, f"{file} is not a safetensors file: {one_line(error)}"
            ) from None
        assert isinstance(loaded, dict)
        for name, tensor in loaded.items():
            if (canonical := canonical_name(name)) in tensors:
                raise AerieError(Reason.CHECKPOINT_INVALID, f"{file} repeats {canonical}")
            tensors[canonical] = tensor
    return tensors


def expected_shapes(spec: Eagle3Spec) -> dict[str, Shape]:
    """Canonical names and shapes of every tensor that the spec asks for (``d2t`` apart)."""
    h, ht, width = spec.hidden_size, spec.target_hidden_size, spec.tap_count * spec.target_hidden_size
    q, kv, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size
    shapes: dict[str, Shape] = {"fc.weight": (h, width), "norm.weight": (h,)}
    if spec.fc_bias:
        shapes["fc.bias"] = (h,)
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (width,)
    if spec.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (ht,) for i in range(spec.tap_count)}
    if spec.own_embedding:
        shapes["embed_tokens.weight"] = (spec.target_vocab_size, h)
    if spec.head == "own":
        shapes["lm_head.weight"] = (spec.draft_vocab_size, h)
    for layer in range(spec.layers):
        prefix, fan_in = f"layers.{layer}.", 2 * h if layer == 0 else h
        linear = {
            "self_attn.q_proj": (q, fan_in),
            "self_attn.k_proj": (kv, fan_in),
            "self_attn.v_proj": (kv, fan_in),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }
        for name, shape in linear.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if spec.attention_bias if "attn" in name else spec.mlp_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if layer == 0 else [])]
        shapes |= {f"{prefix}{name}.weight": (h,) for name in norms}
        if spec.qk_norm:
            shapes |= {f"{prefix}self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _check_tensors(spec: Eagle3Spec, tensors: dict[str, mx.array]) -> None:
    expected = expected_shapes(spec)
    # Qwen-style attention has biases on q, k and v alone, and configs do not say so.
    optional = {n for n in expected if n.endswith("o_proj.bias")}
    missing = [name for name in expected if name not in {*tensors, *optional}]
    unused = [name for name in tensors if name not in expected]
    problems = [f"lacks {name} {list(expected[name])}" for name in missing]
    problems += [f"has {name} {list(tensors[name].shape)}, which nothing uses" for name in unused]
    problems += [
        f"{name} is {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        more = f" (+{len(problems) - 5} more)" if len(problems) > 5 else ""
        raise AerieError(Reason.CHECKPOINT_INVALID, f"the checkpoint {'; '.join(problems[:5])}{more}")
    for name, tensor in tensors.items():
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise AerieError(Reason.CHECKPOINT_INVALID, f"{name} is {tensor.dtype}, not floating point")
    finite = {name: mx.isfinite(tensor).all() for name, tensor in tensors.items()}
    mx.eval(finite)
    if broken := sorted(name for name, good in finite.items() if not good.item()):
        raise AerieError(Reason.CHECKPOINT_INVALID, f"{', '.join(broken[:5])}: NaN or infinite values")


def _vocabulary(
    spec: Eagle3Spec, offsets: mx.array | None, known: mx.array | None
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """``d2t`` holds offsets: target id = draft id + d2t[draft id]. ``t2d`` [V], if given, says the same as a mask."""
    size, vocab = spec.draft_vocab_size, spec.target_vocab_size
    if offsets is None:
        if size != vocab:
            raise AerieError(Reason.CHECKPOINT_INVALID, f"d2t is missing for a draft vocabulary of {size} of {vocab}")
        return np.arange(size, dtype=np.int32)
    if tuple(offsets.shape) != (size,):
        raise AerieError(Reason.CHECKPOINT_INVALID, f"d2t is {list(offsets.shape)}, not [{size}]")
    if not mx.issubdtype(offsets.dtype, mx.integer):
        raise AerieError(Reason.CHECKPOINT_INVALID, f"d2t is {offsets.dtype}, not integers")
    ids = np.arange(size, dtype=np.int64) + np.array(offsets, np.int64)
    if (ids < 0).any() or (ids >= vocab).any():
        raise AerieError(Reason.CHECKPOINT_INVALID, "d2t points outside the target vocabulary (is it absolute ids?)")
    if len(np.unique(ids)) != size:
        raise AerieError(Reason.CHECKPOINT_INVALID, "d2t maps two draft tokens to one target token")
    if known is not None and size != vocab and not np.array_equal(np.flatnonzero(np.array(known)), np.sort(ids)):
        # A d2t that a trainer never filled is all zeros, and drafts nothing but the first words.
        raise AerieError(Reason.CHECKPOINT_INVALID, "d2t and t2d name different target tokens")
    return ids.astype(np.int32)


def check_fit(checkpoint: Eagle3Checkpoint, target: TargetInfo) -> Eagle3Spec:
    """The spec with its taps resolved against a target.

    Raises:
        AerieError: CHECKPOINT_INCOMPATIBLE with every reason that it does not fit.
    """
    spec = checkpoint.spec
    problems = []
    if spec.target_hidden_size != target.hidden_size:
        problems.append(f"taps are {spec.target_hidden_size} wide, the target {target.hidden_size}")
    if spec.target_vocab_size != target.vocab_size:
        problems.append(f"vocabulary of {spec.target_vocab_size}, the target has {target.vocab_size}")
    made_for = checkpoint.target_fingerprint
    if made_for and made_for != target.weights_fingerprint:
        problems.append(f"made for target {made_for[:12]}, this one is {target.weights_fingerprint[:12]}")
    try:
        spec = spec.resolve_taps(target.layers)
    except AerieError as error:
        problems.append(error.message)
    if problems:
        raise AerieError(Reason.CHECKPOINT_INCOMPATIBLE, f"{checkpoint.path} does not fit: {'; '.join(problems)}")
    return spec
