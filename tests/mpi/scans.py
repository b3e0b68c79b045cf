"""Run under mpirun: every scan on arrays in memory, every tensor against one rank's. Rank 0 prints a JSON line.

Bytes are counted and held against the closed formulas. No argument.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi4py import MPI
from mpi.all_cases import random_cuts
from mpi.decay_skip import LONGER

import kda_engine as kda
from kda_engine import cases, layout
from kda_engine.engines import make_engine
from kda_engine.layout import Operands
from kda_engine.partition import partition
from mpi_runner.parallel.boundary import BACKWARD, FORWARD
from mpi_runner.parallel.control import Control
from mpi_runner.parallel.problem import RankProblem, UnsuitableScan
from mpi_runner.parallel.routes import ROUTES
from mpi_runner.parallel.transports import HostTransport
from mpi_runner.parallel.volume import summed

# Relative errors; `test_main_job` holds certified runs to the bounds that their reports state.
EXACT, CERTIFIED = 1e-12, 1e-5

# Cases that are run by every way.
THOROUGH = ("ordinary", "packed", "empty-middle", "ragged", "grouped-heads", "odd-sizes", "heads-differ", "relay", "strong")
PER_TOKEN = ("q", "k", "v", "g", "beta")


def problems():
    """Cases in float64 without a convolution; some longer than usual, so that shares hold warm-ups."""
    for name in cases.names():
        case = cases.make(name, dtype="f8", **LONGER.get(name, {}))
        if case.conv is None:
            yield name, case


def whole(case):
    """All tensors of one process, by name."""
    given = (case.q, case.k, case.v, case.g, case.beta)
    fwd = kda.forward(*given, A_log=case.A_log, dt_bias=case.dt_bias, initial_state=case.initial_state,
                      cu_seqlens=case.cu_seqlens, options=case.options, engine="numpy")
    grads = kda.backward(fwd, case.d_out, case.d_final_state)
    return {"out": fwd.out, "final_state": fwd.final_state, **vars(grads)}


def of_rank(case, problem, segment):
    """This rank's part of all tensors, and whether the last walk was allowed; states in the case's layout."""
    tokens = slice(segment.start, segment.stop)
    state = lambda x, r: None if x is None else layout.state_out(x, case.options.state_layout)[r.start : r.stop]
    forward = problem.forward(state(case.initial_state, segment.started))
    gradients = problem.backward(forward, case.d_out[tokens], state(case.d_final_state, segment.ended))
    rows = lambda parts, like: np.concatenate(parts) if parts else like
    results = {"out": rows(forward.outs, case.v[tokens]), "final_state": forward.final_states,
               "d_initial_state": gradients.d_initial_states, **gradients.parameters}
    results |= {f"d{name}": rows(gradients.per_token(f"d{name}"), getattr(case, name)[tokens]) for name in PER_TOKEN}
    return results, forward


def mine_of(expected, segment, layout_of_states):
    """The same part of one process's tensors."""
    parts = {}
    for name, x in expected.items():
        if x is None:
            continue
        if name in ("final_state", "d_initial_state"):
            r = segment.ended if name == "final_state" else segment.started
            parts[name] = layout.state_out(x, layout_of_states)[r.start : r.stop]
        else:
            parts[name] = x if name in ("dA_log", "ddt_bias") else x[segment.start : segment.stop]
    return parts


def crossing_bytes(problem, forward):
    """Bytes that the closed formulas give this rank for both directions and the sum of the parameters."""
    rank = problem.segment.rank
    both = [problem.crossings(direction, forward.skips) for direction in (FORWARD, BACKWARD)]
    return sum(forward.route.sent(one)[rank] for one in both)


def ways(ranks):
    """(scan, nodes) of everything to run."""
    one = ["a"] * ranks
    ways = [(scan, one) for scan in (*ROUTES, "auto")]
    if ranks > 2:
        # Nodes of one size, and of two.
        ways += [("levels", [rank // 2 for rank in range(ranks)]), ("levels", [int(rank > 0) for rank in range(ranks)]),
                 ("auto", list(range(ranks)))]
    return ways


def runs(ranks, random_source):
    """(name, case, options, cuts, scan, nodes) of everything to run: some cases by every way, all others by some."""
    every = ways(ranks)
    for number, (name, case) in enumerate(problems()):
        exact = case.options
        certified = kda.Options(**exact.to_dict() | {"tolerance": 1e-6})
        anywhere = random_cuts(case.lengths, ranks, random_source)
        if name in THOROUGH:
            for way in every:
                yield name, case, exact, None, *way
                yield name, case, certified, anywhere, *way
        else:
            yield name, case, exact, anywhere, *every[number % len(every)]
            yield name, case, certified, None, *every[(number + 5) % len(every)]


def main():
    comm = MPI.COMM_WORLD
    control = Control(comm, timeout=60)
    transport = HostTransport(control)
    engine = make_engine("numpy", control.progress, 1)
    random_source = random.Random(2)
    failures, compared, refused, taken = [], 0, 0, {}
    expected = {}
    for name, case, options, cuts, scan, nodes in runs(comm.size, random_source):
        if name not in expected:
            expected = {name: whole(case)}
        segments = partition(np.concatenate([[0], np.cumsum(case.lengths)]), comm.size, cuts)
        segment = segments[comm.rank]
        tokens = slice(segment.start, segment.stop)
        parameters = (None, None) if case.options.gate == "log" else (case.A_log, case.dt_bias)
        operands = Operands(*(getattr(case, name)[tokens] for name in PER_TOKEN), *parameters, segment.cu_seqlens,
                            np.dtype("f8"))
        theirs = mine_of(expected[name], segment, case.options.state_layout)
        problem = RankProblem(engine, transport, scan, segments, operands, options, nodes=nodes)
        before = transport.sent
        try:
            ours, forward = of_rank(case, problem, segment)
        except UnsuitableScan:
            refused += scan == "neighbour"
            continue
        label = f"{name} {scan} {nodes} tolerance {options.tolerance} cuts {cuts} rank {comm.rank}"
        taken[forward.route.name] = taken.get(forward.route.name, 0) + 1
        shared = sum(x.size for tensor, x in ours.items() if tensor in ("dA_log", "ddt_bias"))
        sent, planned = transport.sent - before, crossing_bytes(problem, forward) + summed(8 * shared, comm.size)
        if sent != planned:
            failures.append(f"{label}: sent {sent} bytes, planned {planned}")
        if ours.keys() != theirs.keys():
            failures.append(f"{label}: {sorted(ours)} for {sorted(theirs)}")
        for tensor, x in theirs.items():
            compared += 1
            # Of a part of a tensor, which may be small beside the whole.
            error = np.linalg.norm((ours[tensor] - x).ravel())
            size = max(np.linalg.norm(np.ravel(expected[name][tensor])), 1e-30)
            if not error <= (CERTIFIED if options.tolerance else EXACT) * size:
                failures.append(f"{label}: {tensor} {error / size:.1e}")
    gathered = control.collect((failures, compared, refused, taken), "collecting")
    if comm.rank == 0:
        print(json.dumps({"failures": [text for row in gathered for text in row[0]][:20],
                          "failed": sum(len(row[0]) for row in gathered),
                          "compared": sum(row[1] for row in gathered), "refused": gathered[0][2],
                          "taken": gathered[0][3]}), flush=True)


if __name__ == "__main__":
    main()
