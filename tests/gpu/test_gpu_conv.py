"""The short convolution by kernel against the array expressions in float64."""

import cupy
import ml_dtypes
import numpy as np
import pytest
from guarded import POISONS, guarded

import kda_engine as kda

LENGTHS = (7, 0, 1, 3, 40, 16)
BOUNDS = np.concatenate([[0], np.cumsum(LENGTHS)])
TOLERANCES = {np.dtype("f4"): 1e-6, np.dtype("f2"): 1e-3, np.dtype(ml_dtypes.bfloat16): 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width, channels", ((1, 3), (2, 128), (4, 200), (5, 130)))
def test_kernel_equals_the_definition(width, channels, dtype):
    random = np.random.default_rng(7)
    normal = lambda *shape: random.standard_normal(shape).astype("f4")
    x, weight = normal(BOUNDS[-1], channels).astype(dtype), normal(channels, width)
    bias, halo = normal(channels), normal(len(LENGTHS), width - 1, channels)
    for activation in ("silu", None):
        for rest in ((bias, halo), (None, None)):
            wide = [None if given is None else given.astype("f8") for given in (x, weight, *rest)]
            expected = kda.short_conv(wide[0], wide[1], wide[2], activation, BOUNDS, wide[3])
            runs = []
            for poison in POISONS:
                with guarded(poison):
                    given = [None if array is None else cupy.asarray(array) for array in (x, weight, *rest)]
                    y = kda.short_conv(given[0], given[1], given[2], activation, BOUNDS, given[3])
                    assert isinstance(y, cupy.ndarray) and y.dtype == dtype
                    runs.append(y.get())
            assert runs[0].tobytes() == runs[1].tobytes()
            assert kda.compare(runs[0], expected) <= TOLERANCES[dtype]


def test_heads_and_strides_are_channels():
    x = cupy.random.default_rng(0).standard_normal((20, 3, 16), dtype="f4")
    weight = cupy.ones((24, 4), "f4")
    y = kda.short_conv(x[:, :, ::2], weight)
    expected = kda.short_conv(x[:, :, ::2].get().astype("f8"), weight.get())
    assert y.shape == (20, 3, 8) and kda.compare(y, expected) <= 1e-6
