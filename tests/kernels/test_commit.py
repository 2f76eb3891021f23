import mlx.core as mx
import numpy as np
import pytest

from kernels.commit import commit_rows


def place(cache, rows, path, length):
    """Row by row, in NumPy."""
    out = cache.copy()
    for step, node in enumerate(path):
        out[:, :, length + step] = rows[:, :, node]
    return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("path", "length"), [([0], 0), ([0, 1, 2], 5), ([0, 3, 4, 9], 59), ([], 7)])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_accepted_rows_land_behind_the_committed_ones(path, length, padding, dtype):
    """Two layers of different widths; rows are transposed views, and padding may reach beyond the capacity."""
    rng = np.random.default_rng(length)
    shapes = [(1, 2, 64, 8), (1, 3, 64, 16)] * 2
    caches = [rng.integers(-99, 99, shape) for shape in shapes]
    rows = [rng.integers(-99, 99, (1, 10, heads, width)) for _, heads, _, width in shapes]
    expected = [place(c, r.transpose(0, 2, 1, 3), path, length) for c, r in zip(caches, rows, strict=True)]
    padded = np.array([*path, *[-1] * (padding if path else padding + 1)], np.int32)
    got = commit_rows(
        [mx.array(c.astype(np.float32)).astype(dtype) for c in caches],
        [mx.array(r.astype(np.float32)).astype(dtype).transpose(0, 2, 1, 3) for r in rows],
        mx.array(padded),
        mx.array([length]),
    )
    for array, values in zip(got, expected, strict=True):
        assert array.dtype == dtype
        np.testing.assert_array_equal(np.array(array.astype(mx.float32)), values)


def test_keys_and_values_may_differ_in_width():
    caches = [mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 2))]
    rows = [mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 2))]
    for array in commit_rows(caches, rows, mx.array([0, 2]), mx.array([3])):
        assert np.array(array[0, 0]).sum(1).tolist() == [0, 0, 0, array.shape[3], array.shape[3], 0, 0, 0]
