import mlx.core as mx
import numpy as np
import pytest

from services.targets.features import read_back, to_mlx


def test_bfloat16_travels_as_its_bits():
    values = [1.0, -2.5, 3.140625, 65280.0]
    bits = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    _, taps = read_back(None, {3: mx.array([values], mx.bfloat16)})
    np.testing.assert_array_equal(taps[3], [bits])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_arrives_is_what_left(dtype):
    taps = {tap: mx.array([[1.0, -2.5], [0.125, scale]], dtype) for tap, scale in ((2, 3.0), ("final", 5.0))}
    best, rows = read_back(mx.array([7, 65535, 0], mx.uint32), taps)
    assert best.tolist() == [7, 65535, 0]
    assert list(rows) == [2, "final"]
    for tap, values in taps.items():
        back = to_mlx(rows[tap])
        assert back.dtype == dtype
        assert mx.array_equal(back, values)


def test_either_may_be_missing():
    best, taps = read_back(mx.array([7], mx.uint32), {})
    assert (best.tolist(), taps) == ([7], {})
    best, taps = read_back(None, {})
    assert (best.tolist(), taps) == ([], {})
