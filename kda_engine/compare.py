"""Error metrics, and the one table of tolerances."""

import numpy as np

from .arrays import as_array, to_host

# Relative Frobenius error against the float64 recurrence that an engine computing in this type may show.
TOLERANCES = {"f8": 1e-11, "f4": 2e-5}
# The same for repeated keys with strong writes and weak decay, where the problem itself is ill-conditioned.
REPEATED_KEY_TOLERANCES = {"f8": 1e-11, "f4": 1e-3}

# The same on a CUDA device, by the inputs' type: 16-bit ones are multiplied with ten mantissa bits, and their output
# is rounded to the type (bfloat16: 1.7e-3 by that alone).
DEVICE_TOLERANCES = {"bfloat16": 3e-3, "float16": 2e-3, "float32": 2e-5}
REPEATED_KEY_DEVICE_TOLERANCES = {"bfloat16": 3e-2, "float16": 3e-2, "float32": 1e-3}


def compare(a, b):
    """||a - b||_F / max(||b||_F, 1e-30) in float64; 0 when both are zero or empty; NaN stays NaN."""
    a, b = (to_host(as_array(name, x)).astype("f8") for name, x in (("a", a), ("b", b)))
    if a.shape != b.shape:
        return float("nan")
    # Norms of scaled values: squares of very small or very large ones would leave float64's range.
    top = max(np.max(np.abs(a), initial=0.0), np.max(np.abs(b), initial=0.0))
    if top == 0:
        return 0.0
    return float(np.linalg.norm(a / top - b / top) / max(np.linalg.norm(b / top), 1e-30 / top))
