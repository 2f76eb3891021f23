"""The k likeliest tokens of each row, with exact ties: equal logits keep the smaller id."""

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.top_k import cpu, cuda, reference


def top_log_probs(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Best log-probabilities of each row, best first.

    Args:
        logits: [rows, V]; NaN counts as -inf.
        k: At most V.

    Returns:
        Values [rows, k] float32 and ids [rows, k] int32. Lazy on GPUs; computed at once on the CPU.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return cpu.top_log_probs(logits, k)
    return (cuda if on_cuda() and k <= cuda.MOST else reference).top_log_probs(logits, k)
