"""`info`: the environment report."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher import launch

from kda_engine.version import VERSION
from mpi_runner import cuda_awareness, environment
from mpi_runner.__main__ import main
from mpi_runner.rank_table import mark_shared, rank_row, render
from mpi_runner.session import Session


def test_json(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kda-engine"] == VERSION and report["packages"]["numpy"] == version("numpy")
    assert report["cpu"]["usable"] >= 1 and report["cpu"]["threads"] >= 1 and report["blas"]
    assert report["hdf5"]["h5py"] == version("h5py") and report["hdf5"]["hdf5"][0].isdigit()
    assert isinstance(report["mpi"]["library"], str) and report["mpi"]["library"]
    assert report["engine_auto"] in ("numpy", "cuda") and "gpu" in report


def test_text(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"kda-engine: {VERSION}" in lines and "hdf5:" in lines
    assert any(line.startswith("  usable: ") for line in lines)


def test_mpi_is_not_started():
    script = ("import sys\nfrom mpi_runner.__main__ import main\nmain(['info'])\n"
              "sys.exit(42 if 'mpi4py.MPI' in sys.modules else 0)")
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=root, timeout=60)
    assert done.returncode == 0, done.stderr


class FakeComm:
    """Says this of the memory it takes."""

    def __init__(self, kinds):
        self._kinds = kinds

    def Get_info(self):
        return self

    def Get(self, key):
        return self._kinds if key == "mpi_memory_alloc_kinds" else None

    def Free(self):
        pass


@pytest.mark.parametrize("kinds, query, aware", [
    ("mpi,system,cuda:device", None, True), ("mpi, cuda", False, True), ("mpi,system", True, True),
    ("mpi,system", False, False), (None, None, False), (None, True, True), ("mpi,barracuda", None, False),
])
def test_only_a_positive_answer_makes_a_library_cuda_aware(kinds, query, aware, monkeypatch):
    monkeypatch.setattr(cuda_awareness, "_query", lambda: query)
    found = cuda_awareness.cuda_awareness(FakeComm(kinds))
    assert found["cuda_aware"] is aware
    said_by_kinds = aware and kinds is not None and "cuda" in kinds
    assert found["told_by"].startswith("mpi_memory_alloc_kinds=" if said_by_kinds else
                                       "nobody" if query is None else f"MPIX_Query_cuda_support={int(query)}")


def test_the_library_here_is_asked(capsys):
    assert main(["info", "--json"]) == 0
    mpi = json.loads(capsys.readouterr().out)["mpi"]
    assert mpi["cuda_aware"] is False and mpi["told_by"].startswith(("MPIX_Query_cuda_support=0", "nobody"))


def test_ranks_and_their_places():
    done = launch(3, "-m", "mpi_runner", "info", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["rank"] for row in report["ranks"]] == [row["rank_on_host"] for row in report["ranks"]] == [0, 1, 2]
    assert all(row["threads"] == 1 and row["host"] for row in report["ranks"])
    assert report["mpi"]["library"] and report["mpi"]["cuda_aware"] is False
    text = launch(2, "-m", "mpi_runner", "info")
    assert text.returncode == 0 and text.stdout.splitlines()[-2].split()[:1] == ["0"]


def test_ranks_share_gpus_by_their_number_on_the_host():
    devices = [{"name": "A", "pci": "0000:01"}, {"name": "A", "pci": "0000:02"}]
    rows = []
    for rank in range(3):
        session = SimpleNamespace(rank=rank, node=SimpleNamespace(rank=rank), threads=lambda: 4)
        session.device_number = lambda count, session=session: Session.device_number(session, count)
        rows.append(rank_row(session, devices))
    assert [row["gpu"]["number"] for row in mark_shared(rows)] == [0, 1, 0]
    assert [row["gpu"]["shared"] for row in rows] == [True, False, True]
    lines = render(rows).splitlines()
    assert lines[1].endswith("0: A at 0000:01, shared") and lines[2].endswith("1: A at 0000:02")
    assert render([rank_row(session, [])]).splitlines()[1].endswith("none")


def test_a_broken_mpi_is_reported(monkeypatch):
    monkeypatch.setattr(environment, "_ASK_MPI", "raise RuntimeError('no library')")
    assert environment.describe()["mpi"]["library"] == {"error": "RuntimeError: no library"}
