"""The backward by kernel, slab by slab from the last to the first.

A slab is a run of chunks, across sequences, short enough that the state and its gradient around every chunk fit the
scratch memory. The forward leaves nothing but its inputs: the states that enter the slabs are found by one pass over
all slabs but the last, and those inside a slab when its turn comes.
"""

from dataclasses import dataclass, replace

import cupy
import numpy as np

from ..device.launch import launch
from ..device.workspace import Workspace
from ..gate import Gradients
from ..layout import CHUNK
from . import cuda_general
from .cuda_problem import take_problem

# Scratch memory of one slab: enough chunks to fill the device many times over, little beside the tensors themselves.
SCRATCH_BYTES = 1 << 30

# Columns of a strip: what the value columns of kept states are padded to.
STRIP_COLUMNS = 16

# Stands for a write strength of 0, whose own gradient could otherwise not be told from what the token wrote. The
# smallest float16; far below the rounding of anything it is added to.
LEAST_STRENGTH = 2.0**-24


@dataclass(frozen=True)
class Slab:
    """tokens: slice of the problem's. sequences: slice of those with tokens here. cu_seqlens: of their tokens here."""

    tokens: slice
    sequences: slice
    cu_seqlens: np.ndarray

    def take(self, operands):
        return operands.slice_tokens(self.tokens.start, self.tokens.stop, self.cu_seqlens)


