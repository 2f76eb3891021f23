"""Find and load a drafter for a target: a shipped one, or a checkpoint folder."""

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from services.drafter.eagle3.config import NO_OVERRIDES, Overrides
from services.drafter.eagle3.model import Eagle3Drafter
from services.drafter.eagle3.weights import check_fit, read_checkpoint
from services.drafter.family import TraceableDraftModel
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TargetInfo

CHECKPOINTS = Path(__file__).parent / "checkpoints"
FAMILIES = ("eagle3",)


def shipped_checkpoint(family: str, target: TargetInfo) -> Path | None:
    """The shipped checkpoint of a family that was made for these weights, or None."""
    for config in sorted(CHECKPOINTS.glob(f"*/{family}/config.json")):
        made_for = json.loads(config.read_text()).get("aerie", {}).get("target_fingerprint")
        if made_for == target.weights_fingerprint:
            return config.parent
    return None


def load_drafter(
    path: Path, target: TargetInfo, shared: Callable[[str], mx.array], overrides: Overrides = NO_OVERRIDES
) -> TraceableDraftModel:
    """Load a checkpoint folder. Call on the device thread.

    Args:
        path: The folder.
        target: What it has to fit.
        shared: Gives the target's tensors by name.
        overrides: Forced readings of ambiguous configs.

    Raises:
        AerieError: CHECKPOINT_* or FAMILY_NOT_BUILT.
    """
    if not path.is_dir():
        raise AerieError(Reason.CHECKPOINT_NOT_FOUND, f"no such folder: {path}")
    checkpoint = read_checkpoint(path, overrides)
    return Eagle3Drafter(checkpoint, check_fit(checkpoint, target), shared, name=path.name)


def choose_checkpoint(wanted: str, target: TargetInfo) -> Path | None:
    """What ``--drafter`` names: ``off``, ``auto``, a family, or a folder. None decodes plainly.

    Raises:
        AerieError: DRAFTER_UNAVAILABLE when a family has no shipped drafter for the target.
    """
    if wanted == "off":
        return None
    if wanted == "auto":
        found = (shipped_checkpoint(family, target) for family in FAMILIES)
        return next((path for path in found if path), None)
    if wanted in FAMILIES:
        if path := shipped_checkpoint(wanted, target):
            return path
        raise AerieError(Reason.DRAFTER_UNAVAILABLE, f"no {wanted} drafter is shipped for {target.name}")
    return Path(wanted).expanduser()
