"""One engine's speed on one problem: checked against the machine's oracle in float64 first, then timed."""

from dataclasses import dataclass

from .problem import FORWARD, finite, passed, start_row
from .record import CONTROL, OURS
from .samples import uncertainty
from .stages import measure_stages

# How many times the samples that were asked for are taken at most.
MOST = 10


@dataclass(frozen=True)
class Setting:
    """How everything of one run is measured.

    samples: of each case. until: more of them, up to MOST times as many, until the median is as certain as this share of
    itself (`samples.uncertainty`); None for no more. cold: caches hold nothing of a call's data. graph: kernels are replayed as a CUDA graph.
    peers: names of those that are measured beside the forward.
    stages: also time the engine's stages and kernels one by one.
    """

    samples: int
    until: float | None
    cold: bool
    graph: bool
    peers: tuple
    stages: bool


def measure_problem(problem, whats, setting):
    """A record's rows for a Problem. whats: FORWARD, BOTH or both of them."""
    rows = [_measure(problem, what, setting) for what in whats]
    if setting.stages:
        rows += measure_stages(problem, setting.samples, setting.cold)
    return rows


def _measured(machine, calls, setting):
    """Samples of every call, as many as the Setting asks for."""
    taken = machine.measure(calls, setting.samples, setting.cold)
    while (setting.until is not None and uncertainty(taken[OURS]) > setting.until
           and len(taken[OURS]) < MOST * setting.samples):
        for name, more in machine.measure(calls, setting.samples, setting.cold).items():
            taken[name] = taken[name] + more
    return taken


def _measure(problem, what, setting):
    """A row for FORWARD or BOTH; without samples when the result fails its check."""
    machine = problem.machine
    row = start_row(problem, what, setting.cold, setting.graph, problem.error(what))
    row["bytes"], row["flops"] = problem.work(what)
    if not passed(row):
        return row
    call = problem.forward if what == FORWARD else problem.both
    # Of the call itself: a graph that is replayed allocates nothing.
    peak = machine.peak_bytes(call)
    if setting.graph:
        call = machine.capture(call)
        call()
        row["error"] = finite(problem.distance(call.result.out))
        if not passed(row):
            return row
    calls = {OURS: call, CONTROL: machine.control()}
    if what == FORWARD and setting.peers:
        row["peer_errors"] = {}
        for name in setting.peers:
            peer = machine.peers()[name](problem.inputs, problem.shape.cu_seqlens, problem.options)
            if peer is None:
                continue
            calls[name] = peer
            # A peer that computes something else must not pass for a fast one.
            row["peer_errors"][name] = problem.distance(calls[name]()[0].reshape(problem.inputs["v"].shape))
    before = machine.state()
    row["samples"] = _measured(machine, calls, setting)
    row["state"] = {"before": before, "after": machine.state()}
    row["host_seconds"] = machine.host_seconds(call)
    if peak is not None:
        row["peak_bytes"] = peak + problem.input_bytes(what)
    if setting.stages and not setting.graph:
        row["kernels"] = machine.kernel_seconds(call, setting.samples)
    return row
