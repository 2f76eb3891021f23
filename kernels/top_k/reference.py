"""Top-k log-probabilities in plain MLX, lazily."""

import mlx.core as mx


def top_log_probs(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """See ``kernels.top_k.top_log_probs``."""
    logits = mx.where(mx.isnan(logits), -mx.inf, logits.astype(mx.float32))
    keys = _ordered_keys(logits)
    best = mx.argpartition(keys, -k, axis=-1)[:, -k:]
    order = mx.argsort(-mx.take_along_axis(keys, best, axis=-1), axis=-1)
    ids = mx.take_along_axis(best, order, axis=-1)
    values = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
    return values, ids.astype(mx.int32)


def _ordered_keys(logits: mx.array) -> mx.array:
    """int64 keys that sort like (logit, -id): no two are equal, so a partition is exact under ties."""
    bits = (logits + 0.0).view(mx.int32)  # -0.0 + 0.0 is 0.0: equal floats get equal bits
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.astype(mx.int64) * (1 << 32) + mx.arange(logits.shape[-1] - 1, -1, -1)
