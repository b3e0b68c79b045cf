"""The tuned path's backward: a chain from the last chunk to the first, then all tiles of tokens side by side."""

import cupy

from ..device.kernels import BACKWARD_UNITS, CHAIN_SIZE, ChainVariant, element_variant, gradients_variant
from ..device.launch import launch
from ..device.workspace import Workspace
from ..gate import Gradients
from ..options import BETAS, GATES
from .cuda_chain import certify, chain, fold, is_bounded, make_records, plan_for


def backward(problem, options, saved, d_out, d_final_state):
    """`Gradients` of a forward that left a ChainSaved; d_out contiguous and of the element type."""
    certified = options.skip == "certified"
    plan = plan_for(problem, certified)
    scratch = _carry_to_cuts(problem, options, plan, certified, d_out, d_final_state, saved.scratch)
    records = make_records(problem, plan, BACKWARD_UNITS)
    d_initial_state = problem.empty_states()
    _sweep(problem, options, plan.backward.sweep, plan.columns, d_out, d_final_state,
           None if scratch is None else scratch.carried, None, d_initial_state, records)
    gradients = {f"d{name}": cupy.empty_like(getattr(problem, name)) for name in ("v", "g", "beta")}
    group = problem.value_heads // problem.heads
    # Of each value head where several share a key head: their sum is rounded once.
    shares = {f"d{name}": cupy.empty_like(x) if group == 1 else cupy.empty(problem.g.shape, "f4")
              for name, x in (("q", problem.q), ("k", problem.k))}
    of_bias = cupy.empty((plan.tiles.count, problem.value_heads, problem.K), "f4")
    of_rate = cupy.empty((plan.tiles.count, problem.value_heads, 8), "f4")
    launch("sm90_gradients", gradients_variant(problem.element, is_bounded(options), group > 1), problem.target,
           count=plan.tiles.count, q=problem.q, k=problem.k, g=problem.g, beta=problem.beta, A_log=problem.A_log,
           dt_bias=problem.dt_bias, d_out=d_out, states=saved.records.states, tokens=saved.records.tokens,
           units=saved.records.units, d_states=records.states, d_tokens=records.tokens, d_units=records.units,
           tiles=plan.tiles.rows,
           key_heads=problem.heads, value_heads=problem.value_heads, gate_form=GATES.index(options.gate),
           beta_form=BETAS.index(options.beta), lower_bound=options.lower_bound, scale=options.scale_for(problem.K),
           d_bias=of_bias, d_rate=of_rate, **gradients, **shares)
    return Gradients(**gradients, **_summed(problem, shares, group), dA_log=of_rate.sum(axis=(0, 2), dtype="f8"),
                     ddt_bias=of_bias.sum(axis=0, dtype="f8"), d_initial_state=d_initial_state)


def _summed(problem, shares, group):
    """dq and dk [T,H,K] from those by value head."""
    if group == 1:
        return shares
    sums = {name: cupy.empty_like(problem.q) for name in shares}
    rows = len(problem.q) * problem.heads
    for name, x in shares.items():
        launch("sum_groups", element_variant(problem.element), problem.target, count=rows, shares=x, rows=rows,
               group=group, sums=sums[name])
    return sums


def summarise(problem, options, d_out, d_final_state):
    """The gradient of the initial states [N,HV,K,V] reached from d_final_state; d_out as for `backward`."""
    plan = plan_for(problem, False)
    scratch = _carry_to_cuts(problem, options, plan, False, d_out, d_final_state, None)
    d_initial_state = problem.empty_states()
    _sweep(problem, options, plan.backward.first, plan.columns, d_out, d_final_state,
           None if scratch is None else scratch.carried, None, d_initial_state, None)
    return d_initial_state


def _carry_to_cuts(problem, options, plan, certified, d_out, d_final_state, forward_scratch):
    """Workspace with the gradient of the state at every cut as `carried`; None where nothing is cut.

    forward_scratch: the forward's, with all transitions between cuts, or None to find them here.
    """
    tables = plan.backward
    if tables.before is None:
        return None
    size = plan.slots * problem.state_floats
    decided = plan.slots * problem.value_heads
    scratch = Workspace(carried=size, transitions=0 if forward_scratch else size, warmup=decided, bounds=decided)
    warmup = None
    if certified:
        warmup = scratch.warmup
        certify(problem, options, plan.slots, tables.cuts, scratch, reversed=True)
    _sweep(problem, options, tables.before, CHAIN_SIZE, d_out, d_final_state, scratch.carried, warmup, None, None)
    if tables.chains is not None:
        if forward_scratch is None:
            transitions = scratch.transitions
            chain(problem, options, tables.transitions, None, None, None, transitions, warmup)
        else:
            # There a transition lies in the slot behind its piece, here in the one before it.
            transitions = forward_scratch.transitions + 4 * problem.transition_floats
        fold(problem, tables.chains, transitions, scratch.carried, warmup, reversed=True)
    return scratch


def _sweep(problem, options, pieces, columns, d_out, d_final_state, carried, warmup, d_initial_state, records):
    """One launch over a table of pieces; records None: nothing but what the pieces carry."""
    variant = ChainVariant(problem.element, is_bounded(options), columns, True, records is not None, True)
    launch("sm90_backward_chain", variant, problem.target, count=problem.target.multiprocessors,
           q=problem.q, k=problem.k, d_out=d_out, g=problem.g, beta=problem.beta, A_log=problem.A_log,
           dt_bias=problem.dt_bias, d_final_state=d_final_state, d_initial_state=d_initial_state, carried=carried,
           states=records and records.states, tokens=records and records.tokens, units=records and records.units,
           pieces=pieces.rows, warmup_chunks=warmup,
           items=pieces.count * problem.value_heads * (CHAIN_SIZE // columns), key_heads=problem.heads,
           value_heads=problem.value_heads, gate_form=GATES.index(options.gate), beta_form=BETAS.index(options.beta),
           lower_bound=options.lower_bound, scale=options.scale_for(problem.K))
