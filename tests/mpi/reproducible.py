"""Run under mpirun: `--reproducible` by several scans and cuts. Rank 0 prints the digests of all tensors as JSON, by
case and type; ways that differ from each other are listed.

Argument: a folder for files.
"""

import hashlib
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mpi.all_cases import write_case

import kda_engine as kda
from kda_engine import cases
from kda_engine.evaluation import evaluate
from kda_engine.hdf5.results import ResultFile
from mpi_runner.job import Job
from mpi_runner.main_job import run_job
from mpi_runner.parallel.folding import piece_length
from mpi_runner.session import Session

CASES = {"ordinary": {"tokens": 300}, "packed": {}, "empty-middle": {}, "ragged": {}, "grouped-heads": {"tokens": 200},
         "odd-sizes": {"tokens": 200}, "conv": {}, "conv-biased": {"tokens": 150}, "heads-differ": {"tokens": 200},
         "no-states": {}, "relay": {}, "VK": {}, "log-value": {}}


def random_cuts(lengths, length, ranks, source):
    """Cuts anywhere between pieces."""
    places, start = {0}, 0
    for n in lengths:
        places |= {start + at for at in range(0, int(n), length)} | {start + int(n)}
        start += int(n)
    return sorted(source.choice(sorted(places)) for _ in range(ranks - 1))


def main(folder):
    digests, differing, failures, source_of_cuts = {}, [], [], random.Random(4)
    with Session(timeout=60) as session:
        for name, sizes in CASES.items():
            for dtype, engine in (("f4", "numpy"), ("f8", "numpy"), ("f8", "reference")):
                case = cases.make(name, dtype=dtype, **sizes)
                length = piece_length(int(case.lengths.sum()))
                source, output = folder / "in.h5", folder / "out.h5"
                if session.rank == 0:
                    write_case(case, source)
                session.control.largest(0, "the input is there")
                cuts = random_cuts(case.lengths, length, session.size, source_of_cuts)
                for scan, where in (("auto", None), ("serial", cuts)):
                    run_job(session, Job.resolve(
                        {"input": str(source), "output": str(output), "backward": True, "force": True,
                         "engine": engine, "reproducible": True, "scan": scan}, None), where)
                    if session.rank:
                        continue
                    with ResultFile(output) as result:
                        found = {tensor: result.read(tensor) for tensor in result.tensors()}
                    digest = hashlib.sha256(b"".join(x.tobytes() for _, x in sorted(found.items()))).hexdigest()
                    key = f"{name} {dtype} {engine}"
                    if digests.setdefault(key, digest) != digest:
                        differing.append(f"{key} {scan} cuts {where}")
                    expected = evaluate(case, engine)
                    for tensor, x in expected.items():
                        if not kda.compare(found[tensor], x) <= (1e-12 if dtype == "f8" else 2e-5):
                            failures.append(f"{key} {scan}: {tensor} {kda.compare(found[tensor], x):.1e}")
    if session.rank == 0:
        print(json.dumps({"digests": digests, "differing": differing, "failures": failures}), flush=True)
    return session.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
