"""The load-time gate: a small tree must give what plain decoding gives along each of its paths."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from services.speculation.errors import AerieError, Reason
from services.speculation.trees import path_to
from services.targets.files import one_line
from services.targets.kv_rows import KVRows
from services.targets.ragged import SessionRows
from services.targets.target import Target

_PARENTS = np.array([-1, 0, 1, 0, 3, 3], np.int32)
_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class PlainPaths:
    """Logits [6, V] of plain decoding at each node of the check tree, by mlx-lm's own caches (their class names)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: mx.array
    caches: tuple[str, ...]


def decode_plainly(model: nn.Module, vocab_size: int) -> PlainPaths:
    """Run the check's paths one token at a time. Call it before the seams are installed."""
    spread = [int(i * vocab_size / 17) % vocab_size for i in range(1, 17)]
    prompt, tokens = tuple(spread[:10]), tuple(spread[10:])
    rows: dict[int, mx.array] = {}
    for leaf in (2, 4, 5):
        cache = make_prompt_cache(model)
        model(mx.array(prompt)[None], cache=cache)
        for node in path_to(_PARENTS, leaf):
            rows[node] = model(mx.array([[tokens[node]]]), cache=cache)[0, -1]
            mx.eval(rows[node])
    caches = tuple(sorted({type(layer).__name__ for layer in cache}))
    return PlainPaths(prompt, tokens, mx.stack([rows[node] for node in range(len(tokens))]), caches)


def check_tree_exact(target: Target, plain: PlainPaths) -> float:
    """Compare a 6-node tree, alone and beside another session, with plain decoding.

    Returns:
        The largest difference, relative to the largest magnitude in its row.

    Raises:
        AerieError: TARGET_NOT_TREE_EXACT when it exceeds 1e-3 (float32) or 5e-2 (half precision, quantised).
    """
    tolerance = _TOLERANCE[target.info.feature_dtype]
    try:
        error = max(_tree_error(target, plain, beside) for beside in (False, True))
    except AerieError:
        raise
    except Exception as failure:
        raise AerieError(
            Reason.TARGET_NOT_TREE_EXACT,
            f"{target.info.name} cannot verify trees: its layers keep {', '.join(plain.caches)}, and its forward "
            f"over tree rows failed ({type(failure).__name__}: {one_line(failure)})",
        ) from failure
    if not error <= tolerance:
        raise AerieError(
            Reason.TARGET_NOT_TREE_EXACT,
            f"{target.info.name}: a tree differs from plain decoding by {error:.1e} relative (limit {tolerance:.0e})",
        )
    return error


def _tree_error(target: Target, plain: PlainPaths, beside: bool) -> float:
    def prefilled(tokens: tuple[int, ...]) -> KVRows:
        kv = target.new_kv()
        target.forward([SessionRows.chunk(kv, tokens, "none")])
        mx.eval(kv.arrays())
        kv.commit(range(len(tokens)))
        return kv

    batch = [SessionRows(prefilled(plain.prompt), np.array(plain.tokens, np.int32), _PARENTS)]
    if beside:
        batch.insert(
            0, SessionRows(prefilled(plain.prompt[::-1][:7]), np.array(plain.tokens[:3], np.int32), _PARENTS[:3])
        )
    logits = target.forward(batch).logits
    assert logits is not None
    difference = mx.abs(logits[-len(plain.tokens) :] - plain.logits).max(-1) / mx.abs(plain.logits).max(-1)
    return float(difference.max())
