"""Find and load a drafter for a target: a shipped one, or a checkpoint folder."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from services.drafter.eagle3.config import NO_OVERRIDES, Overrides
from services.drafter.eagle3.model import Eagle3Drafter
from services.drafter.eagle3.weights import check_fit, read_checkpoint
from services.drafter.family import TraceableDraftModel
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TargetInfo
from services.targets.files import exists, expand_path, one_line, read_json

log = logging.getLogger(__name__)

CHECKPOINTS = Path(__file__).parent / "checkpoints"
Shared = Callable[[str], mx.array]
"""Gives the target's tensors by name."""


def _load_eagle3(path: Path, target: TargetInfo, shared: Shared, overrides: Overrides) -> TraceableDraftModel:
    checkpoint = read_checkpoint(path, overrides)
    if unknown := checkpoint.spec.unknown:
        log.warning("%s: config.json has keys that nothing reads: %s", path, ", ".join(unknown))
    return Eagle3Drafter(checkpoint, check_fit(checkpoint, target), shared, name=path.name)


FAMILIES: dict[str, Callable[[Path, TargetInfo, Shared, Overrides], TraceableDraftModel]] = {"eagle3": _load_eagle3}
"""The families that are built, and what loads a folder of each."""
NOT_BUILT = ("eagle", "eagle1", "eagle2", "hass", "medusa", "mtp", "pard", "peagle", "dflash", "lookahead", "ngram")
"""Names of families that people ask for."""


def shipped_checkpoint(family: str, target: TargetInfo) -> Path | None:
    """The shipped checkpoint of a family that was made for these weights, or None.

    Raises:
        AerieError: CHECKPOINT_INVALID when a shipped config cannot be read.
    """
    for config in sorted(CHECKPOINTS.glob(f"*/{family}/config.json")):
        ours = read_json(config, Reason.CHECKPOINT_INVALID).get("aerie")
        if isinstance(ours, dict) and ours.get("target_fingerprint") == target.weights_fingerprint:
            return config.parent
    return None


def load_drafter(
    path: Path, target: TargetInfo, shared: Shared, overrides: Overrides = NO_OVERRIDES
) -> TraceableDraftModel:
    """Load a checkpoint folder of any family. Call on the device thread.

    Args:
        path: The folder. Its config's ``aerie.family`` names the family; without it the family is EAGLE-3.
        target: What it has to fit.
        shared: Gives the target's tensors by name.
        overrides: Forced readings of ambiguous configs.

    Raises:
        AerieError: CHECKPOINT_* or FAMILY_NOT_BUILT.
    """
    if os.path.isfile(path):
        raise AerieError(Reason.CHECKPOINT_NOT_FOUND, f"{path} is a file; a drafter is a folder with config.json")
    if not os.path.isdir(path):
        known = f"a drafter is auto, off, {_built()} or a folder"
        raise AerieError(Reason.CHECKPOINT_NOT_FOUND, f"no such folder: {one_line(path, 100)} ({known})")
    return FAMILIES[_family_of(path)](path, target, shared, overrides)


def _family_of(path: Path) -> str:
    config = path / "config.json"
    ours = read_json(config, Reason.CHECKPOINT_INVALID).get("aerie") if exists(config) else None
    family = ours.get("family", "eagle3") if isinstance(ours, dict) else "eagle3"
    if not isinstance(family, str) or family not in FAMILIES:
        raise AerieError(Reason.FAMILY_NOT_BUILT, f"{path} is of the family {family!r:.40}; built: {_built()}")
    return family


def choose_checkpoint(wanted: str, target: TargetInfo) -> Path | None:
    """What ``--drafter`` names: ``off``, ``auto``, a family, or a folder. None decodes plainly.

    Raises:
        AerieError: DRAFTER_UNAVAILABLE when a family has no shipped drafter for the target, FAMILY_NOT_BUILT for a
            family that is none of ours.
    """
    if wanted == "off":
        return None
    if wanted == "auto":
        return _best_shipped(target)
    if wanted in FAMILIES:
        if path := shipped_checkpoint(wanted, target):
            return path
        raise AerieError(Reason.DRAFTER_UNAVAILABLE, f"no {wanted} drafter is shipped for {target.name}")
    if wanted.lower() in NOT_BUILT and not exists(Path(wanted)):
        raise AerieError(Reason.FAMILY_NOT_BUILT, f"the drafter family {wanted} is not built; built: {_built()}")
    return expand_path(wanted)


def load_chosen(
    wanted: str, target: TargetInfo, shared: Shared, overrides: Overrides = NO_OVERRIDES
) -> TraceableDraftModel | None:
    """Choose a checkpoint and load it. Call on the device thread.

    Under ``auto`` a drafter that does not load is a warning, and None: plain decoding.

    Raises:
        AerieError: As ``choose_checkpoint`` and ``load_drafter``, for a drafter that was asked for by name.
    """
    path = choose_checkpoint(wanted, target)
    try:
        return load_drafter(path, target, shared, overrides) if path else None
    except AerieError as error:
        if wanted != "auto":
            raise
        log.warning("decoding plainly: the shipped drafter does not load: %s", error)
        return None


def _best_shipped(target: TargetInfo) -> Path | None:
    for family in FAMILIES:
        try:
            if path := shipped_checkpoint(family, target):
                return path
        except AerieError as error:
            log.warning("a shipped drafter is passed over: %s", error)
    return None


def _built() -> str:
    return ", ".join(FAMILIES)
