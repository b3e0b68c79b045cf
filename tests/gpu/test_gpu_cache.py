"""The cache of compiled kernels: filled by several processes at once, damaged, read-only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CALL = """
import numpy as np, cupy, kda_engine as kda
random = np.random.default_rng(0)
sizes = dict(q=(40, 1, 64), k=(40, 1, 64), v=(40, 1, 64), g=(40, 1, 64), beta=(40, 1))
x = {name: random.standard_normal(size, dtype="f4") for name, size in sizes.items()}
found = kda.forward(**{name: cupy.asarray(value) for name, value in x.items()}, engine="cuda").out.get()
print(kda.compare(found, kda.forward(**x, engine="reference").out) < 1e-5)
"""


def start(folder):
    return subprocess.Popen([sys.executable, "-c", CALL], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={**os.environ, "KDA_ENGINE_CACHE": str(folder)})


def ends(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and out == "True\n", err[-2000:]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that four processes filled at once."""
    folder = tmp_path_factory.mktemp("cache")
    for process in [start(folder) for _ in range(4)]:
        ends(process)
    return folder


def test_nothing_is_left_beside_the_entries(filled):
    assert {path.suffix for path in filled.iterdir() if path.name != "locks"} == {".cubin"}


@pytest.mark.parametrize("damage", ("empty", "cut", "header", "code"))
def test_damaged_entries_are_made_anew(filled, damage):
    change = {"empty": lambda c: b"", "cut": lambda c: c[: len(c) // 2], "header": lambda c: bytes([c[0] ^ 255]) + c[1:],
              "code": lambda c: c[: len(c) // 2] + bytes(b ^ 255 for b in c[len(c) // 2 :][:64]) + c[len(c) // 2 + 64 :]}
    whole = {path: path.read_bytes() for path in filled.glob("*.cubin")}
    for path, content in whole.items():
        path.write_bytes(change[damage](content))
    ends(start(filled))
    assert {path: path.read_bytes() for path in filled.glob("*.cubin")} == whole


def test_a_cache_that_is_only_read_will_do(filled):
    folders = [filled, filled / "locks"]
    for folder in folders:
        folder.chmod(0o555)
    try:
        ends(start(filled))
    finally:
        for folder in folders:
            folder.chmod(0o755)
