"""The k likeliest tokens of each row, with exact ties: equal logits keep the smaller id."""

import mlx.core as mx

from kernels.top_k import cpu, reference


def top_log_probs(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Best log-probabilities of each row, best first.

    Args:
        logits: [rows, V]; NaN counts as -inf.
        k: At most V.

    Returns:
        Values [rows, k] float32 and ids [rows, k] int32. Lazy on GPUs; computed at once on the CPU.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return (cpu if on_cpu else reference).top_log_probs(logits, k)
