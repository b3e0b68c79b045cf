"""The fused path: everything of a chunk in one fused kernel, K = V = 128 and 16-bit inputs, on Hopper."""

from dataclasses import dataclass

import cupy

from ...affine import Affine
from ...device.plans.fused import TILE_TOKENS, make_chain_plan
from ...device.kernels.fused import (BACKWARD_UNITS, CHAIN_ELEMENTS, CHAIN_SIZE, ChainVariant, FORWARD_UNITS,
                                     STATE_WORDS, TOKEN_WORDS)
from ...device.launch import Prepared
from ...device.workspace import Workspace
from .carry import carry_to_cuts, fold

# Made in every saving call and therefore not frozen, as `slabs.Kept`.
@dataclass
class Record:
    """What a forward left for its gradients.

    records: Workspace with states, tokens and units (kernels_cu/tile/fused/record.cuh). scratch: Workspace with the
    transitions of the pieces between two cuts, each in the slot behind it; None where there are none or not all.
    """

    records: Workspace
    scratch: Workspace | None


def covers(problem):
    """Whether the kernels compute this problem: their operands' range relies on the norm and on beta within [0, 2]."""
    return (problem.target.hopper and problem.K == problem.V == CHAIN_SIZE and problem.element in CHAIN_ELEMENTS
            and problem.options.qk_l2norm and problem.options.beta != "value")


def shape_allows(problem):
    """Whether the kernels compute problems of this shape on this device."""
    return problem.target.hopper and problem.K == problem.V == CHAIN_SIZE


def refusal(problem):
    """What keeps a problem off this path, in words; None where it is covered."""
    if covers(problem):
        return None
    if not problem.target.hopper:
        return f"the device is {problem.target.architecture}, expected sm_90a"
    if not problem.K == problem.V == CHAIN_SIZE:
        return f"K = {problem.K}, V = {problem.V}, expected {CHAIN_SIZE} both"
    if problem.element not in CHAIN_ELEMENTS:
        return f"computed in {problem.element}, expected q, k, v, g and beta all {' or all '.join(CHAIN_ELEMENTS)}"
    if not problem.options.qk_l2norm:
        return "qk_l2norm is off, expected on"
    return f"beta is {problem.options.beta!r}, expected 'logit' or 'logit2'"


def record_bytes(problem):
    """Bytes of the records of both directions, or a little more."""
    tiles = len(problem.v) // TILE_TOKENS + problem.sequences
    words = 2 * (STATE_WORDS + TOKEN_WORDS) + FORWARD_UNITS + BACKWARD_UNITS
    return 4 * words * tiles * problem.value_heads


def forward(problem, initial_state, save, out, final_state):
    """Writes out [T,HV,V] of the element type and the final state [N,HV,K,V] float32.

    initial_state: the true ones, None for zeros. Returns (Record if `save`, Cuts if some were certified), else None.
    """
    certified = problem.options.skip == "certified"
    plan = plan_for(problem, certified)

    def run_pieces(scratch, warmup):
        chain(problem, plan.before, None, initial_state, scratch.carried, scratch.transitions, warmup)

    scratch, cuts = carry_to_cuts(problem, plan, False, initial_state, None, run_pieces)
    records = make_records(problem, plan, FORWARD_UNITS) if save else None
    chain(problem, plan.forward, plan.columns, initial_state, 0 if scratch is None else scratch.carried, 0, 0, out,
          final_state, records)
    return Record(records, None if certified else scratch) if save else None, cuts


def summarise(problem, initial_state, transition):
    """Affine(M, S) of every sequence; S is reached from initial_state; M None unless `transition`."""
    plan = plan_for(problem, False)
    shape = (plan.summary_slots,) + initial_state.shape[1:]
    carried = cupy.empty(shape, "f4")
    folds = plan.summary_chains is not None
    transitions = cupy.empty(shape, "f4") if transition or folds else None
    chain(problem, plan.summary if transition or folds else plan.summary_states, None, initial_state, carried.data.ptr,
          0 if transitions is None else transitions.data.ptr)
    if not folds:
        return Affine(transitions, carried)
    fold(problem, plan.summary_chains, transitions.data.ptr, carried.data.ptr, 0, reversed=False)
    M = None
    if transition:
        # The same fold, from the first piece's transition and with nothing to add.
        products = cupy.zeros(shape, "f4")
        products[plan.first_slots] = transitions[plan.first_slots]
        fold(problem, plan.summary_chains, transitions.data.ptr, products.data.ptr, 0, reversed=False)
        M = products[plan.last_slots]
    return Affine(M, carried[plan.last_slots])


def plan_for(problem, certified):
    """The ChainPlan of a problem."""
    return problem.device.ready(make_chain_plan, problem.cu_seqlens.tobytes(), problem.value_heads, certified)


def make_records(problem, plan, units):
    """Room for the records of one direction."""
    count = plan.tiles.count * problem.value_heads
    return Workspace(states=count * STATE_WORDS, tokens=count * TOKEN_WORDS, units=count * units)


def chain(problem, pieces, columns, initial_state, carried, transitions, warmup=0, out=None, final_state=None,
          records=None):
    """One launch over a table of pieces; columns None: nothing but what the pieces carry. carried, transitions, warmup:
    addresses, 0 for none.
    """
    start = problem.device.ready(_prepare_chain, problem.element, problem.heads, problem.value_heads,
                                 problem.activation, pieces, columns, records is not None)
    of_records = (0, 0, 0) if records is None else (records.states, records.tokens, records.units)
    start(*problem.addresses, 0 if initial_state is None else initial_state.data.ptr,
          0 if final_state is None else final_state.data.ptr, carried, transitions, 0 if out is None else out.data.ptr,
          *of_records, warmup)


def _prepare_chain(device, element, heads, value_heads, activation, pieces, columns, saves):
    """What does not change from launch to launch over a table."""
    variant = ChainVariant(element, activation.bounded, columns or CHAIN_SIZE, columns is not None, saves, False)
    order = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "final_state", "carried", "transitions",
             "out", "states", "tokens", "units", "warmup_chunks")
    return Prepared("sm90_chain", variant, device, order, count=device.target.multiprocessors, pieces=pieces.rows,
                    items=pieces.count * value_heads * (CHAIN_SIZE // variant.columns), key_heads=heads,
                    value_heads=value_heads, **activation.arguments)
