"""Starts programs under mpirun for tests, and gives them files on memory where that is possible."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# Open MPI refuses root, and more ranks than cores, unless told otherwise; it ties the ranks of every job to the same
# first cores. MPICH takes no notice of these.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}


def mpirun():
    """The launcher's path. Its absence fails the test: distributed runs are what the project is for."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.fail("mpirun: expected a launcher in the environment or on PATH, found none (install the extra 'mpich')")
    return found


def _environment(extra):
    # One thread a rank: the ranks together are more than the cores of a small machine.
    return {**os.environ, "OMP_NUM_THREADS": "1", **OPEN_MPI, **(extra or {})}


def launch(ranks, *command, timeout=300, environment=None):
    """Run `python COMMAND...` on so many ranks; returns the CompletedProcess with text output."""
    started = [mpirun(), "-n", str(ranks), sys.executable, *map(str, command)]
    return subprocess.run(started, capture_output=True, text=True, timeout=timeout, env=_environment(environment))


def start(ranks, *command, environment=None):
    """The same, not waited for; in a process group of its own, which does not outlive the tests."""
    started = [mpirun(), "-n", str(ranks), sys.executable, *map(str, command)]
    process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=_environment(environment), start_new_session=True)
    atexit.register(_end, process)
    return process


def _end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def finish(process, seconds):
    """(exit code, stdout, stderr) of a started job that must end within `seconds`; else it is killed and fails."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the job still ran after {seconds} s\n{out}\n{err}")
    return process.returncode, out, err


def wait_for(condition, seconds=30):
    """Until condition() is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("what the test waits for did not come")
        time.sleep(0.01)


def memory_folder():
    """A temporary folder, in memory where there is such a file system: the jobs sync every file they write."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
