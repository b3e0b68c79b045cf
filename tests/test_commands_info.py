"""`info`: the environment report."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from kda_engine.version import VERSION
from mpi_runner import environment
from mpi_runner.__main__ import main


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


def test_a_broken_mpi_is_reported(monkeypatch):
    monkeypatch.setattr(environment, "_ASK_MPI", "raise RuntimeError('no library')")
    assert environment.describe()["mpi"]["library"] == {"error": "RuntimeError: no library"}
