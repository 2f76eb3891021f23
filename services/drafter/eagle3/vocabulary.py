"""Cut a drafter's vocabulary to its most frequent tokens: a smaller head, faster drafts, smaller files."""

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def cut_vocabulary(
    tensors: Mapping[str, mx.array], counts: NDArray[np.int64], size: int
) -> tuple[dict[str, mx.array], float]:
    """Keep the ``size`` draft tokens that occur most often.

    Args:
        tensors: Of a checkpoint with ``d2t`` [Vd] offsets and its own ``lm_head.weight`` [Vd, H].
        counts: [V] occurrences of each target token in text that the target wrote.
        size: Draft tokens to keep; ties keep the smaller id.

    Returns:
        The tensors with a smaller head, ``d2t`` and ``t2d``, and the share of all occurrences that is covered.
    """
    offsets = np.array(tensors["d2t"], np.int64)
    target_ids = np.arange(len(offsets)) + offsets
    frequency = counts[target_ids]
    kept = np.sort(np.lexsort((target_ids, -frequency))[:size])
    kept = kept[np.argsort(target_ids[kept], kind="stable")]
    known = np.zeros(len(counts), np.bool_)
    known[target_ids[kept]] = True
    cut = {
        **tensors,
        "lm_head.weight": tensors["lm_head.weight"][mx.array(kept)],
        "d2t": mx.array(target_ids[kept] - np.arange(size)),
        "t2d": mx.array(known),
    }
    return cut, float(counts[known].sum() / counts.sum())
