"""Kernel source files: where they are, what they include, and a digest that changes when any of it does."""

import hashlib
import re
from functools import cache
from pathlib import Path

# kernels_cu is installed beside the kda_engine package.
ROOT = Path(__file__).resolve().parents[2] / "kernels_cu"

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def includes(path):
    """The quoted includes of one file, as paths relative to ROOT, in order."""
    return _INCLUDE.findall((ROOT / path).read_text())


def reachable(path):
    """The file and everything it includes, directly or not: sorted paths relative to ROOT."""
    found, open_paths = set(), [path]
    while open_paths:
        current = open_paths.pop()
        if current not in found:
            found.add(current)
            open_paths += includes(current)
    return sorted(found)


@cache
def digest(path):
    """SHA-256, in hex, of the names and contents of all reachable files."""
    total = hashlib.sha256()
    for name in reachable(path):
        total.update(f"{name}\0".encode() + (ROOT / name).read_bytes() + b"\0")
    return total.hexdigest()
