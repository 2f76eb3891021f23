"""Values that several services speak of: ``aerie.types.v1`` <-> ``services.speculation``.

Functions named ``read_...`` take a message from elsewhere and raise ``AerieError`` for what no peer of ours sends.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from aerie.types.v1 import types_pb2 as pb
from numpy.typing import NDArray

from services.speculation.errors import AerieError, Reason
from services.speculation.growth import MAX_TREE_NODES, Budget
from services.speculation.messages import Features, FinishReason, PortError, Tap, TokenLogProbs
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler

_ELEMENTS: dict[Any, pb.ElementType.ValueType] = {
    np.dtype("<f4"): pb.ELEMENT_TYPE_FLOAT32,
    np.dtype("<f2"): pb.ELEMENT_TYPE_FLOAT16,
    np.dtype("<u2"): pb.ELEMENT_TYPE_BFLOAT16,
}
_DTYPES = {element: dtype for dtype, element in _ELEMENTS.items()}
_FINISHES: dict[FinishReason, pb.FinishReason.ValueType] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}
_FINISH_NAMES = {value: name for name, value in _FINISHES.items()}


def write_tap(tap: Tap) -> pb.Tap:
    return pb.Tap(final=True) if tap == "final" else pb.Tap(layers=int(tap))


def read_tap(tap: pb.Tap) -> Tap:
    """Raises AerieError: INVALID_ARGUMENT for a tap that is none."""
    kind = tap.WhichOneof("kind")
    if kind == "layers":
        return tap.layers
    if kind == "final" and tap.final:
        return "final"
    raise _invalid("a tap names no boundary")


def write_tensor(array: NDArray[Any]) -> pb.Tensor:
    """float32, float16, or uint16 bits of bfloat16."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return pb.Tensor(element_type=_ELEMENTS[little.dtype], shape=little.shape, data=little.tobytes())


def read_tensor(tensor: pb.Tensor) -> NDArray[Any]:
    """Raises AerieError: INVALID_ARGUMENT when type, shape and bytes do not fit."""
    dtype = _DTYPES.get(tensor.element_type)
    if dtype is None:
        raise _invalid(f"a tensor has element type {tensor.element_type}")
    if math.prod(tensor.shape) * dtype.itemsize != len(tensor.data):
        raise _invalid(f"a tensor of shape {list(tensor.shape)} has {len(tensor.data)} bytes")
    try:
        return np.frombuffer(tensor.data, dtype).reshape(tuple(tensor.shape))
    except ValueError:  # no bytes, and more rows than any array may have
        raise _invalid(f"no tensor has shape {list(tensor.shape)}") from None


def write_features(features: Features) -> pb.Features:
    """As bfloat16: drafters lose nothing that the target's own noise leaves, and it is half the bytes."""
    taps = [pb.TapRows(tap=write_tap(tap), rows=write_tensor(to_bfloat16(r))) for tap, r in features.rows.items()]
    return pb.Features(base=features.base, taps=taps)


def wire_bytes(features: Features) -> int:
    """Bytes of its rows as they travel."""
    return sum(2 * rows.size for rows in features.rows.values())


