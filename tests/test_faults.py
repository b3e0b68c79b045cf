"""Faults in the middle of a distributed run: it ends soon, with a code; no output, an older output untouched."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from launcher import TESTS, finish, memory_folder, start, wait_for
from mpi.all_cases import write_case

from kda_engine import cases
from mpi_runner.exit_codes import INTERNAL, PASS, STOPPED, USAGE

# A job must be gone so many seconds after it was hit.
SECONDS = 25

WORKER = TESTS / "mpi" / "faulty.py"


@pytest.fixture
def files():
    """(input, output): the output holds something older."""
    with memory_folder() as name:
        source, output = Path(name) / "in.h5", Path(name) / "out.h5"
        write_case(cases.make("ordinary", tokens=400, dtype="float32"), source)
        output.write_bytes(b"older")
        yield source, output


def untouched(output, leftovers=False):
    """The older output is as it was; a killed process may leave a temporary file, nobody else."""
    assert output.read_bytes() == b"older"
    names = {p.name for p in output.parent.iterdir()} - {"in.h5", "out.h5"}
    if leftovers:
        names = {n for n in names if not n.startswith(".out.h5.tmp-")}
    assert names == set()


@pytest.mark.parametrize("fault, code, text", [
    ("raise", INTERNAL, "planted fault in forward"),
    ("bounds", INTERNAL, "planted fault in bounds"),
    ("raise-writing", INTERNAL, "planted fault in writing"),
    ("raise-root-writing", INTERNAL, "planted fault in writing"),
    ("disk", INTERNAL, "File too large"),
    ("bad-row", USAGE, "planted checksum failure"),
    ("silent", STOPPED, "no sign of life for 3 s"),
])
def test_a_failing_rank_ends_the_job(files, fault, code, text):
    source, output = files
    returned, _, err = finish(start(3, WORKER, fault, source, output), SECONDS)
    assert returned == code, err
    assert text in err
    untouched(output, leftovers=fault == "raise-writing")


def test_a_rank_that_works_longer_than_the_time_limit_is_waited_for(files):
    source, output = files
    returned, _, err = finish(start(3, WORKER, "busy", source, output), SECONDS)
    assert returned == PASS, err
    assert output.read_bytes() != b"older"


def test_a_killed_rank_ends_the_job(files):
    source, output = files
    returned, _, _ = finish(start(3, WORKER, "kill", source, output), SECONDS)
    assert returned != 0
    untouched(output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_signal_stops_the_job(files, number, ranks):
    source, output = files
    job = start(ranks, WORKER, "slow", source, output)
    waiting(job, ranks)
    began = time.monotonic()
    os.kill(job.pid, number)
    returned, _, err = finish(job, SECONDS)
    assert returned == STOPPED, err
    assert time.monotonic() - began < 10
    untouched(output)


def test_a_launcher_killed_outright_leaves_nothing_behind(files):
    source, output = files
    job = start(2, WORKER, "slow", source, output)
    ranks = waiting(job, 2)
    os.kill(job.pid, signal.SIGKILL)
    returned, _, _ = finish(job, SECONDS)
    assert returned != 0
    wait_for(lambda: not any(alive(rank) for rank in ranks), SECONDS)
    untouched(output)


def waiting(job, ranks):
    """The process numbers of so many ranks, once all of them wait; the launcher may mix their lines."""
    text, found = "", []
    while len(found) < ranks:
        line = job.stdout.readline()
        assert line, f"the job ended early: {text}"
        text += line
        found = [int(number) for number in re.findall(r"waiting (\d+);", text)]
    return found


def alive(pid):
    """Whether the process runs still; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
