"""`bench scaling` under mpirun: the whole distributed call, checked on every rank, over numbers of ranks."""

import pytest
from launcher import launch

from kda_engine.bench.record import OURS, make_record, read_record
from kda_engine.bench.table import markdown
from kda_engine.errors import InputError
from mpi_runner.__main__ import main
from mpi_runner.benchmarks.ranks import rank_counts
from mpi_runner.benchmarks.scaling import SCANS

# Three ranks on two sequences: one is cut, and one rank holds the end of one and the start of the other.
SHAPE = ("--shape", "2x40x2", "--samples", 2)


@pytest.mark.parametrize("more", [("--backward",), ("--regime", "strong", "--tolerance", "1e-6")])
def test_every_scan_and_number_of_ranks(tmp_path, more):
    path = tmp_path / "record.json"
    done = launch(3, "-m", "mpi_runner", "bench", "scaling", *SHAPE, *more, "--output", path)
    assert done.returncode == 0, done.stderr
    record = read_record(path)
    cases = [(row["case"]["ranks"], row["case"]["scan"]) for row in record["rows"]]
    assert cases == [(ranks, scan) for ranks in (1, 2, 3) for scan in SCANS]
    assert all(len(row["samples"][OURS]) == 2 and row["error"] <= row["allowed"] for row in record["rows"])
    assert done.stdout.count("| mpi |") == len(cases)


def test_one_rank_needs_no_launcher(capsys):
    assert main(["bench", "scaling", *map(str, SHAPE)]) == 0
    assert "| serial | mpi | 1 |" in capsys.readouterr().out


def test_a_wrong_result_of_one_rank_stops_the_timing(tmp_path):
    """The last rank's gradient of the gate is off by a hundredth."""
    script = ("import sys\nfrom mpi4py import MPI\nfrom mpi_runner.__main__ import main\n"
              "from mpi_runner.parallel.staged import StagedEngine\n"
              "backward = StagedEngine.backward\n"
              "def faulty(self, *given):\n"
              "    gradients = backward(self, *given)\n"
              "    gradients.dg[:] *= 1 + 0.01 * (MPI.COMM_WORLD.rank == 1)\n"
              "    return gradients\n"
              "StagedEngine.backward = faulty\n"
              "sys.exit(main(sys.argv[1:]))")
    path = tmp_path / "record.json"
    done = launch(2, "-c", script, "bench", "scaling", *SHAPE, "--backward", "--output", path)
    assert done.returncode == 1, done.stderr
    assert {row["case"]["ranks"] for row in read_record(path)["rows"] if "samples" not in row} == {2}


def test_speed_up_and_efficiency():
    """Twice as fast on two ranks is perfect, on four it is half of that."""
    row = lambda ranks, seconds: {
        "case": {"what": "forward", "shape": "A", "regime": "weak", "engine": "cuda", "skip": "exact", "scan": "serial",
                 "transport": "mpi", "ranks": ranks}, "error": 0.0, "allowed": 1.0, "samples": {OURS: [seconds] * 3}}
    by = {"utc": "now", "engine_version": "1", "commit": None, "command": ["bench"]}
    page = markdown(make_record("scaling", by, {"name": "GPU"}, None, [row(1, 4e-3), row(2, 2e-3), row(4, 2e-3)]))
    assert "| serial | mpi | 2 | 0.0e+00 | 2 | 0 | 2.00 | 100% |" in page
    assert "| serial | mpi | 4 | 0.0e+00 | 2 | 0 | 2.00 | 50% |" in page


def test_numbers_of_ranks():
    assert rank_counts(None, 6, least=1) == [1, 2, 4, 6] and rank_counts(None, 4, least=2) == [2, 4]
    assert rank_counts([3, 1], 3, least=1) == [1, 3]
    for given, least in (([4], 1), ([0], 1), ([1, 2], 2)):
        with pytest.raises(InputError):
            rank_counts(given, 3, least)
