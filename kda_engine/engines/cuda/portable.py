"""The portable path: prepared chunks in global memory, then one chain of chunks per span, head and column tile."""

import cupy

from ...affine import Affine
from ...device.launch import launch
from ...device.workspace import Workspace


def record_bytes(problem):
    """Bytes of every chunk's operands, or a little more."""
    return 4 * problem.most_chunks * problem.value_heads * problem.variant.record


def forward(problem, initial_state, out, final_state):
    """Writes out [T,HV,V] of the element type and the final state [N,HV,K,V] float32. initial_state: None for zeros."""
    if initial_state is None:
        initial_state = problem.zero_states()
    plan = problem.plan
    if plan.parts is None:
        scratch = Workspace(records=_record_floats(problem))
        prepare(problem, True, scratch.records)
        spans, initial = plan.whole, initial_state
    else:
        # The state that enters every part: summaries of all but the last, side by side, then a scan.
        maps, states = plan.parts_but_last.count, plan.parts.count
        scratch = Workspace(records=_record_floats(problem), M=maps * problem.transition_floats,
                            S=maps * problem.state_floats, states=states * problem.state_floats)
        prepare(problem, True, scratch.records)
        chain("summary", problem, scratch.records, plan.parts_but_last, None, transition=scratch.M, reached=scratch.S)
        scan(problem, scratch.M, scratch.S, initial_state, plan.sequence_parts, scratch.states)
        spans, initial = plan.parts, scratch.states
    chain("forward", problem, scratch.records, spans, initial, out=out, final=final_state)


def summarise(problem, initial_state, transition):
    """Affine(M, S) of every sequence; S is reached from initial_state; M None unless `transition`."""
    plan, (N, HV, K, V) = problem.plan, initial_state.shape
    if plan.parts is None:
        scratch = Workspace(records=_record_floats(problem))
        prepare(problem, False, scratch.records)
        M = cupy.empty((N, HV, K, K), "f4") if transition else None
        S = cupy.empty_like(initial_state)
        chain("summary", problem, scratch.records, plan.whole, initial_state, transition=M, reached=S)
        return Affine(M, S)
    maps = plan.parts.count
    scratch = Workspace(records=_record_floats(problem), M=maps * problem.transition_floats,
                        S=maps * problem.state_floats)
    prepare(problem, False, scratch.records)
    chain("summary", problem, scratch.records, plan.parts, None, transition=scratch.M, reached=scratch.S)

    def behind(initial, reached):
        states = cupy.empty((maps + N,) + initial.shape[1:], "f4")
        scan(problem, scratch.M, reached, initial, plan.sequence_bounds, states)
        return states[plan.sequence_bounds[1:] - 1]

    identity = Affine.identity((N, HV), K, V, "f4", cupy).M
    return Affine(behind(identity, None) if transition else None, behind(initial_state, scratch.S))


def _record_floats(problem):
    """Size of every chunk's operands."""
    return problem.plan.chunks * problem.value_heads * problem.variant.record


def prepare(problem, with_query, records):
    """Every chunk's operands into records [chunks, HV, record]."""
    plan = problem.plan
    launch("prepare", problem.variant, problem.device, count=plan.chunks,
           q=problem.q if with_query else None, k=problem.k, g=problem.g, beta=problem.beta,
           A_log=problem.A_log, dt_bias=problem.dt_bias, cu_seqlens=plan.cu_seqlens, chunk_offsets=plan.chunk_offsets,
           sequences=plan.sequences, key_heads=problem.heads, value_heads=problem.value_heads, key_size=problem.K,
           records=records, **problem.activation.arguments)


def scan(problem, M, S, initial_state, sequence_spans, states):
    """The state that enters each span [spans,HV,K,columns of initial_state], from the maps between them."""
    sizes = problem.sizes | {"value_size": initial_state.shape[3]}
    launch("scan", problem.variant, problem.device, count=len(initial_state), transition=M, reached=S,
           initial=initial_state, sequence_spans=sequence_spans, states=states, **sizes)


def chain(name, problem, records, spans, initial, **results):
    """Launch a kernel that works through spans of prepared chunks."""
    plan = problem.plan
    launch(name, problem.variant, problem.device, count=spans.count, records=records, v=problem.v, initial=initial,
           cu_seqlens=plan.cu_seqlens, chunk_offsets=plan.chunk_offsets, span_chunks=spans.chunks,
           span_sequences=spans.sequences, spans=spans.count, **problem.sizes, **results)
