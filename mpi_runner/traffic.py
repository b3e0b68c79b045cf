"""Bytes that a run puts on the wire, in closed form, per rank; with `exact` decay skip."""

import numpy as np

from .parallel.boundary import BACKWARD, FORWARD, Crossings
from .parallel.rates import TYPICAL
from .parallel.routes import ROUTES
from .parallel.routes.choice import choose
from .parallel.volume import summed


def crossings(segments, HV, K, V, dtype, backward, nodes=None):
    """The `Crossings` of a run, one a direction. dtype: of the states. nodes: by rank, its machine's name."""
    directions = (FORWARD, BACKWARD) if backward else (FORWARD,)
    return [Crossings.exact(direction, segments, HV, K, V, np.dtype(dtype).itemsize, nodes) for direction in directions]


def boundary_bytes(route, crossings):
    """Bytes each rank sends for its boundaries, a list."""
    return np.sum([route.sent(one) for one in crossings], axis=0).tolist()


def held_bytes(scan, crossings):
    """Bytes of boundary matrices each rank holds at once, a list: its own pair, and what the scan holds of other ranks.

    scan: "auto" or a name of `ROUTES`.
    """
    route = ROUTES.get(scan)
    if route is None or not route.covers(crossings[0]):
        route = choose(crossings[0], TYPICAL)[0]
    own = crossings[0].state_bytes * (crossings[0].K + crossings[0].V) // crossings[0].V
    return [own + most for most in np.max([route.held(one) for one in crossings], axis=0).tolist()]


def parameter_bytes(HV, K, ranks):
    """Bytes each rank sends for the sum of dA_log [HV] and ddt_bias [HV,K], in float64."""
    return summed(8 * (HV + HV * K), ranks)


def state_sizes(HV, K, V, dtype):
    """(bytes of S, bytes of M) of one boundary in the states' type."""
    width = np.dtype(dtype).itemsize
    return HV * K * V * width, HV * K * K * width
