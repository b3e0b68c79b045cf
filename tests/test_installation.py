"""An installed package, away from the source tree, holds what its commands need: kernels and goldens."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TREE = ("kda_engine", "mpi_runner", "kernels_cu", "data", "README.md", "LICENSE", "pyproject.toml", "setup.py")


def run(*arguments, where, **environment):
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=where, capture_output=True, text=True, timeout=300,
                          env=os.environ | environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the packages as `pip install .` puts them."""
    tree, site = (tmp_path_factory.mktemp(name) for name in ("tree", "site"))
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    done = run("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, tree, where=tree)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip fetches the build's setuptools from the network, which is not reached here")
    assert done.returncode == 0, done.stderr
    return site


def test_goldens_travel_with_the_package(site, tmp_path):
    listed = run("-m", "mpi_runner", "golden", "list", where=tmp_path, PYTHONPATH=str(site))
    assert listed.returncode == 0, listed.stderr
    count = len(list((ROOT / "data").glob("*.h5")))
    assert listed.stdout.splitlines()[-1] == f"{count} goldens in {site / 'mpi_runner' / 'goldens' / 'data'}"
    checked = run("-m", "mpi_runner", "golden", "check", "--engine", "numpy", "ordinary.h5", "ragged.h5",
                  where=tmp_path, PYTHONPATH=str(site))
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.splitlines()[-1] == "2 of 2 goldens pass" and os.listdir(tmp_path) == []


def test_the_same_modules_and_kernels_are_installed(site):
    files = lambda root: {path.relative_to(root) for package in ("kda_engine", "mpi_runner", "kernels_cu")
                          for path in (root / package).rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".typed")}
    assert (site / "kda_engine" / "py.typed").is_file()
    assert files(site) == files(ROOT)
