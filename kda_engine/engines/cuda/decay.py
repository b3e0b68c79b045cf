"""What decay decisions and their bounds need to know of a piece, by kernel."""

import cupy
import numpy as np

from ...decay import Measure
from ...device.kernels.table import element_variant
from ...device.launch import launch
from ...layout import CHUNK
from .activation import activation
from .problem import check_taken, of_one_type, parameter

# In the order of the kernel's numbers for them.
QUANTITIES = ("bounds", "state", "gradient", "sampled last", "sampled first")

# Chunks of a run: enough of them to make the host's part small, enough runs to fill a device.
RUN = 8


class DeviceMeasure(Measure):
    """The same numbers as the definition's, except that bounds are rounded upwards; on one Device."""

    def __init__(self, device):
        self.device = device

    def chunks(self, piece, options):
        return self._rows(piece, options, "bounds", 1)[0]

    def samples(self, piece, options, backward):
        return self._rows(piece, options, "sampled first" if backward else "sampled last", 1)[0]

    def runs(self, piece, options, backward):
        return self._rows(piece, options, "gradient" if backward else "state", RUN)

    def by_chunk(self, piece, options, backward):
        """As `runs`, each run a chunk."""
        return self._rows(piece, options, "gradient" if backward else "state", 1)

    def _rows(self, piece, options, quantity, chunks_per_row):
        """(logs, added) [rows,HV], NumPy float64; added None where the quantity has none."""
        check_taken(piece)
        # A normalised key with such a beta expands nothing, so neither is read.
        expands = not options.qk_l2norm or options.beta == "value"
        adds = quantity in ("state", "gradient")
        reads_k = quantity == "state" or expands and not quantity.startswith("sampled")
        element, (q, k, v, g, beta) = of_one_type(
            piece.q if quantity == "gradient" else None, piece.k if reads_k else None, piece.v if adds else None,
            piece.g, piece.beta if reads_k else None)
        rows = -(-piece.tokens // (chunks_per_row * CHUNK))
        logs, added = (cupy.empty((rows, piece.value_heads)) if wanted else None for wanted in (True, adds))
        launch("decay_bounds", element_variant(element), self.device, count=rows, q=q, k=k, v=v, g=g, beta=beta,
               A_log=parameter(piece.A_log), dt_bias=parameter(piece.dt_bias), tokens=piece.tokens, key_heads=piece.heads,
               value_heads=piece.value_heads, key_size=piece.K, value_size=piece.V,
               quantity=QUANTITIES.index(quantity), chunks_per_row=chunks_per_row, logs=logs, added=added,
               **activation(options, piece.K).arguments | {"lower_bound": float32_above(options.lower_bound)})
        return logs.get(), added.get() if adds else None


def float32_above(x):
    """The least float32 that is not below x."""
    near = np.float32(x)
    return float(near if near >= x else np.nextafter(near, np.float32(np.inf)))
