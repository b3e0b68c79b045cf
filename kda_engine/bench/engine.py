"""One engine's speed on one problem: checked against the machine's oracle in float64 first, then timed."""

from dataclasses import dataclass

from .problem import FORWARD, finite, passed, start_row
from .record import CONTROL, OURS
from .stages import measure_stages


@dataclass(frozen=True)
class Setting:
    """How everything of one run is measured.

    samples: of each case. cold: caches hold nothing of a call's data. graph: kernels are replayed as a CUDA graph.
    peers: names of those that are measured beside the forward.
    stages: also time the engine's stages and kernels one by one.
    """

    samples: int
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
    row["samples"] = machine.measure(calls, setting.samples, setting.cold)
    row["state"] = {"before": before, "after": machine.state()}
    row["host_seconds"] = machine.host_seconds(call)
    if peak is not None:
        row["peak_bytes"] = peak + problem.input_bytes(what)
    if setting.stages and not setting.graph:
        row["kernels"] = machine.kernel_seconds(call, setting.samples)
    return row
