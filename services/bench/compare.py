"""Is a run the same as plain decoding? Differences count only where they are no ties."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.embedded import Engine
from services.orchestrator.service import Request
from services.speculation.exactness import EPSILON_FLOAT32, EPSILON_HALF, Agreement, compare, is_tie
from services.speculation.noise import gumbel
from services.speculation.warpers import Counts
from services.targets.ragged import SessionRows


def compare_runs(engine: Engine, request: Request, plain: Sequence[int], other: Sequence[int], seed: int) -> Agreement:
    """Compare the tokens of two runs of one request; ``plain`` is plain decoding's output.

    Args:
        engine: Holds the target, to recompute the logits where the runs part.
        request: What both answered.
        plain, other: Output token ids.
        seed: The seed of both runs.
    """
    sampler, vocab = request.sampler, engine.info.vocab_size
    epsilon = EPSILON_FLOAT32 if engine.info.feature_dtype == "float32" else EPSILON_HALF

    def tie_test(index: int) -> bool:
        tokens = [*request.tokens, *plain[:index]]
        logits = engine.on_device(lambda: last_logits(engine, tokens))
        noise = None if sampler.greedy else gumbel(seed, len(tokens), vocab)
        counts = Counts.of(vocab, request.tokens, plain[:index])
        return is_tie(logits, sampler, noise, counts, epsilon)

    return compare(plain, other, tie_test)


def last_logits(engine: Engine, tokens: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Raw logits [V] after ``tokens``. On the device thread."""
    kv = engine.target.new_kv()
    for start in range(0, len(tokens), 512):
        chunk = tokens[start : start + 512]
        last = start + 512 >= len(tokens)
        logits = engine.target.forward([SessionRows.chunk(kv, chunk, "last" if last else "none")]).logits
        mx.eval(kv.arrays())
        kv.commit(range(len(chunk)))
    assert logits is not None
    return np.array(logits[0].astype(mx.float32))
