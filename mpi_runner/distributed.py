"""Forward and backward for programs that have a communicator of their own: every rank hands in its own tokens.

    from mpi_runner import distributed              # also known as kda_engine.distributed

    mine = distributed.share(comm, cu_seqlens)      # which tokens and sequences are this rank's
    fwd = distributed.forward(comm, q, k, v, g, beta, cu_seqlens=cu_seqlens)
    grads = distributed.backward(fwd, d_out)

Every call is collective: all ranks of the communicator make it, in the same order. An InputError is raised by all of
them. Any other failure of one rank leaves the others waiting, for `timeout` seconds at most: end such a job by
`comm.Abort`.
"""

import os
from dataclasses import dataclass, replace

import numpy as np
from mpi4py import MPI

from kda_engine import layout
from kda_engine.arrays import array_module, as_array, as_float_array, brief, like, to_host
from kda_engine.engines import make_engine
from kda_engine.errors import InputError
from kda_engine.gate import Gradients
from kda_engine.options import Options
from kda_engine.partition import partition
from kda_engine.threads import threads_asked_for

from .parallel.control import Control
from .parallel.problem import RankProblem
from .parallel.routes import ROUTES
from .parallel.transports import HostTransport

PER_TOKEN = ("q", "k", "v", "g", "beta")

# What this module keeps with a communicator.
_KEPT = MPI.Comm.Create_keyval()


@dataclass
class DistributedForward:
    """What one rank's forward yields.

    out [tokens,HV,V]: of this rank's tokens, typed as v. final_state [ended,HV,K,V] (or [ended,HV,V,K], by
    state_layout): of the sequences that end on this rank. segment: this rank's share, as `share` gives it. scan: how
    states crossed ranks; reason: why so. bytes_sent: by this rank in this forward and its last backward.
    """

    out: object
    final_state: object
    segment: object
    scan: str
    reason: str
    bytes_sent: int
    _problem: RankProblem
    _forward: object
    _options: Options
    _example: object

    def __repr__(self):
        return (f"DistributedForward(out={brief(self.out)}, final_state={brief(self.final_state)}, "
                f"tokens {self.segment.start} to {self.segment.stop}, scan={self.scan!r}, bytes_sent={self.bytes_sent})")


def share(comm, cu_seqlens, cuts=None):
    """This rank's `kda_engine.partition.Segment`: its tokens are the packed tokens start to stop of the whole problem;
    `started` and `ended` are ranges of the sequences whose first or last token is among them.

    cu_seqlens [N+1]: of the whole problem, the same on every rank. cuts: ranks - 1 positions, each a multiple of 16
    tokens from the start of the sequence it falls in; near equal shares when absent.
    """
    return partition(cu_seqlens, comm.size, cuts)[comm.rank]


def forward(comm, q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, cu_seqlens=None, options=Options(),
            engine="auto", scan="auto", save=True, timeout=600.0):
    """KDA forward of a problem whose tokens lie on the ranks of an mpi4py communicator, in rank order.

    q, k [tokens,H,K]; v [tokens,HV,V]; g [tokens,HV,K]; beta [tokens,HV]: this rank's tokens, any number, none too, as
    `kda_engine.forward` takes them packed. A_log [HV] and dt_bias [HV,K]: the same on every rank. cu_seqlens [N+1]: of
    the whole problem; one sequence of all ranks' tokens when absent. initial_state [started,HV,K,V]: of the sequences
    that start on this rank (see `share`); zeros when absent. Where a rank's tokens end within a sequence, that is at a
    multiple of 16 tokens from the sequence's start.

    engine: as in `kda_engine.forward`; with "cuda" make the rank's device current before. scan: how states cross ranks,
    as in `kda-engine run --scan`. save: keep what `backward` needs, the inputs among it. timeout: longest wait for other
    ranks, in seconds.

    Returns a DistributedForward. Raises InputError naming the argument, on all ranks; ExchangeTimeout after a wait that
    was too long.
    """
    transport = _transport(comm)
    control = transport.control
    control.timeout = timeout
    before = control.sent + transport.sent
    given, bounds = _together(control, lambda: _pack(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
                                                     options, scan))
    facts = control.collect((given.tokens, str(given.state_dtype), given.heads, given.state_shape[1:], options, scan,
                             bounds), "comparing what the ranks were given")
    segments = _together(control, lambda: _segments(facts))
    segment = segments[control.rank]
    state_dtype = np.result_type(*(np.dtype(dtype) for _, dtype, *_ in facts))

    def prepare():
        operands = replace(given, cu_seqlens=segment.cu_seqlens, state_dtype=state_dtype)
        states = _states("initial_state", initial_state, len(segment.started), operands, options)
        runner = make_engine(engine, control.progress, _threads(control))
        return runner, runner.take(operands), states

    runner, operands, states = _together(control, prepare)
    problem = RankProblem(runner, transport, scan, segments, operands, options)
    result = problem.forward(states, save)
    final_state = layout.state_out(result.final_states, options.state_layout)
    return DistributedForward(
        out=like(_joined(result.outs, operands.v), v), final_state=like(_on_side(final_state, v), v), segment=segment,
        scan=result.route.name, reason=problem.reason, bytes_sent=control.sent + transport.sent - before,
        _problem=problem, _forward=result if save else None, _options=options, _example=v)


