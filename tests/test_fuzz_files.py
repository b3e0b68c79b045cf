"""Damaged files and odd objects, seeded: no outcome but the right result or a documented exit code.

Everything happens in other processes, which may crash or hang without taking the tests with them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from launcher import TESTS, memory_folder
from safetensors.numpy import save_file
from test_hdf5_inputs import write_case
from test_hdf5_results import write_sharded

from kda_engine import cases, evaluation
from kda_engine.hdf5.golden import write_golden
from kda_engine.hdf5.results import write_results

ROOT = TESTS.parent
SMALL = {"tokens": 6, "K": 4, "V": 4}


def python(*command, timeout=300):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def files():
    """(file to damage, file to open) by what it is."""
    with memory_folder() as name:
        folder = Path(name)
        case = cases.make("conv-biased", dtype="bfloat16", **SMALL)
        rows = np.random.default_rng(0).standard_normal((9, 2, 3)).astype("f4")
        write_case(folder / "input.h5", case)
        write_results(folder / "output.h5", {"outputs/out": rows, "grads/dq": rows}, {"program": "this test"})
        for main in ("main.h5", "of-shards.h5"):
            shards = write_sharded(folder / main, rows, [0, 4, 9])
        case = cases.make("ordinary", dtype="float32", **SMALL)
        write_golden(folder / "golden.h5", case, evaluation.reference(case), {"engine_version": "this test"})
        tensors = {name: np.ascontiguousarray(getattr(case, name)) for name in ("q", "k", "v", "g", "beta")}
        save_file(tensors, folder / "in.safetensors", metadata={"gate": "softplus"})
        np.savez(folder / "in.npz", **tensors, gate="softplus")
        np.savez_compressed(folder / "packed.npz", **tensors)
        same = {what: (folder / file, folder / file) for what, file in
                (("input", "input.h5"), ("large input", "input.h5"), ("output", "output.h5"),
                 ("main file", "main.h5"), ("golden", "golden.h5"), ("npz", "in.npz"), ("packed npz", "packed.npz"), ("safetensors", "in.safetensors"))}
        yield {**same, "shard": (folder / shards[0].file, folder / "of-shards.h5")}


# The reader, whether the format has checksums over all that counts, how many tries, the fewest that must be refused.
DAMAGED = {"input": ("input", True, 80, 40), "large input": ("direct", True, 80, 40),
           "output": ("result", True, 200, 90), "main file": ("result", True, 300, 75),
           "shard": ("result", True, 100, 60), "golden": ("golden", True, 80, 40), "npz": ("capture", False, 150, 80),
           "packed npz": ("capture", False, 150, 80), "safetensors": ("capture", False, 150, 20)}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files(files, what):
    reader, sealed, tries, refused = DAMAGED[what]
    target, opened = files[what]
    good = target.read_bytes()
    done = python(TESTS / "fuzz_files.py", reader, target, opened, 20261201, tries)
    assert done.returncode == 0, f"try {done.stdout.splitlines()[-1:]} ended the process: {done.stderr[-500:]}"
    outcomes = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert len(outcomes) == tries and target.read_bytes() == good
    # safetensors and the head of a zip archive carry no checksum: another value, never another end.
    allowed = {"same", "refused"} if sealed else {"same", "refused", "another result"}
    assert set(outcomes) <= allowed, [pair for pair in enumerate(outcomes) if pair[1] not in allowed][:5]
    assert outcomes.count("refused") >= refused


def test_objects_that_are_no_files(files, tmp_path):
    """As input, as output that --force may replace, as golden, as capture: told in a line, and left as they are."""
    for what, name in (("input", "in.h5"), ("output", "out.h5"), ("golden", "golden.h5")):
        (tmp_path / name).write_bytes(files[what][0].read_bytes())
    done = python(TESTS / "odd_objects.py", tmp_path)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]} ended the process: {done.stderr[-500:]}"
    tries = list(zip(lines[::2], lines[1::2]))
    wrong = [(command, *outcome) for command, outcome in tries
             if outcome[0] not in (2, 3) or "Traceback" in outcome[1] or not outcome[2]]
    assert not wrong, wrong[:5]
    assert len(tries) == 105
