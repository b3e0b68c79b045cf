"""Run under mpirun: `--shard heads` through the main job, every tensor against one process's. Rank 0 prints JSON.

Argument: a folder for files.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi.all_cases import write_case

from kda_engine import cases
from kda_engine.evaluation import evaluate
from kda_engine.hdf5.results import ResultFile
from mpi_runner.job import Job
from mpi_runner.main_job import run_job
from mpi_runner.session import Session

CASES = ("ordinary", "packed", "empty-middle", "empty-all", "grouped-heads", "VK", "odd-sizes", "no-states", "conv",
         "heads-differ", "log-value", "no-A_log", "relay")


def main(folder):
    failures, compared, sent = [], 0, []
    with Session(timeout=60) as session:
        for number, name in enumerate(CASES):
            case = cases.make(name, dtype="f8")
            if session.size > case.k.shape[1]:
                continue
            source, output = folder / f"{name}.h5", folder / f"{name}-out.h5"
            if session.rank == 0:
                write_case(case, source)
            session.control.largest(0, "the input is there")
            report = run_job(session, Job.resolve(
                {"input": str(source), "output": str(output), "backward": True, "force": True, "engine": "numpy",
                 "shard": "heads", "io": ("gather", "shards")[number % 2]}, None))
            if session.rank:
                continue
            sent += [row["bytes"].get(phase, 0) for row in report["ranks"]
                     for phase in ("summarise", "gather", "scan", "forward", "backward", "reduce")]
            expected = evaluate(case, "numpy")
            with ResultFile(output) as result:
                found = {tensor: result.read(tensor) for tensor in result.tensors()}
            if found.keys() != expected.keys():
                failures.append(f"{name}: {sorted(found)} for {sorted(expected)}")
            for tensor, x in expected.items():
                compared += 1
                # Sums over tokens may be made in other slabs; all else is the same work on the same numbers.
                allowed = 1e-12 if tensor in ("grads/dA_log", "grads/ddt_bias") or "/conv/" in tensor else 0.0
                error = np.linalg.norm((found[tensor] - x).ravel())
                if found[tensor].shape != x.shape or not error <= allowed * np.linalg.norm(x.ravel()):
                    failures.append(f"{name}: {tensor} {error:.1e}")
    if session.rank == 0:
        print(json.dumps({"failures": failures, "compared": compared, "sent": max(sent)}), flush=True)
    return session.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
