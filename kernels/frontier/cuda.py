"""The next frontier in one CUDA kernel: MLX takes a sort and ten launches."""

import mlx.core as mx
import numpy as np

from kernels._cuda import build_cuda_kernel

MOST = 1024

# One block, a thread a child: its rank is the number of children before it.
_SOURCE = """
  const int count = log_probs_shape[0] * log_probs_shape[1], children = log_probs_shape[1];
  const int scratch = ancestors_shape[1], child = threadIdx.x;
  const float lowest = __int_as_float(0xff800000);  // minus infinity
  __shared__ float totals[MOST];
  float total = 0.0f;
  if (child < count) {
    total = scores[child / children] + log_probs[child];
    totals[child] = total;
  }
  __syncthreads();
  if (child >= count) return;
  // NaN comes after everything, minus infinity included; equal totals keep their order.
  int rank = 0;
  const bool lost = isnan(total);
  const float own = lost ? lowest : total;
  for (int other = 0; other < count; ++other) {
    const bool gone = isnan(totals[other]);
    const float value = gone ? lowest : totals[other];
    const bool tie = value == own && gone == lost;
    rank += value > own || (value == own && gone < lost) || (tie && other < child);
  }
  if (rank >= WIDTH) return;
  const int parent = child / children;
  pick[rank] = child;
  parents[rank] = parent;
  chosen_tokens[rank] = tokens[child];
  chosen_scores[rank] = total;
  bool* sees = chosen_ancestors + rank * (scratch + WIDTH);
  for (int i = 0; i < scratch; ++i) sees[i] = ancestors[parent * scratch + i];
  for (int i = 0; i < WIDTH; ++i) sees[scratch + i] = i == rank;
"""
_OUTPUTS = ("pick", "parents", "chosen_tokens", "chosen_scores", "chosen_ancestors")


def supports(log_probs: mx.array) -> bool:
    """A block's threads."""
    return log_probs.size <= MOST


def choose_frontier(
    log_probs: mx.array, tokens: mx.array, scores: mx.array, ancestors: mx.array, width: int
) -> tuple[mx.array, ...]:
    """See ``kernels.frontier.choose_frontier``."""
    scratch = ancestors.shape[1]
    if not scratch:  # an input of no elements has no address
        ancestors = mx.array(np.zeros((log_probs.shape[0], 1), np.bool_))
    kernel = build_cuda_kernel("frontier", ("log_probs", "tokens", "scores", "ancestors"), _OUTPUTS, _SOURCE)
    threads = -(-log_probs.size // 32) * 32
    *chosen, seen = kernel(
        inputs=[log_probs, tokens, scores, ancestors],
        template=[("WIDTH", width), ("MOST", MOST)],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(width,)] * 4 + [(width, ancestors.shape[1] + width)],
        output_dtypes=[mx.int32, mx.int32, mx.int32, mx.float32, mx.bool_],
    )
    return (*chosen, seen if scratch else seen[:, 1:])
