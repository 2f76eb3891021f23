import mlx.core as mx
import numpy as np

from kernels.pack import pack_words


def test_bits_lie_one_array_after_the_other():
    """A transposed view is packed in its own order, and NaN keeps its bits."""
    floats = np.array([[1.5, -0.0, np.nan], [np.inf, 2.0, 3.0]], np.float32)
    arrays = [mx.array(floats), mx.array([[7]], mx.int32), mx.array(floats).T, mx.arange(300, dtype=mx.int32)]
    expected = [floats.view(np.int32).ravel(), [7], floats.T.copy().view(np.int32).ravel(), np.arange(300)]
    got = pack_words(arrays)
    assert got.dtype == mx.int32
    np.testing.assert_array_equal(np.array(got), np.concatenate(expected))