def backward(fwd, d_out, d_final_state=None):
    """All gradients of a distributed forward, a `kda_engine.Gradients` of this rank. Collective.

    d_out as fwd.out; d_final_state [ended,HV,K,V] as fwd.final_state, zeros when absent. dq, dk, dv, dg, dbeta: of this
    rank's tokens; d_initial_state [started,HV,K,V]: of the sequences that start here; dA_log and ddt_bias: summed over
    all ranks, the same on each. Raises InputError on all ranks.
    """
    problem, options, example = fwd._problem, fwd._options, fwd._example
    transport, operands = problem.transport, problem.share.operands
    control = transport.control
    before = control.sent + transport.sent

    def prepare():
        if fwd._forward is None:
            raise InputError("fwd: expected a forward with save=True, got one that kept nothing for the backward")
        taken = as_float_array("d_out", d_out)
        expected = (operands.tokens, operands.value_heads, operands.V)
        if taken.shape != expected:
            raise InputError(f"d_out: expected shape {expected}, got {taken.shape}")
        states = _states("d_final_state", d_final_state, len(fwd.segment.ended), operands, options)
        return problem.engine.engine.take_array(taken), states

    taken, states = _together(control, prepare)
    result = problem.backward(fwd._forward, taken, states)
    fwd.bytes_sent += control.sent + transport.sent - before
    hand_back = lambda x: like(_on_side(x, example), example)
    parameter = lambda name: None if name not in result.parameters else hand_back(
        result.parameters[name].astype(operands.state_dtype))
    return Gradients(
        **{f"d{name}": like(_joined(result.per_token(f"d{name}"), getattr(operands, name)), example)
           for name in PER_TOKEN},
        dA_log=parameter("dA_log"), ddt_bias=parameter("ddt_bias"),
        d_initial_state=hand_back(layout.state_out(result.d_initial_states, options.state_layout)))


def _transport(comm):
    """The transport that is kept with a communicator; its messages go by a duplicate of it. Collective at first."""
    kept = comm.Get_attr(_KEPT)
    if kept is None:
        kept = HostTransport(Control(comm.Dup()))
        comm.Set_attr(_KEPT, kept)
    return kept


def _together(control, work):
    """work() on every rank; if any rank raises InputError, all raise the first such rank's."""
    problem, result = None, None
    try:
        result = work()
    except InputError as error:
        problem = str(error)
    for rank, text in enumerate(control.collect(problem, "agreeing on the input")):
        if text is not None:
            raise InputError(f"rank {rank}: {text}")
    return result


def _pack(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, options, scan):
    if not isinstance(options, Options):
        raise InputError(f"options: expected kda_engine.Options, got {type(options).__name__}")
    if scan != "auto" and scan not in ROUTES:
        raise InputError(f"scan: expected auto or one of {', '.join(ROUTES)}, got {scan!r}")
    if len(getattr(k, "shape", ())) != 3:
        raise InputError(f"k: expected [tokens,H,K], got shape {getattr(k, 'shape', None)}")
    operands, _ = layout.pack(q, k, v, g, beta, A_log, dt_bias, None, options.gate, initial_state)
    if cu_seqlens is None:
        return operands, None
    bounds = as_array("cu_seqlens", cu_seqlens)
    return operands, (bounds.get() if hasattr(bounds, "get") else bounds).tolist()


def _segments(facts):
    """All ranks' segments from what each was given. Raises InputError."""
    names = ("tokens", "type of states", "key heads", "value heads and head sizes", "options", "scan", "cu_seqlens")
    for number in range(2, len(names)):
        for rank, row in enumerate(facts):
            if row[number] != facts[0][number]:
                raise InputError(f"{names[number]}: expected the same on every rank, got {facts[0][number]} on rank 0 "
                                 f"and {row[number]} on rank {rank}")
    cuts = np.cumsum([row[0] for row in facts])
    bounds = [0, int(cuts[-1])] if facts[0][-1] is None else facts[0][-1]
    bounds = layout.check_cu_seqlens(np.asarray(bounds, np.int64), int(cuts[-1]))
    try:
        return partition(bounds, len(facts), cuts[:-1])
    except InputError as error:
        raise InputError(f"tokens of the ranks: {error}") from None


def _states(name, state, count, operands, options):
    """A state argument of `count` sequences as NumPy [count,HV,K,V] in the working type, None when absent."""
    if state is None:
        return None
    HV, K, V = operands.state_shape[1:]
    expected = (count, HV, K, V) if options.state_layout == "KV" else (count, HV, V, K)
    state = to_host(as_float_array(name, state))
    if state.shape != expected:
        raise InputError(f"{name}: expected shape {expected} (state_layout {options.state_layout!r}), got {state.shape}")
    return layout.state_out(state, options.state_layout).astype(operands.state_dtype, copy=False)


def _joined(parts, empty):
    """Arrays that follow each other as one; `empty` where there is none."""
    if not parts:
        return empty
    return parts[0] if len(parts) == 1 else array_module(parts[0]).concatenate(parts)


def _on_side(x, example):
    """A NumPy result where the caller's arrays are, as far as CuPy knows them."""
    module = array_module(as_float_array("v", example))
    return x if module is np else module.asarray(x)


def _threads(control):
    """Threads of this rank: the cores it may run on, shared with the ranks of its machine that may run there too."""
    if threads_asked_for() is not None:
        return threads_asked_for()
    mine = os.sched_getaffinity(0)
    everyone = control.collect((control.nodes()[control.rank], mine), "sharing the cores")
    sharing = sum(node == control.nodes()[control.rank] and bool(mine & cores) for node, cores in everyone)
    return max(1, len(mine) // sharing)
