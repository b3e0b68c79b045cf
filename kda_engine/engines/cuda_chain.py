"""The tuned path: everything of a chunk in one fused kernel, K = V = 128 and 16-bit inputs, on Hopper."""

import math
from dataclasses import dataclass
from functools import lru_cache

import cupy

from ..affine import Affine
from ..device.chain_plan import make_chain_plan
from ..device.kernels import (CHAIN_ELEMENTS, CHAIN_SIZE, FORWARD_UNITS, STATE_WORDS, TOKEN_WORDS, ChainVariant,
                              certify_variant, fold_variant)
from ..device.launch import Prepared, address, launch
from ..device.workspace import Workspace
from ..options import BETAS, GATES

# The share of the device's memory that the records of a forward may take; the backward makes as many again.
MOST_MEMORY = 0.2


@dataclass(frozen=True)
class ChainSaved:
    """What a forward left for its gradients.

    records: Workspace with states, tokens and units (kernels_cu/tile/fused/record.cuh). scratch: Workspace with the
    transitions of the pieces between two cuts, each in the slot behind it; None where there are none or not all.
    """

    records: Workspace
    scratch: Workspace | None


def covers(problem, options):
    """Whether the kernel computes this problem: its operands' range relies on the norm and on beta within [0, 2]."""
    return (problem.target.hopper and problem.K == problem.V == CHAIN_SIZE and problem.element in CHAIN_ELEMENTS
            and options.qk_l2norm and options.beta != "value")


def is_bounded(options):
    """Whether the kernels for gates with a bound compute it, or those for any."""
    return options.gate == "lower_bound"


def forward(problem, options, initial_state, save):
    """(out [T,HV,V] of the element type, final state [N,HV,K,V] float32, ChainSaved or None).

    initial_state: the true ones, None for zeros. Nothing is saved where the records would take too much memory.
    """
    certified = options.skip == "certified"
    plan = plan_for(problem, certified)
    out, final_state = problem.empty_like_values(), problem.empty_states()
    scratch = None
    if plan.before is not None:
        size = plan.slots * problem.state_floats
        decided = plan.slots * problem.value_heads
        scratch = Workspace(carried=size, transitions=size, warmup=decided, bounds=decided)
        warmup = None
        if certified:
            warmup = scratch.warmup
            certify(problem, options, plan.slots, plan.cuts, scratch, reversed=False)
        chain(problem, options, plan.before, None, initial_state, scratch.carried, scratch.transitions, warmup)
        fold(problem, plan.chains, scratch.transitions, scratch.carried, warmup, reversed=False)
    records = None
    if save:
        records = make_records(problem, plan, FORWARD_UNITS)
    chain(problem, options, plan.forward, plan.columns, initial_state, None if scratch is None else scratch.carried,
          None, None, out, final_state, records)
    saved = None if records is None else ChainSaved(records, None if certified else scratch)
    return out, final_state, saved


def summarise(problem, options, initial_state, transition):
    """Affine(M, S) of every sequence; S is reached from initial_state; M None unless `transition`."""
    plan = plan_for(problem, False)
    shape = (plan.summary_slots,) + initial_state.shape[1:]
    carried = cupy.empty(shape, "f4")
    folds = plan.summary_chains is not None
    transitions = cupy.empty(shape, "f4") if transition or folds else None
    chain(problem, options, plan.summary if transition or folds else plan.summary_states, None, initial_state, carried,
          transitions, None)
    if not folds:
        return Affine(transitions, carried)
    fold(problem, plan.summary_chains, transitions, carried, None, reversed=False)
    M = None
    if transition:
        # The same fold, from the first piece's transition and with nothing to add.
        products = cupy.zeros(shape, "f4")
        products[plan.first_slots] = transitions[plan.first_slots]
        fold(problem, plan.summary_chains, transitions, products, None, reversed=False)
        M = products[plan.last_slots]
    return Affine(M, carried[plan.last_slots])


def plan_for(problem, certified):
    """The ChainPlan of a problem."""
    return make_chain_plan(problem.cu_seqlens, problem.value_heads, problem.target.multiprocessors, certified)


def make_records(problem, plan, units):
    """Room for the records of one direction, None where they would take too much memory."""
    count = plan.tiles.count * problem.value_heads
    if 4 * count * STATE_WORDS > MOST_MEMORY * problem.target.memory:
        return None
    return Workspace(states=count * STATE_WORDS, tokens=count * TOKEN_WORDS, units=count * units)


def certify(problem, options, slots, cuts, scratch, reversed):
    """How many chunks next to each cut determine what is carried there: scratch.warmup."""
    launch("certify_cuts", certify_variant(problem.element, reversed), problem.target, count=slots, g=problem.g,
           A_log=problem.A_log, dt_bias=problem.dt_bias, cuts=cuts.rows, warmup_chunks=scratch.warmup,
           bounds=scratch.bounds, value_heads=problem.value_heads, gate_form=GATES.index(options.gate),
           lower_bound=options.lower_bound, log_tolerance=math.log(options.tolerance))


def chain(problem, options, pieces, columns, initial_state, carried, transitions, warmup, out=None, final_state=None,
          records=None):
    """One launch over a table of pieces; columns None: nothing but what the pieces carry."""
    start = _prepare_chain(problem.element, problem.heads, problem.value_heads, problem.target, options, pieces,
                           columns, records is not None)
    of_records = (0, 0, 0) if records is None else (records.states, records.tokens, records.units)
    start(*problem.addresses, address(initial_state), address(final_state), address(carried), address(transitions),
          address(out), *of_records, address(warmup))


@lru_cache(maxsize=64)
def _prepare_chain(element, heads, value_heads, target, options, pieces, columns, saves):
    """What does not change from launch to launch over a table."""
    variant = ChainVariant(element, is_bounded(options), columns or CHAIN_SIZE, columns is not None, saves, False)
    order = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "final_state", "carried", "transitions",
             "out", "states", "tokens", "units", "warmup_chunks")
    return Prepared("sm90_chain", variant, target, order, count=target.multiprocessors, pieces=pieces.rows,
                    items=pieces.count * value_heads * (CHAIN_SIZE // variant.columns), key_heads=heads,
                    value_heads=value_heads, gate_form=GATES.index(options.gate), beta_form=BETAS.index(options.beta),
                    lower_bound=options.lower_bound, scale=options.scale_for(CHAIN_SIZE))


def fold(problem, chains, transitions, carried, warmup, reversed):
    """What is carried to the cuts, from what each piece carries from zero; chains None: it is that already."""
    if chains is not None:
        _prepare_fold(problem.value_heads, problem.target, chains, reversed)(
            address(transitions), address(carried), address(warmup))


@lru_cache(maxsize=64)
def _prepare_fold(value_heads, target, chains, reversed):
    return Prepared("fold_states", fold_variant(reversed), target, ("transitions", "carried", "warmup_chunks"),
                    count=chains.count, chains=chains.rows, value_heads=value_heads)
