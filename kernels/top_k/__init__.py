"""The k likeliest tokens of each row, with exact ties: equal logits keep the smaller id."""

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.top_k import cpu, cuda, reference


def top_log_probs(logits: mx.array, k: int, labels: mx.array) -> tuple[mx.array, mx.array]:
    """Best log-probabilities of each row, best first.

    Args:
        logits: [rows, V]; NaN counts as -inf.
        k: At most V.
        labels: [V] int32, what each column is called.

    Returns:
        Values [rows, k] float32 and labels [rows, k] int32; among equal logits the first column comes first. Lazy on
        GPUs; computed at once on the CPU.
    """
    if on_cuda() and k <= cuda.MOST:
        return cuda.top_log_probs(logits, k, labels)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    values, ids = (cpu if on_cpu else reference).top_log_probs(logits, k)
    return values, labels[ids]