def cut_slabs(cu_seqlens, chunks):
    """The problem's tokens as Slabs of at most so many chunks, in order; none where there is no token."""
    counts = -(-np.diff(cu_seqlens) // CHUNK)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    slabs = []
    for first in range(0, int(offsets[-1]), chunks):
        behind = min(first + chunks, int(offsets[-1]))
        low = int(np.searchsorted(offsets, first, side="right")) - 1
        high = int(np.searchsorted(offsets, behind, side="left"))
        token = lambda n, chunk: int(min(cu_seqlens[n] + CHUNK * (chunk - offsets[n]), cu_seqlens[n + 1]))
        start, stop = token(low, first), token(high - 1, behind)
        bounds = np.clip(cu_seqlens[low : high + 1], start, stop) - start
        slabs.append(Slab(slice(start, stop), slice(low, high), bounds))
    return slabs


def backward(saved, d_out, d_final_state, target, summarise, poll):
    """`Gradients` of a forward. summarise: the engine's; poll: called between slabs."""
    operands, options = saved.operands, saved.options
    operands, d_out = _prepare_operands(operands, options, d_out)
    slabs = cut_slabs(operands.cu_seqlens, _chunks_per_slab(operands))
    entering = _enter_slabs(operands, options, saved.initial_state, slabs, summarise, poll)
    d_state = d_final_state.copy()
    HV, K = operands.value_heads, operands.K
    ddt_bias, dA_log = cupy.zeros((HV, K), "f8"), cupy.zeros(HV, "f8")
    gradients = {}
    for slab in reversed(slabs):
        poll()
        problem, d_slab = _take(operands, d_out, slab, target)
        if not gradients:
            gradients = _empty_gradients(operands, problem)
        views = {name: x[slab.tokens] for name, x in gradients.items()}
        d_state[slab.sequences], of_bias, of_rate = _finish(
            problem, options, d_slab, entering.pop(), d_state[slab.sequences], views)
        if options.gate != "log":
            ddt_bias += of_bias.sum(axis=0, dtype="f8")
            dA_log += of_rate.sum(axis=(0, 2), dtype="f8")
    given = saved.operands
    if not gradients:
        gradients = {name: cupy.empty_like(getattr(given, name[1:])) for name in ("dq", "dk", "dv", "dg", "dbeta")}
    typed = {name: x.astype(getattr(given, name[1:]).dtype, copy=False) for name, x in gradients.items()}
    return Gradients(**typed, dA_log=dA_log, ddt_bias=ddt_bias, d_initial_state=d_state)


def summarise_backward(operands, options, d_out, d_final_state, target, poll):
    """The gradient of the initial states reached from d_final_state [N,HV,K,V]."""
    operands, d_out = _prepare_operands(operands, options, d_out)
    d_state = d_final_state.copy()
    for slab in reversed(cut_slabs(operands.cu_seqlens, _chunks_per_slab(operands))):
        poll()
        problem, d_slab = _take(operands, d_out, slab, target)
        scratch = Workspace(records=problem.plan.chunks * problem.value_heads * problem.variant.record)
        cuda_general.prepare(problem, options, True, scratch.records)
        d_leaving = d_state[slab.sequences]
        if problem.plan.parts is None:
            d_state[slab.sequences] = _sweep(problem, scratch.records, problem.plan.whole, d_slab, d_leaving)
        else:
            parts = _Parts.of(problem, scratch.records)
            d_state[slab.sequences] = parts.leave(d_slab, d_leaving)[1]
    return d_state


def _prepare_operands(operands, options, d_out):
    """Operands and d_out with one type for v and d_out, and no write strength of exactly 0."""
    if d_out.dtype != operands.v.dtype:
        operands, d_out = replace(operands, v=operands.v.astype("f4")), d_out.astype("f4")
    if options.beta == "value":
        beta = operands.beta
        operands = replace(operands, beta=cupy.where(beta == 0, beta.dtype.type(LEAST_STRENGTH), beta))
    return operands, d_out


def _take(operands, d_out, slab, target):
    """The slab's Problem, and its d_out as the problem has v."""
    part = slab.take(operands)
    return take_problem(part, target), take_problem(replace(part, v=d_out[slab.tokens]), target).v


def _chunks_per_slab(operands):
    """As many as the scratch memory holds, at least one."""
    K, V = -(-operands.K // 64) * 64, -(-operands.V // STRIP_COLUMNS) * STRIP_COLUMNS
    floats = 2 * K * V + 2 * CHUNK * V + 3 * CHUNK * K
    return max(1, SCRATCH_BYTES // (4 * floats * operands.value_heads))


def _enter_slabs(operands, options, initial_state, slabs, summarise, poll):
    """The states [sequences of the slab,HV,K,V] that enter each slab."""
    state, entering = initial_state.copy(), []
    for slab in slabs:
        entering.append(state[slab.sequences].copy())
        if slab is not slabs[-1]:
            poll()
            state[slab.sequences] = summarise(slab.take(operands), options, entering[-1], transition=False).S
    return entering


def _empty_gradients(operands, problem):
    """Arrays of the element type for the gradients of all tokens."""
    return {"d" + name: cupy.empty(getattr(operands, name).shape, problem.v.dtype)
            for name in ("q", "k", "v", "g", "beta")}


def _finish(problem, options, d_out, entering, d_leaving, gradients):
    """One slab: writes its tokens' gradients; returns (d_entering [N,HV,K,V], and by chunk [chunks,HV,K] the gradients
    of dt_bias and A_log)."""
    plan, variant = problem.plan, problem.variant
    chunks = plan.chunks * problem.value_heads
    columns = -(-problem.V // STRIP_COLUMNS) * STRIP_COLUMNS
    state, rows = chunks * variant.key_size * columns, chunks * CHUNK * columns
    scratch = Workspace(records=chunks * variant.record, states=state, d_states=state, writes=rows, d_values=rows)
    cuda_general.prepare(problem, options, True, scratch.records)
    spans = plan.whole
    if plan.parts is not None:
        spans, parts = plan.parts, _Parts.of(problem, scratch.records)
        entering, d_leaving = parts.enter(entering), parts.leave(d_out, d_leaving)[0]
    cuda_general.chain("backward_states", problem, scratch.records, spans, entering, states=scratch.states,
                       writes=scratch.writes)
    d_entering = _sweep(problem, scratch.records, spans, d_out, d_leaving, scratch.d_states, scratch.d_values)
    if plan.parts is not None:
        d_entering = d_entering[plan.sequence_parts[:-1]]
    of_bias = cupy.empty((plan.chunks, problem.value_heads, problem.K), "f4")
    of_rate = cupy.empty_like(of_bias)
    launch("backward_tokens", variant, problem.target, count=plan.chunks,
           q=problem.q, k=problem.k, g=problem.g, beta=problem.beta, A_log=problem.A_log, dt_bias=problem.dt_bias,
           d_out=d_out, states=scratch.states, writes=scratch.writes, d_states=scratch.d_states,
           d_values=scratch.d_values, cu_seqlens=plan.cu_seqlens, chunk_offsets=plan.chunk_offsets,
           sequences=plan.sequences, key_heads=problem.heads, d_bias=of_bias, d_rate=of_rate, **problem.sizes,
           **problem.activation(options), **gradients)
    return d_entering, of_bias, of_rate


@dataclass(frozen=True)
class _Parts:
    """Sub-segments of the sequences: the affine maps of the state through each, M [parts,HV,K,K], S [parts,HV,K,V].

    Scans here reach one state more per sequence than it has parts; `places` tells where a part's own is among them.
    """

    problem: object
    records: object
    M: object
    S: object
    places: object

    @classmethod
    def of(cls, problem, records):
        parts, HV, K = problem.plan.parts, problem.value_heads, problem.K
        M, S = cupy.empty((parts.count, HV, K, K), "f4"), cupy.empty((parts.count, HV, K, problem.V), "f4")
        cuda_general.chain("summary", problem, records, parts, None, transition=M, reached=S)
        return cls(problem, records, M, S, cupy.arange(parts.count) + parts.sequences)

    def enter(self, entering):
        """The state that enters every part [parts,HV,K,V]."""
        return self._scan(self.M, self.S, entering, self.problem.plan.sequence_bounds)[self.places]

    def leave(self, d_out, d_leaving):
        """The gradient of the state behind every part, and of that before every sequence.

        The same scan: through transposed transitions, over everything in reverse order.
        """
        plan = self.problem.plan
        D = _sweep(self.problem, self.records, plan.parts, d_out, None)
        turned = lambda x: cupy.ascontiguousarray(x[::-1])
        last = plan.parts.count + len(d_leaving) - 1
        bounds = last + 1 - turned(plan.sequence_bounds)
        states = self._scan(turned(self.M.swapaxes(2, 3)), turned(D), turned(d_leaving), bounds)[::-1]
        return states[self.places + 1], states[plan.sequence_bounds[:-1]]

    def _scan(self, M, S, initial, bounds):
        states = cupy.empty((len(M) + len(initial),) + initial.shape[1:], "f4")
        cuda_general.scan(self.problem, M, S, initial, bounds, states)
        return states


def _sweep(problem, records, spans, d_out, d_leaving, d_states=None, d_values=None):
    """The gradient of the state before each span [spans,HV,K,V]."""
    d_entering = cupy.empty((spans.count, problem.value_heads, problem.K, problem.V), "f4")
    cuda_general.chain("backward_sweep", problem, records, spans, None, d_out=d_out, d_leaving=d_leaving,
                       d_entering=d_entering, d_states=d_states, d_values=d_values)
    return d_entering
