"""The suite notices when the engine is broken: each mutation of the shipped code makes the sweep "part" fail.

A copy of the packages is changed in one place and the sweep of tests/mpi/all_cases.py run on it, on three ranks.
"""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from launcher import TESTS, launch, memory_folder
from mpi.all_cases import sweep
from oracle import run, upcast

from kda_engine import cases

# What is broken, in which file, which text becomes which.
MUTATIONS = {
    "dA_log is not summed over ranks": (
        "mpi_runner/parallel/problem.py", 'total = self.transport.sum(flat, "summing the parameter gradients")',
        "total = flat"),
    "M in place of its transpose": (
        "mpi_runner/parallel/boundary.py", "return M if self.sign > 0 else np.swapaxes(M, -1, -2)", "return M"),
    "gates of head 0 for all heads": (
        "kda_engine/gate.py", "log_decay=gate.log_decay(operands.g.astype(dtype, copy=False))",
        "log_decay=module.repeat(gate.log_decay(operands.g.astype(dtype, copy=False))[:, :1], "
        "operands.value_heads, 1)"),
    "the sign of L": (
        "kda_engine/chunked.py", "N = _join(N, -_product(second,", "N = _join(N, _product(second,"),
    "the halo gradient is dropped": ("mpi_runner/parallel/convolution.py", "if here < there:", "if False:"),
    "one rank's sequence offsets are wrong": (
        "mpi_runner/parallel/share.py", "- bounds[a]\n",
        "- bounds[a]\n            local[1:] = (local[1:] + (segment.rank == 1)).clip(max=local[-1])\n"),
}


@pytest.fixture(scope="module")
def expected():
    names = {case for case, *_ in sweep("part")}
    return pickle.dumps({name: run(upcast(cases.make(name)), "reference") for name in names})


def run_part(expected, file=None, before="", after=""):
    """The sweep's result on a copy of the packages with one text replaced; None when it did not even finish."""
    with memory_folder() as name:
        folder = Path(name)
        for package in ("kda_engine", "mpi_runner"):
            shutil.copytree(TESTS.parent / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        if file is not None:
            text = (folder / file).read_text()
            assert text.count(before) == 1, f"{file}: the text to be changed is not there exactly once"
            (folder / file).write_text(text.replace(before, after))
        (folder / "expected.pickle").write_bytes(expected)
        done = launch(3, TESTS / "mpi" / "all_cases.py", folder, "part", environment={"PYTHONPATH": str(folder)})
        if done.returncode != 0:
            return None
        return json.loads(done.stdout.splitlines()[-1])


def test_the_copy_itself_passes(expected):
    result = run_part(expected)
    assert result is not None and result["failures"] == [] and result["compared"] > 50


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_mutation_is_noticed(expected, what):
    result = run_part(expected, *MUTATIONS[what])
    assert result is None or result["failures"], f"{what}: every comparison still passed"
