"""The tuned path: everything of a chunk in one fused kernel, K = V = 128 and 16-bit inputs, on Hopper."""

import math
from functools import lru_cache

import cupy

from ..affine import Affine
from ..device.chain_plan import make_chain_plan
from ..device.kernels import CHAIN_BETAS, CHAIN_ELEMENTS, CHAIN_SIZE, FOLD_VARIANT, ChainVariant, certify_variant
from ..device.launch import Prepared, launch
from ..device.workspace import Workspace


def covers(problem, options):
    """Whether the kernel computes this problem: its operands' range relies on the gate, the norm and beta."""
    return (problem.target.hopper and problem.K == problem.V == CHAIN_SIZE and problem.element in CHAIN_ELEMENTS
            and options.gate == "lower_bound" and options.qk_l2norm and options.beta in CHAIN_BETAS)


def forward(problem, options, initial_state):
    """(out [T,HV,V] of the element type, final state [N,HV,K,V] float32) from the true initial states, None for zeros.
    """
    certified = options.skip == "certified"
    plan = _plan(problem, certified, initial_state is None)
    out, final_state = problem.empty_like_values(), problem.empty_states()
    scratch = None
    if plan.before is not None:
        size = plan.slots * problem.state_floats
        decided = plan.slots * problem.value_heads
        scratch = Workspace(carried=size, transitions=size, warmup=decided, bounds=decided)
        warmup = None
        if certified:
            warmup = scratch.warmup
            launch("certify_cuts", certify_variant(problem.element), problem.target, count=plan.slots,
                   g=problem.g, A_log=problem.A_log, dt_bias=problem.dt_bias, cuts=plan.cuts.rows,
                   warmup_chunks=warmup, bounds=scratch.bounds, heads=problem.value_heads,
                   lower_bound=options.lower_bound, log_tolerance=math.log(options.tolerance))
        _chain(problem, options, plan.before, None, initial_state, scratch.carried, scratch.transitions, warmup)
        _fold(problem, plan.chains, scratch.transitions, scratch.carried, warmup)
    _chain(problem, options, plan.forward, plan.columns, initial_state, None if scratch is None else scratch.carried,
           None, None, out=out, final_state=final_state)
    return out, final_state


def summarise(problem, options, initial_state, transition):
    """Affine(M, S) of every sequence; S is reached from initial_state; M None unless `transition`."""
    plan = _plan(problem, False, False)
    shape = (plan.summary_slots,) + initial_state.shape[1:]
    carried = cupy.empty(shape, "f4")
    folds = plan.summary_chains is not None
    transitions = cupy.empty(shape, "f4") if transition or folds else None
    _chain(problem, options, plan.summary if transition or folds else plan.summary_states, None, initial_state, carried,
           transitions, None)
    if not folds:
        return Affine(transitions, carried)
    _fold(problem, plan.summary_chains, transitions, carried, None)
    M = None
    if transition:
        # The same fold, from the first piece's transition and with nothing to add.
        products = cupy.zeros(shape, "f4")
        products[plan.first_slots] = transitions[plan.first_slots]
        _fold(problem, plan.summary_chains, transitions, products, None)
        M = products[plan.last_slots]
    return Affine(M, carried[plan.last_slots])


def _plan(problem, certified, from_zeros):
    return make_chain_plan(problem.cu_seqlens, problem.value_heads, problem.target.multiprocessors, certified,
                           from_zeros)


def _chain(problem, options, pieces, columns, initial_state, carried, transitions, warmup, out=None, final_state=None):
    """One launch over a table of pieces; columns None: nothing but what the pieces carry."""
    prepared = _prepare(problem.element, problem.heads, problem.value_heads, problem.target, options, pieces, columns)
    launch("sm90_chain", prepared, problem.target,
           q=problem.q, k=problem.k, v=problem.v, g=problem.g, beta=problem.beta, A_log=problem.A_log,
           dt_bias=problem.dt_bias, initial_state=initial_state, final_state=final_state, carried=carried,
           transitions=transitions, out=out, warmup_chunks=warmup)


@lru_cache(maxsize=64)
def _prepare(element, heads, value_heads, target, options, pieces, columns):
    """What does not change from launch to launch over a table."""
    variant = ChainVariant(element, options.beta, columns is not None, columns or CHAIN_SIZE)
    return Prepared(variant, count=target.multiprocessors, pieces=pieces.rows,
                    items=pieces.count * value_heads * (CHAIN_SIZE // variant.columns), key_heads=heads,
                    heads=value_heads, lower_bound=options.lower_bound, scale=options.scale_for(CHAIN_SIZE))


def _fold(problem, chains, transitions, carried, warmup):
    if chains is not None:
        launch("fold_states", FOLD_VARIANT, problem.target, count=chains.count, chains=chains.rows,
               transitions=transitions, carried=carried, warmup_chunks=warmup, heads=problem.value_heads)
