"""Run under mpirun: every case through the main job, every tensor against the oracle's. Rank 0 prints a JSON line.

Arguments: folder with expected.pickle (case name -> tensors of `oracle.run`), then the sweep's name.
"""

import json
import pickle
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from oracle import upcast

import kda_engine as kda
from kda_engine import cases
from kda_engine.compare import REPEATED_KEY_TOLERANCES, TOLERANCES
from kda_engine.hdf5.inputs import write_input
from kda_engine.hdf5.results import ResultFile
from kda_engine.layout import CHUNK
from mpi_runner.job import Job
from mpi_runner.main_job import run_job
from mpi_runner.session import Session

# Where a tensor of `oracle.run` lies in an output file.
OUTPUTS = ("out", "final_state")


def dataset(name):
    if name in OUTPUTS:
        return f"outputs/{name}"
    if name.endswith(("_weight", "_bias")) and name != "ddt_bias":
        return f"grads/conv/{name}"
    return f"grads/{name}"


def write_case(case, path):
    write_input(path, q=case.q, k=case.k, v=case.v, g=case.g, beta=case.beta, A_log=case.A_log, dt_bias=case.dt_bias,
                cu_seqlens=case.cu_seqlens, initial_state=case.initial_state, d_out=case.d_out,
                d_final_state=case.d_final_state, conv=case.conv, options=case.options, force=True)


def errors(path, expected):
    """Relative error of every tensor by name; a missing or unexpected tensor counts as NaN."""
    with ResultFile(path) as result:
        there = set(result.tensors())
        found = {}
        for name, value in expected.items():
            if (value is None) == (dataset(name) in there):
                found[name] = float("nan")
            elif value is not None:
                found[name] = kda.compare(result.read(dataset(name)), value)
        return found


def cut_places(lengths):
    """Where a cut may lie: the chunk grid of every sequence, and its ends."""
    places, start = {0}, 0
    for length in lengths:
        places |= {start + c for c in range(0, int(length), CHUNK)} | {start + int(length)}
        start += int(length)
    return sorted(places)


def random_cuts(lengths, ranks, random_source):
    """Cuts anywhere on the chunk grid, so that some ranks get nothing and some most."""
    places = cut_places(lengths)
    return sorted(random_source.choice(places) for _ in range(ranks - 1))


def sweep(name):
    """(case, dtype, job options, cuts) of everything to run; cuts: False (equal shares), True (at random) or a list."""
    if name == "float64":
        for case in cases.names():
            for scan in ("allgather", "serial"):
                yield case, "f8", {"engine": "numpy", "scan": scan}, False
            yield case, "f8", {"engine": "numpy"}, True
            yield case, "f8", {"engine": "reference"}, True
    elif name == "float32":
        for case in cases.names():
            yield case, "f4", {"engine": "numpy"}, False
            yield case, "f4", {"engine": "numpy", "io": "shards"}, True
    elif name == "cuts":
        # Two ranks, cut at every place where a cut may lie.
        for case in ("packed", "conv"):
            for cut in cut_places(cases.make(case).lengths):
                for scan in ("allgather", "serial"):
                    yield case, "f8", {"engine": "numpy", "scan": scan}, [cut]
    elif name == "part":
        # One of each kind, for the checks that break the engine on purpose.
        for case in ("ordinary", "packed", "heads-differ", "conv", "empty-middle"):
            yield case, "f8", {"engine": "numpy"}, False
            yield case, "f8", {"engine": "numpy"}, True


def main(folder, name):
    expected = pickle.loads((folder / "expected.pickle").read_bytes())
    source, output = folder / f"{name}.h5", folder / f"{name}-out.h5"
    random_source = random.Random(0)
    failures, compared, worst = [], 0, 0.0
    with Session(timeout=60) as session:
        for case_name, dtype, given, at_random in sweep(name):
            case = cases.make(case_name, dtype=dtype)
            cuts = random_cuts(case.lengths, session.size, random_source) if at_random is True else at_random or None
            if session.rank == 0:
                write_case(case, source)
            session.control.largest(0, "the input is there")
            run_job(session, Job.resolve({"input": str(source), "output": str(output), "backward": True, "force": True,
                                          **given}, None), cuts)
            if session.rank == 0:
                tolerance = (REPEATED_KEY_TOLERANCES if case.repeated_keys else TOLERANCES)[dtype]
                for tensor, error in errors(output, expected[case_name]).items():
                    compared += 1
                    worst = max(worst, error / tolerance)
                    if not error <= tolerance:
                        failures.append(f"{case_name} {dtype} {given} cuts {cuts}: {tensor} {error:.2e}")
    if session.rank == 0:
        print(json.dumps({"compared": compared, "failures": failures, "worst": worst}), flush=True)
    return session.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
