"""Every tensor of the output as one rank holds it, in the file's order."""

import numpy as np

from kda_engine import layout

from .gathering import Part

PER_TOKEN = ("q", "k", "v", "g", "beta")


def output_parts(source, options, problem, forward, gradients, save_boundary):
    """The `Part`s of a run, a list.

    source: the open input. problem, forward, gradients: the `RankProblem` and its results; gradients is None without a
    backward. save_boundary: the ranks' boundary matrices too.
    """
    segments, operands, rank = problem.segments, problem.share.operands, problem.segment.rank
    state_dtype = operands.state_dtype
    N, HV, K, V = source.N, source.HV, source.K, source.V
    tokens = [(s.start, s.stop - s.start) for s in segments]
    sequences = lambda of: [(r.start if len(r) else 0, len(r)) for r in (getattr(s, of) for s in segments)]
    state = lambda x: layout.state_out(x, options.state_layout)
    state_shape = (N, HV, K, V) if options.state_layout == "KV" else (N, HV, V, K)
    shape = lambda name: (source.T,) + getattr(operands, name).shape[1:]
    parts = [
        Part("outputs/out", shape("v"), source.dtypes["v"], tokens, forward.outs),
        Part("outputs/final_state", state_shape, state_dtype, sequences("ended"), [state(forward.final_states)]),
    ]
    if gradients is not None:
        parts += [Part(f"grads/d{name}", shape(name), source.dtypes[name], tokens, gradients.per_token("d" + name))
                  for name in PER_TOKEN]
        for name, x in gradients.parameters.items():
            x = x.astype(state_dtype)
            on_root = [(0, len(x))] + [(0, 0)] * (len(segments) - 1)
            parts.append(Part(f"grads/{name}", x.shape, state_dtype, on_root, [x] if rank == 0 else []))
        parts.append(Part("grads/d_initial_state", state_shape, state_dtype, sequences("started"),
                          [state(gradients.d_initial_states)]))
    if save_boundary:
        parts += _boundary_parts(source, state_dtype, len(segments), rank, forward, gradients)
    return parts


def _boundary_parts(source, dtype, ranks, rank, forward, gradients):
    """One row a rank: its own pair and what it scanned; NaN where it has none (a rank that feeds nobody, say)."""
    there = {**forward.side.boundary, **({} if gradients is None else gradients.side.boundary)}
    each = [(number, 1) for number in range(ranks)]
    parts = []
    for name in ("M", "S", "S_in") + (("D", "dS_out") if gradients is not None else ()):
        shape = (source.HV, source.K, source.K if name == "M" else source.V)
        mine = there.get(name, np.full(shape, np.nan, dtype))
        parts.append(Part(f"boundary/{name}", (ranks,) + shape, dtype, each, [mine[None]]))
    return parts
