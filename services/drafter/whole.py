"""A drafter's round in one launch: the rows that came since the last tree, then every depth of the next."""

import logging
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels._cuda import allocate_pinned
from kernels.commit import commit_rows
from kernels.draft_round import MOST_DEPTH, MOST_ROWS, MOST_WIDTH, TOLD, can_run, count_answer, run_round
from services.drafter import growth
from services.drafter.family import TraceableDraftModel
from services.drafter.session import DraftSession
from services.speculation.growth import Budget, Candidates
from services.speculation.messages import Features
from services.speculation.window import SINK_ROWS
from services.targets.kv_rows import round_to_doubles

log = logging.getLogger(__name__)

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
        self._works = model.draft_layer is not None
        self._dtype = mx.float16  # of the features so far: another one is another build
        self._rotations: mx.array | None = None
        self._mail: tuple[NDArray[np.int32], NDArray[np.int32], mx.array] | None = None

    def defers(self, features: Features) -> bool:
        """Whether rows with these features may wait for the growth that follows."""
        if self._works:
            self._dtype = _DTYPES[features.rows[self._model.info.taps[0]].dtype]
        return self._works

    def takes(self, budget: Budget) -> bool:
        """Whether growth by this budget is one launch here."""
        layer = self._model.draft_layer
        return self._works and layer is not None and can_run(layer, budget.max_depth, budget.top_k)

    def run(self, session: DraftSession, budget: Budget) -> Candidates | None:
        """Read the session's deferred rows and grow below the last one.

        None, with the session as it was, when the GPU does not run all blocks of a launch at the same time; it is
        not asked again then.
        """
        layer = self._model.draft_layer
        assert layer is not None
        assert session.last is not None
        depth, top_k = budget.max_depth, budget.top_k
        tokens, features = session.deferred or (_NO_ROWS, None)
        count, base = len(tokens), features.base if features else session.length
        session.kv.reserve(MOST_ROWS)
        told, answer, mailbox = self._mailbox()
        told[:5] = session.kv.length, base - session.kv.length, session.window, count, depth
        told[TOLD - MOST_ROWS :][:count] = tokens
        if features:
            self._tell(told[TOLD:], features, count)
        answer = answer[: count_answer(depth, top_k)]
        answer[-1] = 1  # until the device says otherwise
        cache = session.kv.arrays()
        table = self._rotation_table(base + count + depth)
        done = run_round(layer, mailbox, self._dtype, session.last, (cache[0], cache[1]), table, top_k, SINK_ROWS)
        if count:
            cache = commit_rows(cache, done.rows, done.commit[1:], done.commit[:1])
        mx.eval(done.newest, cache)
        if answer[-1]:
            log.warning("the GPU does not run all blocks of a launch at the same time: drafting goes step by step")
            self._works = False
            return None
        if count:
            session.deferred, session.length = None, base
            session.kv.fill(cache)
            session.keep(count, done.newest)
        return growth.unpack(answer.copy(), ((1, top_k), *[(top_k, top_k)] * (depth - 1)))

    def _tell(self, told: NDArray[np.int32], features: Features, count: int) -> None:
        """Write the rows' features, tap after tap in each row."""
        rows = [features.rows[tap] for tap in self._model.info.taps]
        width = rows[0].shape[1]
        room = told.view(rows[0].dtype)[: count * len(rows) * width].reshape(count, len(rows), width)
        np.stack(rows, axis=1, out=room)

    def _mailbox(self) -> tuple[NDArray[np.int32], NDArray[np.int32], mx.array]:
        """What the device is told, what it answers, and both addresses."""
        if self._mail is None:
            layer = self._model.draft_layer
            assert layer is not None
            told = allocate_pinned(TOLD + MOST_ROWS * layer.fuse.shape[1])
            answer = allocate_pinned(count_answer(MOST_DEPTH, MOST_WIDTH))
            addresses = mx.array(np.array([told.ctypes.data, answer.ctypes.data], np.int64))
            mx.eval(addresses)
            self._mail = told, answer, addresses
        return self._mail

    def _rotation_table(self, positions: int) -> mx.array:
        if self._rotations is None or len(self._rotations) < positions:
            self._rotations = self._model.rotations(round_to_doubles(positions))
            mx.eval(self._rotations)
        return self._rotations
