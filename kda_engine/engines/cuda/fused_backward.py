"""The fused path's backward: a chain from the last chunk to the first, then all tiles of tokens side by side."""

import cupy

from ...device.kernels.fused import BACKWARD_UNITS, CHAIN_SIZE, ChainVariant, gradients_variant
from ...device.kernels.table import element_variant
from ...device.launch import Prepared, launch
from .carry import carry_to_cuts
from .fused import chain, make_records, plan_for


def backward(problem, record, d_out, d_final_state, gradients):
    """Of a forward that left a Record: writes the tokens' `gradients`; returns those of the initial states, of A_log [HV]
    and dt_bias [HV,K], float64, and the Cuts that were certified, or None. d_out: contiguous, of the element type.
    """
    d_initial_state = problem.empty_states()
    of_rate, of_bias, cuts = launch_all(problem, record, d_out, d_final_state, gradients, d_initial_state)
    return d_initial_state, *sum_tiles(of_rate, of_bias), cuts


def sum_tiles(of_rate, of_bias):
    """The gradients of A_log and dt_bias, float64, from those by tile."""
    return of_rate.sum(axis=(0, 2), dtype="f8"), of_bias.sum(axis=0, dtype="f8")


def launch_all(problem, record, d_out, d_final_state, gradients, d_initial_state):
    """Every kernel of `backward`; returns the gradients of A_log [tiles,HV,8] and dt_bias [tiles,HV,K] by tile, float32,
    and the Cuts.
    """
    plan = plan_for(problem, problem.options.skip == "certified")
    scratch, cuts = _carry(problem, plan, d_out, d_final_state, record.scratch)
    records = make_records(problem, plan, BACKWARD_UNITS)
    sweep(problem, plan.backward.sweep, plan.columns, d_out, d_final_state,
          0 if scratch is None else scratch.carried, 0, d_initial_state, records)
    group = problem.value_heads // problem.heads
    # Of each value head where several share a key head: their sum is rounded once.
    shares = {name: gradients[name] if group == 1 else cupy.empty(problem.g.shape, "f4") for name in ("dq", "dk")}
    of_bias = cupy.empty((plan.tiles.count, problem.value_heads, problem.K), "f4")
    of_rate = cupy.empty((plan.tiles.count, problem.value_heads, 8), "f4")
    q, k, _, g, beta, A_log, dt_bias = problem.addresses
    results = gradients | shares
    problem.device.ready(_prepare_gradients, problem.element, problem.heads, problem.value_heads, problem.activation,
                         plan.tiles)(
        q, k, g, beta, A_log, dt_bias, d_out.data.ptr, *_of(record.records), *_of(records),
        *(results[name].data.ptr for name in ("dq", "dk", "dv", "dg", "dbeta")), of_bias.data.ptr, of_rate.data.ptr)
    if group > 1:
        rows = len(problem.q) * problem.heads
        for name, x in shares.items():
            launch("sum_groups", element_variant(problem.element), problem.device, count=rows, shares=x, rows=rows,
                   group=group, sums=gradients[name])
    return of_rate, of_bias, cuts


def summarise(problem, d_out, d_final_state):
    """The gradient of the initial states [N,HV,K,V] reached from d_final_state; d_out as for `backward`."""
    plan = plan_for(problem, False)
    scratch, _ = _carry(problem, plan, d_out, d_final_state, None)
    d_initial_state = problem.empty_states()
    sweep(problem, plan.backward.first, plan.columns, d_out, d_final_state,
          0 if scratch is None else scratch.carried, 0, d_initial_state, None)
    return d_initial_state


def _carry(problem, plan, d_out, d_final_state, of_forward):
    """`carry_to_cuts` of the backward. of_forward: the forward's Workspace with all transitions, None to find them here."""
    tables = plan.backward

    def run_pieces(scratch, warmup):
        sweep(problem, tables.before, CHAIN_SIZE, d_out, d_final_state, scratch.carried, warmup, None, None)
        if tables.transitions is not None and of_forward is None:
            chain(problem, tables.transitions, None, None, 0, scratch.transitions, warmup)

    return carry_to_cuts(problem, plan, True, d_final_state, d_out, run_pieces, of_forward)


def sweep(problem, pieces, columns, d_out, d_final_state, carried, warmup, d_initial_state, records):
    """One launch over a table of pieces; records None: nothing but what the pieces carry. carried, warmup: addresses, 0 for
    none.
    """
    start = problem.device.ready(_prepare_sweep, problem.element, problem.heads, problem.value_heads,
                                 problem.activation, pieces, columns, records is not None)
    q, k, _, *rest = problem.addresses
    start(q, k, d_out.data.ptr, *rest, 0 if d_final_state is None else d_final_state.data.ptr,
          0 if d_initial_state is None else d_initial_state.data.ptr, carried, *_of(records), warmup)


def _of(records):
    return (0, 0, 0) if records is None else (records.states, records.tokens, records.units)


def _prepare_sweep(device, element, heads, value_heads, activation, pieces, columns, saves):
    variant = ChainVariant(element, activation.bounded, columns, True, saves, True)
    order = ("q", "k", "d_out", "g", "beta", "A_log", "dt_bias", "d_final_state", "d_initial_state", "carried", "states",
             "tokens", "units", "warmup_chunks")
    return Prepared("sm90_backward_chain", variant, device, order, count=device.target.multiprocessors,
                    pieces=pieces.rows, items=pieces.count * value_heads * (CHAIN_SIZE // columns), key_heads=heads,
                    value_heads=value_heads, **activation.arguments)


def _prepare_gradients(device, element, heads, value_heads, activation, tiles):
    order = ("q", "k", "g", "beta", "A_log", "dt_bias", "d_out", "states", "tokens", "units", "d_states", "d_tokens",
             "d_units", "dq", "dk", "dv", "dg", "dbeta", "d_bias", "d_rate")
    return Prepared("sm90_gradients", gradients_variant(element, activation.bounded, value_heads > heads), device, order,
                    count=tiles.count, tiles=tiles.rows, key_heads=heads, value_heads=value_heads,
                    **activation.arguments)
