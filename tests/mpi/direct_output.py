"""Run under mpirun: an output that every rank writes its own rows of. Rank 0 prints a JSON line.

Chunks are made small, so that some hold rows of two and of three ranks, some ranks have no row, and small datasets go to
rank 0. Arguments: the output's path; "unseen" lets one rank not see the file.
"""

import json
import sys

import numpy as np

from kda_engine.hdf5 import chunk_writer, types
from kda_engine.hdf5.results import ResultFile
from mpi_runner import gathering
from mpi_runner.session import Session

types.CHUNK_BYTES = 100_000
ROW = (3, 64)  # 768 bytes: 130 rows a chunk


def cuts(count, ranks):
    """Uneven shares: the first rank's is large, then tiny ones within a chunk, one without a row, the rest."""
    sizes, left = [], count
    for rank in range(ranks):
        wanted = count // 2 if rank == 0 else 7 * (rank % 3) if rank < ranks - 1 else left
        sizes.append(min(wanted, left) if ranks > 1 else count)
        left -= sizes[-1]
    return list(zip(np.cumsum([0] + sizes[:-1]).tolist(), sizes))


def main(path, *unseen):
    with Session() as session:
        rank, ranks = session.rank, session.size
        random = np.random.default_rng(0)
        whole = {"outputs/out": random.standard_normal((1000, *ROW)).astype("f4"),
                 "outputs/final_state": random.standard_normal((9, 2, 8, 8)).astype("f4"),
                 "grads/dq": random.standard_normal((1000, *ROW)).astype("f2"),
                 "grads/dA_log": random.standard_normal(4).astype("f4")}
        parts = []
        for name, x in whole.items():
            spans = cuts(len(x), ranks) if name != "grads/dA_log" else [(0, 4)] + [(0, 0)] * (ranks - 1)
            first, count = spans[rank]
            # In two blocks, as a rank with several groups has them.
            parts.append(gathering.Part(name, x.shape, x.dtype, spans, [x[first : first + count // 3],
                                                                        x[first + count // 3 : first + count]]))
        if unseen and rank == ranks - 1:
            def fail(*_):
                raise FileNotFoundError(2, "No such file or directory")

            chunk_writer.os.open = fail
        gathering.write_direct(session, path, True, parts, lambda: ({}, {}))
        seen = sum(part.not_finite.count for part in parts)
        if rank == 0:
            with ResultFile(path) as result:
                wrong = [name for name, x in whole.items() if result.read(name).tobytes() != x.tobytes()]
            print(json.dumps({"wrong": wrong, "not_finite": seen}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
