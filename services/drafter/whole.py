"""A drafter's round in one launch: the rows that came since the last tree, then every depth of the next."""

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels._cuda import allocate_pinned
from kernels.commit import commit_rows
from kernels.draft_round import MOST_ROWS, TOLD, can_run, count_answer, run_round
from services.drafter import growth
from services.drafter.family import TraceableDraftModel
from services.drafter.session import DraftSession
from services.speculation.growth import Budget, Candidates
from services.speculation.messages import Features
from services.speculation.window import SINK_ROWS
from services.targets.kv_rows import round_to_doubles

_DTYPES: dict[Any, mx.Dtype] = {
    np.dtype(np.float16): mx.float16,
    np.dtype(np.float32): mx.float32,
    np.dtype(np.uint16): mx.bfloat16,
}
"""Of features as they travel (``targets.features``)."""
_NO_ROWS = np.zeros(0, np.int32)


class WholeRounds:
    """Runs one drafter whose ``draft_layer`` the kernel takes. Use on the device thread only.

    Args:
        model: The drafter.
    """

    def __init__(self, model: TraceableDraftModel) -> None:
        self._model = model
        self._depths: dict[int, int] = {}  # by top_k
        self._rotations: mx.array | None = None
        self._mail: tuple[NDArray[np.int32], NDArray[np.int32], mx.array] | None = None

    def takes(self, budget: Budget) -> bool:
        """Whether growth by this budget is one launch here."""
        layer = self._model.draft_layer
        return layer is not None and can_run(layer, budget.max_depth, budget.top_k)

    def run(self, session: DraftSession, budget: Budget) -> Candidates:
        """Read the session's deferred rows and grow below the last one.

        Raises:
            RuntimeError: The GPU does not run all blocks of a launch at the same time.
        """
        layer = self._model.draft_layer
        assert layer is not None
        assert session.last is not None
        # A deeper growth serves too: the rerank drops what the budget does not allow. A depth is a build.
        depth, top_k = max(budget.max_depth, self._depths.get(budget.top_k, 0)), budget.top_k
        self._depths[top_k] = depth
        tokens, features = session.deferred or (_NO_ROWS, None)
        count, base = len(tokens), features.base if features else session.length
        session.kv.reserve(MOST_ROWS)
        told, answer, mailbox = self._mailbox(count_answer(depth, top_k))
        told[:4] = session.kv.length, base - session.kv.length, session.window, count
        told[4 : 4 + count] = tokens
        dtype = self._tell_features(told[TOLD:], features, count)
        answer = answer[: count_answer(depth, top_k)]
        answer[-1] = 1  # until the device says otherwise
        cache = session.kv.arrays()
        table = self._rotation_table(base + count + depth)
        round_ = run_round(layer, mailbox, dtype, session.last, (cache[0], cache[1]), table, depth, top_k, SINK_ROWS)
        if count:
            cache = commit_rows(cache, round_.rows, round_.commit[1:], round_.commit[:1])
        mx.eval(round_.newest, cache)
        if answer[-1]:
            raise RuntimeError("the GPU does not run all blocks of a launch at the same time")
        if count:
            session.deferred, session.length = None, base
            session.kv.fill(cache)
            session.keep(count, round_.newest)
        return growth.unpack(answer.copy(), ((1, top_k), *[(top_k, top_k)] * (depth - 1)))

    def _tell_features(self, told: NDArray[np.int32], features: Features | None, count: int) -> mx.Dtype:
        """Write the rows' features, tap after tap in each row."""
        if features is None:
            return mx.float32
        rows = [features.rows[tap] for tap in self._model.info.taps]
        width = rows[0].shape[1]
        room = told.view(rows[0].dtype)[: count * len(rows) * width].reshape(count, len(rows), width)
        np.stack(rows, axis=1, out=room)
        return _DTYPES[rows[0].dtype]

    def _mailbox(self, answer_words: int) -> tuple[NDArray[np.int32], NDArray[np.int32], mx.array]:
        """What the device is told, what it answers, and both addresses."""
        if self._mail is None or len(self._mail[1]) < answer_words:
            layer = self._model.draft_layer
            assert layer is not None
            told, answer = allocate_pinned(TOLD + MOST_ROWS * layer.fuse.shape[1]), allocate_pinned(answer_words)
            addresses = mx.array(np.array([told.ctypes.data, answer.ctypes.data], np.int64))
            mx.eval(addresses)
            self._mail = told, answer, addresses
        return self._mail

    def _rotation_table(self, positions: int) -> mx.array:
        if self._rotations is None or len(self._rotations) < positions:
            self._rotations = self._model.rotations(round_to_doubles(positions))
            mx.eval(self._rotations)
        return self._rotations
