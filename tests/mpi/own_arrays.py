"""Run under mpirun: `kda.distributed` on every rank's own arrays, every tensor against one rank's. A JSON line.

Also what it refuses, and that results of calls do not disturb each other.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi4py import MPI
from mpi.all_cases import random_cuts
from mpi.scans import whole

import kda_engine as kda
from kda_engine import cases
from kda_engine.partition import partition

PER_TOKEN = ("q", "k", "v", "g", "beta")
CASES = ("ordinary", "packed", "ragged", "empty-middle", "empty-all", "grouped-heads", "VK", "no-states", "log-value",
         "no-dt_bias", "odd-sizes", "heads-differ")


def call(comm, case, segment, **more):
    """(forward, gradients) of this rank."""
    tokens = slice(segment.start, segment.stop)
    states = lambda x, r: None if x is None else x[r.start : r.stop]
    fwd = kda.distributed.forward(
        comm, *(getattr(case, name)[tokens] for name in PER_TOKEN), A_log=case.A_log, dt_bias=case.dt_bias,
        initial_state=states(case.initial_state, segment.started), cu_seqlens=case.cu_seqlens, options=case.options,
        engine="numpy", timeout=60, **more)
    return fwd, lambda: kda.distributed.backward(fwd, case.d_out[tokens], states(case.d_final_state, segment.ended))


def differences(case, segment, fwd, grads, expected):
    """Tensors of this rank that are not those of one rank, with their errors."""
    wrong, tokens = [], slice(segment.start, segment.stop)
    for name, x in expected.items():
        ours = getattr(fwd, name) if name in ("out", "final_state") else getattr(grads, name)
        if x is None or ours is None:
            if ours is not x:
                wrong.append(f"{name}: {ours} for {x}")
            continue
        states = {"final_state": segment.ended, "d_initial_state": segment.started}.get(name)
        part = x[states.start : states.stop] if states is not None else x if name in ("dA_log", "ddt_bias") else x[tokens]
        error = np.linalg.norm((ours - part).ravel())
        if ours.shape != part.shape or ours.dtype != part.dtype or not error <= 1e-12 * max(np.linalg.norm(x.ravel()), 1e-30):
            wrong.append(f"{name}: {ours.dtype}{ours.shape} for {part.dtype}{part.shape}, error {error:.1e}")
    return wrong


def main():
    comm, failures, compared = MPI.COMM_WORLD.Dup(), [], 0
    source = random.Random(3)
    for name in CASES:
        case = cases.make(name, dtype="f8")
        expected = whole(case)
        bounds = np.concatenate([[0], np.cumsum(case.lengths)])
        for cuts in (None, random_cuts(case.lengths, comm.size, source)):
            segment = partition(bounds, comm.size, cuts)[comm.rank]
            if cuts is None:
                assert kda.distributed.share(comm, bounds) == segment
            # Two forwards before the first backward: nothing of the first may be overwritten.
            first, back = call(comm, case, segment)
            call(comm, case, segment, scan="heads")[1]()
            wrong = differences(case, segment, first, back(), expected)
            compared += len(expected)
            failures += [f"{name} cuts {cuts} rank {comm.rank}: {text}" for text in wrong]
    refused = refusals(comm)
    rows = comm.allgather((failures, refused))
    if comm.rank == 0:
        print(json.dumps({"failures": [text for row in rows for text in row[0]], "compared": compared,
                          "refused": [row[1] for row in rows]}), flush=True)


def refusals(comm):
    """What every rank is told about input that only the last rank gets wrong, or that does not fit together."""
    x = np.ones((32, 1, 4), "f4")
    last = comm.rank == comm.size - 1
    attempts = {
        "shape": lambda: kda.distributed.forward(comm, x, x, x[: 31 if last else 32], x, x[..., 0], engine="numpy"),
        "grid": lambda: kda.distributed.forward(comm, *[y[: 32 if last else 31] for y in (x, x, x, x, x[..., 0])],
                                                engine="numpy"),
        "options": lambda: kda.distributed.forward(comm, x, x, x, x, x[..., 0], engine="numpy",
                                                   options=kda.Options(scale=2.0 if last else 1.0)),
        "state": lambda: kda.distributed.forward(comm, x, x, x, x, x[..., 0], engine="numpy",
                                                 initial_state=np.zeros((7, 1, 4, 4))),
        "scan": lambda: kda.distributed.forward(comm, x, x, x, x, x[..., 0], engine="numpy", scan="sideways"),
        "save": lambda: kda.distributed.backward(
            kda.distributed.forward(comm, x, x, x, x, x[..., 0], engine="numpy", save=False), x),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            told[name] = None
        except kda.InputError as error:
            told[name] = str(error)
    return told


if __name__ == "__main__":
    main()
