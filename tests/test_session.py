"""What a rank shares with the others of its node, and the line of progress on a terminal."""

import json
import os

from launcher import launch

from mpi_runner import progress
from mpi_runner.progress import Progress

THREADS = """
import json
from mpi_runner.session import Session
with Session() as session:
    found = session.control.collect(session.threads(), "threads")
    if session.rank == 0:
        print(json.dumps(found))
"""


def threads(ranks, environment):
    done = launch(ranks, "-c", THREADS, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ranks_of_a_node_share_its_cores():
    cores = len(os.sched_getaffinity(0))
    for ranks in (1, 2, 2 * cores):
        found = threads(ranks, {"OMP_NUM_THREADS": ""})
        assert found == [max(1, cores // ranks)] * ranks


def test_a_given_number_of_threads_wins():
    assert threads(2, {"OMP_NUM_THREADS": "3"}) == [3, 3]


class Terminal:
    def __init__(self, is_terminal):
        self.written, self._is_terminal = "", is_terminal

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        self.written += text

    def flush(self):
        pass


def shown(monkeypatch, rank, is_terminal):
    terminal = Terminal(is_terminal)
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    line = Progress(rank)
    line.phase("forward")
    line.tick()
    line.done()
    return terminal.written


def test_progress_is_one_line_on_rank_0s_terminal(monkeypatch):
    text = shown(monkeypatch, 0, True)
    assert "forward" in text and "\n" not in text
    assert text.endswith("\r"), "the line is cleared at the end"


def test_progress_is_silent_elsewhere(monkeypatch):
    assert shown(monkeypatch, 1, True) == "" and shown(monkeypatch, 0, False) == ""
