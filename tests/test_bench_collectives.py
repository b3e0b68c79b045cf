"""`bench collectives` under mpirun: every transfer right, bytes as the closed formulas say, the slowest rank's time."""

import json

import numpy as np
import pytest
from launcher import launch

from kda_engine.bench.record import OURS, read_record
from kda_engine.layout import CHUNK
from kda_engine.partition import partition
from mpi_runner.__main__ import main
from mpi_runner.benchmarks.exchanges import crossings_of
from mpi_runner.parallel.routes import ROUTES
from mpi_runner.traffic import parameter_bytes

RANKS, HEADS, SAMPLES = 3, (1, 2), 3


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(what was printed, the record, the picture's path)."""
    folder = tmp_path_factory.mktemp("bench")
    plot = ["--plot", folder] if has_matplotlib() else []
    done = launch(RANKS, "-m", "mpi_runner", "bench", "collectives", "--heads", *HEADS, "--samples", SAMPLES,
                  "--output", folder / "record.json", *plot)
    assert done.returncode == 0, done.stderr
    return done.stdout, read_record(folder / "record.json"), folder / "collectives.png"


def has_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_every_case_has_every_sample(measured):
    _, record, _ = measured
    cases = [(row["case"]["what"], row["case"]["ranks"], row["case"]["heads"]) for row in record["rows"]]
    assert cases == [(what, ranks, HV) for ranks in (2, 3) for what in (*ROUTES, "allreduce")
                     for HV in HEADS]
    assert record["mode"] == "collectives" and record["machine"]["nodes"] == 1 and record["provenance"]["mpi"]
    for row in record["rows"]:
        assert row["error"] == 0 and len(row["samples"][OURS]) == SAMPLES and min(row["samples"][OURS]) > 0


def test_bytes_are_those_of_a_run(measured):
    _, record, _ = measured
    for row in record["rows"]:
        what, ranks, HV = row["case"]["what"], row["case"]["ranks"], row["case"]["heads"]
        if what == "allreduce":
            expected = parameter_bytes(HV, 128, ranks)
        else:
            segments = partition(np.array([0, ranks * CHUNK]), ranks)
            expected = max(ROUTES[what].sent(crossings_of(ROUTES[what], segments, HV)))
        assert row["bytes"] == expected


def test_page_and_picture(measured):
    page, record, picture = measured
    assert page.count("| mpi |") == len(record["rows"])
    if has_matplotlib():
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_rank_has_nothing_to_exchange(capsys):
    assert main(["bench", "collectives"]) == 2
    assert "mpirun" in capsys.readouterr().err


def test_more_ranks_than_there_are_is_refused_everywhere():
    done = launch(2, "-m", "mpi_runner", "bench", "collectives", "--ranks", 2, 3)
    assert done.returncode == 2 and "expected 2 to 2" in done.stderr


def test_a_transfer_that_goes_wrong_on_one_rank_is_not_timed(tmp_path):
    """Rank 1 gets a state that is not the first rank's."""
    script = ("import sys\nfrom mpi_runner.__main__ import main\n"
              "from mpi_runner.parallel.transports import HostTransport\n"
              "receive = HostTransport.start_receive\n"
              "def faulty(self, x, source):\n"
              "    self.wait(receive(self, x, source), 'receiving')\n"
              "    x += self.rank == 1\n"
              "    return []\n"
              "HostTransport.start_receive = faulty\n"
              "sys.exit(main(sys.argv[1:]))")
    done = launch(2, "-c", script, "bench", "collectives", "--heads", 1, "--samples", 2,
                  "--output", tmp_path / "r.json")
    assert done.returncode == 1, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["case"]["what"] for row in rows if "samples" not in row] == list(ROUTES)
    assert "not timed" in done.stdout
