"""Which drafter serves a session, and how large its trees may be."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from services.orchestrator.directory import Directory, Offer
from services.speculation.errors import AerieError, Reason, check_integers
from services.speculation.growth import Budget
from services.speculation.messages import TargetInfo

# Presets until the cost model of a later version: on the CPU every row of a tree costs, and the stop rule drops
# nodes that would cost more to verify than they bring; on a GPU a small target's forward costs little more for 64
# rows than for 1, and a depth 0.05 ms (H200, a drafter of one plain layer: docs/results/first-flight.md).
PRESETS = {
    "cpu": Budget(max_nodes=12, max_depth=6, top_k=3, min_log_prob=math.log(0.15)),
    "gpu": Budget(max_nodes=64, max_depth=8, top_k=10),
}


@dataclass(frozen=True)
class TreeOptions:
    """A user's overrides of the preset; None keeps it."""

    nodes: int | None = None
    depth: int | None = None
    top_k: int | None = None

    def budget(self, target: TargetInfo) -> Budget:
        """The preset of the target's device with these overrides.

        Raises:
            AerieError: INVALID_ARGUMENT outside 1..max_tree_nodes, depth below 0 or top_k below 1.
        """
        given = {"nodes": self.nodes, "depth": self.depth, "top_k": self.top_k}
        check_integers(**{f"tree {name}": value for name, value in given.items() if value is not None})
        if self.nodes is not None and not 1 <= self.nodes <= target.max_tree_nodes:
            raise AerieError(Reason.INVALID_ARGUMENT, f"tree nodes must be 1..{target.max_tree_nodes}")
        if self.depth is not None and self.depth < 0:
            raise AerieError(Reason.INVALID_ARGUMENT, "tree depth must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise AerieError(Reason.INVALID_ARGUMENT, "tree top_k must be 1 or more")
        fields = {"max_nodes": self.nodes, "max_depth": self.depth, "top_k": self.top_k}
        return replace(PRESETS[target.device], **{name: value for name, value in fields.items() if value is not None})


def pick_drafter(directory: Directory, wanted: str, without: Collection[Offer] = ()) -> Offer | None:
    """The drafter for a session: ``auto``, ``off``, a family, a drafter's name or an instance's.

    Of the instances of one drafter it is the one with the fewest sessions.

    Args:
        directory: Who serves.
        wanted: What the request asks for.
        without: Those that are not considered.

    Raises:
        AerieError: DRAFTER_UNAVAILABLE when one is asked for by name or family and none serves.
    """
    if wanted == "off":
        return None
    offers = [offer for offer in directory.offers.values() if offer not in without]
    fitting = [o for o in offers if wanted in ("auto", o.name, o.info.name, o.info.family)]
    if fitting:
        return min(fitting, key=lambda offer: (offer.info.name, offer.load, offer.name))
    if wanted == "auto":
        return None
    there = ", ".join(sorted({offer.info.name for offer in offers})) or "none"
    raise AerieError(Reason.DRAFTER_UNAVAILABLE, f"no drafter {wanted!r} serves this target (there: {there})")