def to_bfloat16(rows: NDArray[Any]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; what is uint16 is bits already."""
    if rows.dtype == np.uint16:
        return rows
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding a NaN's bits could make it infinite
    return np.where(np.isnan(rows), quiet, rounded).astype(np.uint16)


def read_features(features: pb.Features) -> Features:
    """Raises AerieError: INVALID_ARGUMENT when taps repeat, or differ in their rows."""
    rows = {read_tap(entry.tap): read_tensor(entry.rows) for entry in features.taps}
    shapes = {array.shape[:1] for array in rows.values() if array.ndim == 2}
    if len(rows) != len(features.taps) or any(array.ndim != 2 for array in rows.values()) or len(shapes) > 1:
        raise _invalid("features are not one [rows, hidden] for each tap")
    return Features(features.base, rows)


def write_tree(tree: DraftTree) -> pb.DraftTree:
    return pb.DraftTree(
        tokens=tree.tokens.tolist(), parents=tree.parents.tolist(), log_probs=tree.log_probs.astype("<f4").tobytes()
    )


def read_tree(tree: pb.DraftTree) -> DraftTree:
    """Raises AerieError: INVALID_TREE."""
    if len(tree.log_probs) != 4 * len(tree.tokens):
        raise AerieError(Reason.INVALID_TREE, "tokens, parents and log_probs must be equally long")
    if any(token >= 2**31 for token in tree.tokens):
        raise AerieError(Reason.INVALID_TREE, "a token is outside of any vocabulary")
    log_probs = np.frombuffer(tree.log_probs, "<f4")
    if not np.isfinite(log_probs).all():
        raise AerieError(Reason.INVALID_TREE, "a log-probability is not finite")
    return DraftTree.build(list(tree.tokens), list(tree.parents), log_probs)


def write_budget(budget: Budget) -> pb.Budget:
    rule = None if budget.min_log_prob == -math.inf else budget.min_log_prob
    return pb.Budget(max_nodes=budget.max_nodes, max_depth=budget.max_depth, top_k=budget.top_k, min_log_prob=rule)


def read_budget(budget: pb.Budget) -> Budget:
    rule = budget.min_log_prob if budget.HasField("min_log_prob") else -math.inf
    if math.isnan(rule):
        raise _invalid("min_log_prob is not a number")
    if budget.max_nodes > MAX_TREE_NODES:
        raise _invalid(f"a budget of {budget.max_nodes} nodes; {MAX_TREE_NODES} are the most")
    return Budget(budget.max_nodes, budget.max_depth, budget.top_k, rule)


def write_sampler(sampler: Sampler) -> pb.Sampler:
    return pb.Sampler(
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        min_p=sampler.min_p,
        repetition_penalty=sampler.repetition_penalty,
        presence_penalty=sampler.presence_penalty,
        frequency_penalty=sampler.frequency_penalty,
        logit_bias=[pb.TokenBias(token=token, bias=bias) for token, bias in sampler.logit_bias],
    )


def read_sampler(sampler: pb.Sampler) -> Sampler:
    """Raises AerieError: INVALID_ARGUMENT, as ``Sampler`` does."""
    return Sampler(
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p if sampler.HasField("top_p") else 1.0,
        min_p=sampler.min_p,
        repetition_penalty=sampler.repetition_penalty if sampler.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampler.presence_penalty,
        frequency_penalty=sampler.frequency_penalty,
        logit_bias=tuple((entry.token, entry.bias) for entry in sampler.logit_bias),
    )


def write_log_probs(log_probs: Sequence[TokenLogProbs]) -> list[pb.TokenLogProbs]:
    return [
        pb.TokenLogProbs(
            token=entry.token,
            log_prob=entry.log_prob,
            top=[pb.TokenLogProbs.Alternative(token=token, log_prob=value) for token, value in entry.top],
        )
        for entry in log_probs
    ]


def read_log_probs(log_probs: Iterable[pb.TokenLogProbs]) -> tuple[TokenLogProbs, ...]:
    return tuple(
        TokenLogProbs(entry.token, entry.log_prob, tuple((top.token, top.log_prob) for top in entry.top))
        for entry in log_probs
    )


def write_finish(finish: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if finish is None else _FINISHES[finish]


def read_finish(finish: pb.FinishReason.ValueType) -> FinishReason | None:
    """Raises AerieError: INVALID_ARGUMENT for a reason that this version does not know."""
    if finish == pb.FINISH_REASON_UNSPECIFIED:
        return None
    if finish not in _FINISH_NAMES:
        raise _invalid(f"finish reason {finish}")
    return _FINISH_NAMES[finish]


def write_error(error: PortError) -> pb.SessionError:
    expected = None if error.expected is None else write_round(*error.expected)
    return pb.SessionError(reason=error.reason, message=error.message, expected=expected)


def read_error(session: str, error: pb.SessionError) -> PortError:
    """A reason that this version does not know is INTERNAL."""
    known = error.reason in Reason.__members__
    expected = read_round(error.expected) if error.HasField("expected") else None
    return PortError(session, Reason(error.reason) if known else Reason.INTERNAL, error.message, expected)


def write_round(epoch: int, round_: int, base_len: int) -> pb.RoundId:
    return pb.RoundId(epoch=epoch, round=round_, base_len=base_len)


def read_round(round_: pb.RoundId) -> tuple[int, int, int]:
    return round_.epoch, round_.round, round_.base_len


def read_seconds(seconds: float) -> float:
    """A duration. Statistics and JSON of whoever asks would carry a NaN on."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _invalid(f"{seconds} is no number of seconds")
    return seconds


def _invalid(message: str) -> AerieError:
    return AerieError(Reason.INVALID_ARGUMENT, message)
