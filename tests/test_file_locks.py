"""File systems that refuse locks: inputs are read without them, whatever code the refusal has."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

from mpi_runner.__main__ import main
from mpi_runner.exit_codes import PASS, USAGE

# In the C library's place.
_REFUSES = """
#include <errno.h>
#include <stdlib.h>
int flock(int descriptor, int operation) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
"""


@pytest.fixture
def refusing(tmp_path, monkeypatch):
    """The environment of a process in which flock fails, by its code."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flock.c").write_text(_REFUSES)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "flock.so", "flock.c"], check=True)
    assert main(["input", "--case", "tokens-1", "in.h5"]) == 0
    return lambda code: {**os.environ, "LD_PRELOAD": str(tmp_path / "flock.so"), "FLOCK_ERRNO": str(code)}


def run(environment):
    return subprocess.run([sys.executable, "-m", "mpi_runner", "run", "in.h5", "out.h5", "--force"], env=environment,
                          capture_output=True, text=True)


@pytest.mark.parametrize("code", (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, 524))
def test_a_file_system_without_locks_does(refusing, code):
    done = run(refusing(code))
    assert done.returncode == PASS, done.stderr


@pytest.mark.parametrize("code, more", ((errno.EAGAIN, {}), (errno.ENOLCK, {"HDF5_USE_FILE_LOCKING": "TRUE"})))
def test_a_lock_that_somebody_holds_or_insists_on_is_told(refusing, code, more):
    done = run(refusing(code) | more)
    assert done.returncode == USAGE and len(done.stderr.splitlines()) == 1
    assert "in.h5" in done.stderr and "HDF5_USE_FILE_LOCKING=FALSE" in done.stderr
