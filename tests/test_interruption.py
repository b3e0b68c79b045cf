"""Signals and ranks that never come, at every stage of a run: a documented code, and an output that is whole or absent."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from launcher import finish, launch, start

from mpi_runner.__main__ import main
from mpi_runner.exit_codes import PASS, STOPPED, USAGE

# Ends the import of everything in one rank, before MPI is there.
_HALT = """
import os, signal
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["input", "--case", "strong", "--tokens", "3000", "--heads", "2", "--K", "32", "--V", "32", "in.h5"]) == 0
    return tmp_path


def run(*options):
    return ("-m", "mpi_runner", "run", "in.h5", "out.h5", "--backward", *options)


def test_a_rank_that_stops_before_mpi_is_up(folder):
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_HALT)
    search = os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH"))))
    done = launch(2, *run("--exchange-timeout", "2"), timeout=60, environment={"PYTHONPATH": search})
    assert done.returncode == STOPPED and "not all ranks came within 2 s" in done.stderr
    assert not os.path.exists("out.h5")


@pytest.mark.parametrize("io", ("shards", "direct"))
def test_an_interruption_leaves_a_whole_output_or_none(folder, io):
    """At any time, start-up and the last moments among them. A launcher hands the signal on, as a terminal does."""
    begin = time.monotonic()
    assert finish(start(2, *run("--io", io)), 60)[0] == PASS
    whole, seconds = sorted(x.split("-")[0] for x in os.listdir()), time.monotonic() - begin
    for share in (random.Random(io).uniform(0.3, 1.0) for _ in range(4)):
        process = start(2, *run("--io", io, "--force"))
        time.sleep(share * seconds)
        # A launcher that is done already takes none.
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
        code, _, err = finish(process, 60)
        left = sorted(x.split("-")[0] for x in os.listdir())
        # What was there before stays where the run was stopped; its shards go when it is replaced.
        assert code in (PASS, STOPPED), err
        assert left == whole, f"code {code} after {share:.2f} of a run"


@pytest.mark.parametrize("options", ((), ("--shard", "heads", "--io", "shards")))
def test_one_rank_needs_no_mpi_library(folder, options):
    nowhere = {"MPI4PY_LIBMPI": str(folder / "libmpi.so")}
    alone = launch_alone(*run(*options), environment=nowhere)
    assert alone.returncode == PASS and not alone.stderr, alone.stderr
    assert main(["run", "in.h5", "other.h5", "--backward", *options]) == PASS
    assert main(["compare", "out.h5", "other.h5", "--tolerance", "0"]) == PASS


@pytest.mark.parametrize("started", ({"PMI_RANK": "0", "PMI_SIZE": "2"}, {"PMIX_RANK": "0"}))
def test_several_ranks_need_one(folder, started):
    done = launch_alone(*run(), environment={"MPI4PY_LIBMPI": str(folder / "libmpi.so"), **started})
    assert done.returncode == USAGE and len(done.stderr.splitlines()) == 1
    assert "expected an MPI library for" in done.stderr and "pip install 'kda-engine[mpich]'" in done.stderr
    assert not os.path.exists("out.h5")


def launch_alone(*command, environment):
    """Without a launcher."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **environment})
