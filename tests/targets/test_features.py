import mlx.core as mx
import numpy as np

from services.targets.features import to_mlx, to_numpy


def test_bfloat16_travels_as_its_bits():
    values = [1.0, -2.5, 3.140625, 65280.0]
    bits = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(to_numpy(mx.array(values, mx.bfloat16)), bits)
    np.testing.assert_array_equal(to_numpy(mx.array(values)), np.array(values, np.float32))


def test_what_arrives_is_what_left():
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        rows = mx.array([[1.0, -2.5], [0.125, 3.0]], dtype)
        back = to_mlx(to_numpy(rows))
        assert back.dtype == dtype
        assert mx.array_equal(back, rows)
