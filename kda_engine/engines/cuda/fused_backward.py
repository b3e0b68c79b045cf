"""The fused path's backward: a chain from the last chunk to the first, then all tiles of tokens side by side."""

import cupy

from ...device.kernels import BACKWARD_UNITS, CHAIN_SIZE, ChainVariant, element_variant, gradients_variant
from ...device.launch import launch
from ...device.workspace import Workspace
from .cuts import Cuts
from .fused import certify, chain, fold, make_records, plan_for


def backward(problem, record, d_out, d_final_state, gradients):
    """Of a forward that left a Record: writes the tokens' `gradients`; returns those of the initial states, of A_log [HV]
    and dt_bias [HV,K], float64, and the Cuts that were certified, or None. d_out: contiguous, of the element type.
    """
    certified = problem.options.skip == "certified"
    plan = plan_for(problem, certified)
    scratch, cuts = _carry_to_cuts(problem, plan, certified, d_out, d_final_state, record.scratch)
    records = make_records(problem, plan, BACKWARD_UNITS)
    d_initial_state = problem.empty_states()
    _sweep(problem, plan.backward.sweep, plan.columns, d_out, d_final_state,
           None if scratch is None else scratch.carried, None, d_initial_state, records)
    group = problem.value_heads // problem.heads
    # Of each value head where several share a key head: their sum is rounded once.
    shares = {name: gradients[name] if group == 1 else cupy.empty(problem.g.shape, "f4") for name in ("dq", "dk")}
    of_bias = cupy.empty((plan.tiles.count, problem.value_heads, problem.K), "f4")
    of_rate = cupy.empty((plan.tiles.count, problem.value_heads, 8), "f4")
    launch("sm90_gradients", gradients_variant(problem.element, problem.activation.bounded, group > 1), problem.device,
           count=plan.tiles.count, q=problem.q, k=problem.k, g=problem.g, beta=problem.beta, A_log=problem.A_log,
           dt_bias=problem.dt_bias, d_out=d_out, states=record.records.states, tokens=record.records.tokens,
           units=record.records.units, d_states=records.states, d_tokens=records.tokens, d_units=records.units,
           tiles=plan.tiles.rows, key_heads=problem.heads, value_heads=problem.value_heads, d_bias=of_bias, d_rate=of_rate,
           **gradients | shares, **problem.activation.arguments)
    if group > 1:
        rows = len(problem.q) * problem.heads
        for name, x in shares.items():
            launch("sum_groups", element_variant(problem.element), problem.device, count=rows, shares=x, rows=rows,
                   group=group, sums=gradients[name])
    return d_initial_state, of_rate.sum(axis=(0, 2), dtype="f8"), of_bias.sum(axis=0, dtype="f8"), cuts


def summarise(problem, d_out, d_final_state):
    """The gradient of the initial states [N,HV,K,V] reached from d_final_state; d_out as for `backward`."""
    plan = plan_for(problem, False)
    scratch, _ = _carry_to_cuts(problem, plan, False, d_out, d_final_state, None)
    d_initial_state = problem.empty_states()
    _sweep(problem, plan.backward.first, plan.columns, d_out, d_final_state,
           None if scratch is None else scratch.carried, None, d_initial_state, None)
    return d_initial_state


def _carry_to_cuts(problem, plan, certified, d_out, d_final_state, forward_scratch):
    """(Workspace with the gradient of the state at every cut as `carried`, Cuts where they were certified).

    None for both where nothing is cut. forward_scratch: the forward's, with all transitions between cuts, or None to
    find them here.
    """
    tables, cuts, warmup = plan.backward, None, 0
    if tables.before is None:
        return None, None
    size = plan.slots * problem.state_floats
    scratch = Workspace(carried=size, transitions=0 if forward_scratch else size)
    if certified:
        cuts = Cuts(problem, plan, d_final_state, d_out, certify(problem, tables.cuts, reversed=True))
        warmup = cuts.warmup
    _sweep(problem, tables.before, CHAIN_SIZE, d_out, d_final_state, scratch.carried, warmup, None, None)
    if tables.chains is not None:
        if forward_scratch is None:
            transitions = scratch.transitions
            chain(problem, tables.transitions, None, None, 0, transitions, warmup)
        else:
            # There a transition lies in the slot behind its piece, here in the one before it.
            transitions = forward_scratch.transitions + 4 * problem.transition_floats
        fold(problem, tables.chains, transitions, scratch.carried, warmup, reversed=True)
    return scratch, cuts


def _sweep(problem, pieces, columns, d_out, d_final_state, carried, warmup, d_initial_state, records):
    """One launch over a table of pieces; records None: nothing but what the pieces carry."""
    variant = ChainVariant(problem.element, problem.activation.bounded, columns, True, records is not None, True)
    launch("sm90_backward_chain", variant, problem.device, count=problem.target.multiprocessors,
           q=problem.q, k=problem.k, d_out=d_out, g=problem.g, beta=problem.beta, A_log=problem.A_log,
           dt_bias=problem.dt_bias, d_final_state=d_final_state, d_initial_state=d_initial_state, carried=carried,
           states=records and records.states, tokens=records and records.tokens, units=records and records.units,
           pieces=pieces.rows, warmup_chunks=warmup,
           items=pieces.count * problem.value_heads * (CHAIN_SIZE // columns), key_heads=problem.heads,
           value_heads=problem.value_heads, **problem.activation.arguments)
