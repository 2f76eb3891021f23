"""What can be said of CUDA sources without a GPU."""

import numpy as np
import pytest

from kernels._cuda import write_float


@pytest.mark.parametrize("value", [1e-5, 1e-06, 0.125, 1.0, 8, 64**-0.5, 1e30])
def test_literals_are_floats_and_keep_their_value(value):
    text = write_float(value)
    assert text.endswith("f")
    assert "." in text or "e" in text
    assert np.float32(text[:-1]) == np.float32(value)
