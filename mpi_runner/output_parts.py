"""Every tensor of the output as one rank holds it, in the file's order."""

import numpy as np

from kda_engine import layout
from kda_engine.arrays import to_host

from .gathering import Part
from .head_shards import OF_KEY_HEADS, by_rows, shares

PER_TOKEN = ("q", "k", "v", "g", "beta")


class _Results:
    """The results of one rank by their names in the file.

    problem, forward, gradients: the `RankProblem` and its results; gradients is None without a backward.
    """

    def __init__(self, options, problem, forward, gradients):
        state = lambda x: layout.state_out(x, options.state_layout)
        self.tokens = {"outputs/out": ("v", forward.outs)}
        self.ended, self.started = {"outputs/final_state": state(forward.final_states)}, {}
        self.parameters = {}
        if gradients is not None:
            self.tokens |= {f"grads/d{name}": (name, gradients.per_token("d" + name)) for name in PER_TOKEN}
            dtype = problem.share.operands.state_dtype
            self.parameters = {f"grads/{name}": x.astype(dtype) for name, x in gradients.parameters.items()}
            self.started = {"grads/d_initial_state": state(gradients.d_initial_states)}


def output_parts(source, options, problem, forward, gradients, save_boundary):
    """The `Part`s of a run whose ranks share the tokens, a list.

    source: the open input. save_boundary: the ranks' boundary matrices too.
    """
    results, segments, rank = _Results(options, problem, forward, gradients), problem.segments, problem.segment.rank
    operands = problem.share.operands
    tokens = [(s.start, s.stop - s.start) for s in segments]
    sequences = lambda of: [(r.start if len(r) else 0, len(r)) for r in (getattr(s, of) for s in segments)]
    parts = [Part(name, (source.T,) + getattr(operands, like).shape[1:], source.dtypes[like], tokens, blocks)
             for name, (like, blocks) in results.tokens.items()]
    parts += [Part(name, (source.N,) + x.shape[1:], x.dtype, sequences("ended"), [x])
              for name, x in results.ended.items()]
    parts += [_on_root(name, x, len(segments), rank) for name, x in results.parameters.items()]
    parts += [Part(name, (source.N,) + x.shape[1:], x.dtype, sequences("started"), [x])
              for name, x in results.started.items()]
    if save_boundary:
        parts += _boundary_parts(source, operands.state_dtype, len(segments), rank, forward, gradients)
    return _in_file_order(parts)


def output_parts_of_heads(source, options, problem, forward, gradients, transport, heads):
    """The `Part`s of a run whose ranks share the heads, a list: every rank gets rows of all heads. Collective.

    source: the open input, all heads. transport: of all ranks. heads: the key heads of every rank, ranges.
    """
    results, rank, ranks = _Results(options, problem, forward, gradients), transport.rank, transport.size
    key = [len(of_rank) for of_rank in heads]
    value = [width * source.HV // source.H for width in key]
    tokens, sequences = shares(source.T, ranks), shares(source.N, ranks)
    parts = []
    for name, (like, blocks) in results.tokens.items():
        blocks = blocks or [getattr(problem.share.operands, like)]
        rows = by_rows(transport, blocks, tokens, key if like in OF_KEY_HEADS else value, f"sharing {name}")
        parts.append(Part(name, (source.T,) + rows.shape[1:], source.dtypes[like], tokens, [rows]))
    for name, x in (results.ended | results.started).items():
        rows = by_rows(transport, [x], sequences, value, f"sharing {name}")
        parts.append(Part(name, (source.N,) + rows.shape[1:], rows.dtype, sequences, [rows]))
    for name, x in results.parameters.items():
        flat = np.ascontiguousarray(to_host(x)).reshape(-1)
        lengths = transport.control.collect(flat.size, f"sharing {name}")
        whole = np.concatenate(transport.gather(flat, lengths, f"sharing {name}")).reshape(-1, *x.shape[1:])
        parts.append(_on_root(name, whole, ranks, rank))
    return _in_file_order(parts)


def _in_file_order(parts):
    """Initial states' gradients behind the parameters', everything else as it came."""
    return sorted(parts, key=lambda part: (not part.name.startswith("outputs/"), part.name.startswith("boundary/"),
                                           part.name == "grads/d_initial_state"))


def _on_root(name, x, ranks, rank):
    spans = [(0, len(x))] + [(0, 0)] * (ranks - 1)
    return Part(name, x.shape, x.dtype, spans, [x] if rank == 0 else [])


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
