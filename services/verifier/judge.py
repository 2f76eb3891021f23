"""How the target chooses at the rows of one session, and what it reports of them."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from services.speculation.messages import TokenLogProbs
from services.verifier.sessions import VerifierSession


class Judge:
    """The target's choice at the rows of one session.

    Args:
        session: Whose sampler and counts apply.
        best: [rows] argmax of the raw logits.
        logits: [rows, V] raw logits, or None when the argmax decides.
    """

    def __init__(self, session: VerifierSession, best: NDArray[np.int32], logits: mx.array | None) -> None:
        self._session, self._best, self._logits = session, best, logits

    def choose(self, row: int, position: int, path_tokens: tuple[int, ...]) -> int:
        if self._session.request.sampler.plain_argmax:
            return int(self._best[row])
        return self._session.choose(self._row(row), position, path_tokens)

    def log_probs(self, rows: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[TokenLogProbs, ...]:
        if self._session.request.top_logprobs is None:
            return ()
        return tuple(self._session.log_probs(self._row(r), t) for r, t in zip(rows, tokens, strict=True))

    def _row(self, row: int) -> NDArray[np.float32]:
        assert self._logits is not None
        return np.array(self._logits[row].astype(mx.float32))
