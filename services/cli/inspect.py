"""``aerie inspect``: what a drafter checkpoint is, whether it fits a target, and why not."""

import argparse
from pathlib import Path

from services.cli.options import overrides, usable_path
from services.cli.report import UsageError, printable
from services.drafter.eagle3.config import Eagle3Spec
from services.drafter.eagle3.weights import Eagle3Checkpoint, check_fit, read_checkpoint
from services.drafter.loader import CHECKPOINTS, FAMILIES, NOT_BUILT, shipped_checkpoint
from services.runtime.device import device_thread
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TargetInfo
from services.targets.loader import load_target


def inspect(options: argparse.Namespace) -> int:
    """Describe a checkpoint. Exit code 1 when it does not load or does not fit."""
    if "" in (options.checkpoint, options.target):
        raise UsageError("checkpoint and --target must not be empty")
    device = device_thread()
    # The target first: a report that ends in an error is none.
    info = device.submit(lambda: load_target(options.target).info).result() if options.target else None
    path = _find(options.checkpoint, info)
    checkpoint = device.submit(lambda: read_checkpoint(path, overrides(options))).result()
    _describe(checkpoint)
    if info is None:
        return 0
    try:
        spec = check_fit(checkpoint, info)
    except AerieError as error:
        print(f"fits {options.target}: no\n  {printable(error.message)}")
        return 1
    print(f"fits {options.target}: yes, taps {spec.taps} of {info.layers} layers")
    return 0


def _find(name: str, info: TargetInfo | None) -> Path:
    """A folder, or the shipped checkpoint of a family: the target's, or the first."""
    if name in FAMILIES:
        shipped = sorted(CHECKPOINTS.glob(f"*/{name}"))
        if path := (info and shipped_checkpoint(name, info)) or next(iter(shipped), None):
            return path
        raise AerieError(Reason.DRAFTER_UNAVAILABLE, f"no {name} drafter is shipped")
    path = usable_path("checkpoint", name)
    if name.lower() in NOT_BUILT and not path.exists():
        raise AerieError(
            Reason.FAMILY_NOT_BUILT, f"the drafter family {name} is not built; built: {', '.join(FAMILIES)}"
        )
    if not path.is_dir():
        raise AerieError(Reason.CHECKPOINT_NOT_FOUND, f"no such folder: {name}")
    return path


def _describe(checkpoint: Eagle3Checkpoint) -> None:
    spec = checkpoint.spec
    megabytes = sum(w.nbytes for w in checkpoint.weights.values()) / 1e6
    rows = {
        "family": "eagle3",
        "parameters": f"{checkpoint.parameters / 1e6:.1f} M in {len(checkpoint.weights)} tensors, {megabytes:.1f} MB",
        "width": f"{spec.hidden_size}, target {spec.target_hidden_size}",
        "layers": str(spec.layers),
        "attention": f"{spec.heads} heads, {spec.kv_heads} KV heads of {spec.head_dim}",
        "qk-norm": "yes" if spec.qk_norm else "no",
        "vocabulary": f"{spec.draft_vocab_size} of {spec.target_vocab_size}",
        "taps": _taps(spec),
        "rope": f"base {spec.rope_theta:g}, scaling {spec.rope_scaling or 'none'}",
        "embedding": "own" if spec.own_embedding else "the target's",
        "head": {"own": "own", "embedding": "its embedding", "target": "the target's"}[spec.head],
        "residual": "normalised hidden state" if spec.norm_before_residual else "raw hidden state",
        "recycles": "post-norm states" if spec.recycle_post_norm else "pre-norm states",
        "before fc": "one norm over all taps"
        if spec.norm_before_fc
        else "a norm for each tap"
        if spec.fc_norm
        else "nothing",
        "made for": checkpoint.target_fingerprint or "not said",
        "unknown keys": ", ".join(spec.unknown) or "none",
    }
    print(printable(str(checkpoint.path)))
    for name, value in rows.items():
        print(f"  {name:13} {printable(value)}")
    for decision in spec.decisions:
        print(f"  decided       {printable(decision)}")


def _taps(spec: Eagle3Spec) -> str:
    return f"boundaries {spec.taps}" if spec.taps else f"{spec.tap_count}, the target's default"
