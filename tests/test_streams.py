"""Standard output and error that are closed, full or no longer read: text is lost, the exit code is the work's."""

import subprocess
import sys
from pathlib import Path

import pytest

from kda_engine.hdf5.results import ResultFile
from mpi_runner.__main__ import main

ROOT = Path(__file__).resolve().parent.parent


def shell(command, folder):
    """(exit code, standard error) of a bash line in which KDA is the program."""
    line = f"KDA() {{ {sys.executable} -m mpi_runner \"$@\"; }}; {command}"
    done = subprocess.run(["bash", "-c", f"export PYTHONPATH={ROOT}; cd {folder}; {line}"], capture_output=True, text=True,
                          timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("line, code, words", [
    ("KDA plan >&-", 0, None), ("KDA plan 2>&-", 0, None), ("KDA plan >/dev/full", 0, "No space left on device"),
    ("KDA plan 2>/dev/full", 0, None), ("KDA plan --K 0 2>&-", 2, None), ("KDA plan --K 0 2>/dev/full", 2, None),
    ("KDA plann 2>/dev/full", 2, None), ("KDA plann 2>&-", 2, None),
    ("KDA plan --ranks 9000 | head -1 >/dev/null; exit ${PIPESTATUS[0]}", 0, None),
])
def test_lost_text_changes_no_code(line, code, words, tmp_path):
    returned, err = shell(line, tmp_path)
    assert returned == code and "Traceback" not in err
    assert err.count("\n") == (1 if words else 0) and (words or "") in err


@pytest.mark.parametrize("streams", (">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-", "| true"))
def test_a_run_is_done_whatever_becomes_of_its_text(streams, tmp_path):
    assert main(["input", "--case", "tokens-1", str(tmp_path / "in.h5")]) == 0
    returned, err = shell(f"KDA run in.h5 out.h5 {streams}; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert returned == 0 and err == ""
    with ResultFile(tmp_path / "out.h5") as result:
        assert "outputs/out" in result.tensors()
