"""What is carried to the cuts of a problem that the fused path cuts for itself, forward and backward alike."""

import math

from ...device.plans.fused import FORWARD_TRANSITION
from ...device.kernels.fused import certify_variant, fold_variant
from ...device.launch import Prepared
from ...device.workspace import Workspace
from .cuts import Cuts
from .decay import float32_above


def carry_to_cuts(problem, plan, reversed, boundary, d_out, run_pieces, of_forward=None):
    """(Workspace with the state at every cut as `carried`, or the gradient of it, and the transitions of the pieces as
    `transitions`; the Cuts where they were certified). None for both where nothing is cut.

    plan: the ChainPlan. boundary, d_out: as in Cuts. run_pieces(scratch, warmup): launches the pieces next to the cuts
    from zero, and their transitions unless those `of_forward` are given, the forward's Workspace.
    """
    tables = plan.backward if reversed else plan
    if tables.before is None:
        return None, None
    size = plan.slots * problem.state_floats
    scratch = Workspace(carried=size, transitions=0 if of_forward else size)
    cuts, warmup = None, 0
    if problem.options.skip == "certified":
        cuts = Cuts(problem, plan, boundary, d_out, _certify(problem, tables.cuts, reversed))
        warmup = cuts.warmup
    run_pieces(scratch, warmup)
    if of_forward is None:
        fold(problem, tables.chains, scratch.transitions, scratch.carried, warmup, reversed)
    else:
        fold(problem, tables.chains, of_forward.transitions, scratch.carried, warmup, reversed, FORWARD_TRANSITION)
    return scratch, cuts


def _certify(problem, cuts, reversed):
    """Workspace with how many chunks next to each cut determine what is carried there, as `warmup` [cuts,HV] int32."""
    decided = cuts.count * problem.value_heads
    scratch = Workspace(warmup=decided, bounds=decided)
    start = problem.device.ready(_prepare_certify, problem.element, problem.value_heads, problem.activation,
                                 problem.options.tolerance, cuts, reversed)
    g, A_log, dt_bias = problem.addresses[3], *problem.addresses[5:]
    start(g, A_log, dt_bias, scratch.warmup, scratch.bounds)
    return scratch


def _prepare_certify(device, element, value_heads, activation, tolerance, cuts, reversed):
    # Rounded so that no bound comes out smaller, and none passes that is above the tolerance.
    rounded = {"lower_bound": float32_above(activation.lower_bound),
               "log_tolerance": -float32_above(-math.log(tolerance))}
    return Prepared("certify_cuts", certify_variant(element, reversed), device,
                    ("g", "A_log", "dt_bias", "warmup_chunks", "bounds"), count=cuts.count, cuts=cuts.rows,
                    value_heads=value_heads, **activation.arguments | rounded)


def fold(problem, chains, transitions, carried, warmup, reversed, slots_behind=0):
    """What is carried to the slots, from what each piece carries from zero; chains None: it is that already.

    slots_behind: how far behind a piece's slot its transition lies.
    """
    if chains is not None:
        problem.device.ready(_prepare_fold, problem.value_heads, chains, reversed, slots_behind)(
            transitions, carried, warmup)


def _prepare_fold(device, value_heads, chains, reversed, slots_behind):
    return Prepared("fold_states", fold_variant(reversed), device, ("transitions", "carried", "warmup_chunks"),
                    count=chains.count, chains=chains.rows, value_heads=value_heads, slots_behind=slots_behind)
