"""Decay measures of a case, sequence by sequence."""

import numpy as np
from stages import convolved

from kda_engine import layout


def pieces(case):
    """(Operands of one sequence, its d_out) for every sequence of the case; NumPy."""
    case = convolved(case)
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate)
    bounds = operands.cu_seqlens
    return [(operands.slice_tokens(start, stop), case.d_out[start:stop]) for start, stop in zip(bounds, bounds[1:])]


def measured(engine, piece, options):
    """Everything that a measure tells of one piece, by name."""
    piece, measure = engine.take(piece), engine.measure
    state, gradient = measure.runs(piece, options, False), measure.runs(piece, options, True)
    return {"chunks": measure.chunks(piece, options),
            "last": measure.samples(piece, options, False), "first": measure.samples(piece, options, True),
            "state logs": state[0], "state added": state[1],
            "gradient logs": gradient[0], "gradient added": gradient[1]}


def entering(piece):
    """Some norms of a boundary [HV], the first 0."""
    return np.linspace(0.0, 3.0, piece.value_heads)
