"""The portable path's backward, of a problem short enough that the state and its gradient around every chunk fit the
scratch memory (slabs.py cuts longer ones). The forward leaves nothing but its inputs and the states that enter.
"""

from dataclasses import dataclass, replace

import cupy

from ...device.launch import launch
from ...device.workspace import Workspace
from ...layout import CHUNK
from . import portable

# Scratch memory of one slab: enough chunks to fill the device many times over, little beside the tensors themselves.
SCRATCH_BYTES = 1 << 30

# Columns of a strip: what the value columns of kept states are padded to.
STRIP_COLUMNS = 16

# Stands for a write strength of 0, whose own gradient could otherwise not be told from what the token wrote. The
# smallest float16; far below the rounding of anything it is added to.
LEAST_STRENGTH = 2.0**-24


def gradient_operands(operands, options, d_out):
    """Operands and d_out with one type for v and d_out, and no write strength of exactly 0."""
    if d_out.dtype != operands.v.dtype:
        operands, d_out = replace(operands, v=operands.v.astype("f4")), d_out.astype("f4")
    if options.beta == "value":
        beta = operands.beta
        operands = replace(operands, beta=cupy.where(beta == 0, beta.dtype.type(LEAST_STRENGTH), beta))
    return operands, d_out


def chunks_per_slab(operands):
    """As many as the scratch memory holds, at least one."""
    K, V = -(-operands.K // 64) * 64, -(-operands.V // STRIP_COLUMNS) * STRIP_COLUMNS
    floats = 2 * K * V + 2 * CHUNK * V + 3 * CHUNK * K
    return max(1, SCRATCH_BYTES // (4 * floats * operands.value_heads))


def summarise(problem, d_out, d_leaving):
    """The gradient of the initial states [N,HV,K,V] reached from d_leaving."""
    scratch = Workspace(records=problem.plan.chunks * problem.value_heads * problem.variant.record)
    portable.prepare(problem, True, scratch.records)
    if problem.plan.parts is None:
        return _sweep(problem, scratch.records, problem.plan.whole, d_out, d_leaving)
    return _Parts.of(problem, scratch.records).leave(d_out, d_leaving)[1]


def backward(problem, entering, d_out, d_leaving, gradients):
    """Writes the tokens' gradients; returns those of the states `entering`, of A_log [HV] and dt_bias [HV,K], float64."""
    plan, variant = problem.plan, problem.variant
    chunks = plan.chunks * problem.value_heads
    columns = -(-problem.V // STRIP_COLUMNS) * STRIP_COLUMNS
    state, rows = chunks * variant.key_size * columns, chunks * CHUNK * columns
    scratch = Workspace(records=chunks * variant.record, states=state, d_states=state, writes=rows, d_values=rows)
    portable.prepare(problem, True, scratch.records)
    spans = plan.whole
    if plan.parts is not None:
        spans, parts = plan.parts, _Parts.of(problem, scratch.records)
        entering, d_leaving = parts.enter(entering), parts.leave(d_out, d_leaving)[0]
    portable.chain("backward_states", problem, scratch.records, spans, entering, states=scratch.states,
                   writes=scratch.writes)
    d_entering = _sweep(problem, scratch.records, spans, d_out, d_leaving, scratch.d_states, scratch.d_values)
    if plan.parts is not None:
        d_entering = d_entering[plan.sequence_parts[:-1]]
    of_bias = cupy.empty((plan.chunks, problem.value_heads, problem.K), "f4")
    of_rate = cupy.empty_like(of_bias)
    launch("backward_tokens", variant, problem.device, count=plan.chunks,
           q=problem.q, k=problem.k, g=problem.g, beta=problem.beta, A_log=problem.A_log, dt_bias=problem.dt_bias,
           d_out=d_out, states=scratch.states, writes=scratch.writes, d_states=scratch.d_states,
           d_values=scratch.d_values, cu_seqlens=plan.cu_seqlens, chunk_offsets=plan.chunk_offsets,
           sequences=plan.sequences, key_heads=problem.heads, d_bias=of_bias, d_rate=of_rate, **problem.sizes,
           **problem.activation.arguments, **gradients)
    if problem.options.gate == "log":
        return d_entering, cupy.zeros(problem.value_heads, "f8"), cupy.zeros((problem.value_heads, problem.K), "f8")
    return d_entering, of_rate.sum(axis=(0, 2), dtype="f8"), of_bias.sum(axis=0, dtype="f8")


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
        portable.chain("summary", problem, records, parts, None, transition=M, reached=S)
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
        portable.scan(self.problem, M, S, initial, bounds, states)
        return states


def _sweep(problem, records, spans, d_out, d_leaving, d_states=None, d_values=None):
    """The gradient of the state before each span [spans,HV,K,V]."""
    d_entering = cupy.empty((spans.count, problem.value_heads, problem.K, problem.V), "f4")
    portable.chain("backward_sweep", problem, records, spans, None, d_out=d_out, d_leaving=d_leaving,
                   d_entering=d_entering, d_states=d_states, d_values=d_values)
    return d_entering
