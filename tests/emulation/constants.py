"""The fused kernels' constants, read from their sources: a changed threshold is a changed emulation."""

import re
from functools import cache
from pathlib import Path

import numpy as np

from kda_engine.layout import CHUNK

ROOT = Path(__file__).resolve().parents[2] / "kernels_cu"

_DEFINITION = re.compile(r"\bconstexpr\s+(?P<type>\w+)\s+(?P<name>k\w+)\s*=\s*(?P<value>[^;{}]+);")
_NUMBER = re.compile(r"\b((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)[fFuU]\b")


def constant(name, bounded=True):
    """The value of a constexpr of the kernels: an int, a bool or a float32 value as Python float.

    bounded: whether of the kernels for gates with a bound. Raises KeyError for a name that no source defines, and
    ValueError for one that sources define differently.
    """
    return find(ROOT, name, bounded)


@cache
def find(root, name, bounded):
    """`constant` of the sources under a folder."""
    values = {_evaluate(root, kind, expression, bounded) for kind, expression in _definitions(root)[name]}
    if len(values) != 1:
        raise ValueError(f"{name}: expected one value in {root}, got {sorted(values)}")
    return values.pop()


@cache
def constants(name):
    """The float32 values of a constexpr array of the kernels. Raises ValueError unless it is defined once."""
    found = {match[1] for path in ROOT.rglob("*.cu*")
             for match in re.finditer(rf"\bconstexpr float {name}\[\d+\] = {{([^}}]+)}};", path.read_text())}
    if len(found) != 1:
        raise ValueError(f"{name}: expected one array in {ROOT}, got {len(found)}")
    return tuple(np.float32(number) for number in re.findall(r"[-+.\de]+(?=f)", found.pop()))


@cache
def sampled_state_step():
    """Every which of a lane's values of the state a glance looks at (`seems_small`)."""
    steps = {int(step) for path in ROOT.rglob("*.cuh")
             for step in re.findall(r"i < kSize / 2; i \+= (\d+)\)", path.read_text())}
    if len(steps) != 1:
        raise ValueError(f"seems_small: expected one step over a lane's values in {ROOT}, got {sorted(steps)}")
    return steps.pop()


@cache
def _definitions(root):
    """{name: set of (type, expression)} of every constexpr in the sources."""
    found = {}
    for path in sorted(root.rglob("*.cu*")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        for match in _DEFINITION.finditer(text):
            found.setdefault(match["name"], set()).add((match["type"], " ".join(match["value"].split())))
    return found


def _evaluate(root, kind, expression, bounded):
    text = _NUMBER.sub(r"\1", expression)
    # a ? b : c; none of the constants has one inside another.
    text = re.sub(r"^(.+?)\?(.+?):(.+)$", r"((\2) if (\1) else (\3))", text)
    if kind in ("int", "u32", "u64", "i64"):
        text = text.replace("/", "//")
    names = {"KDA_CHUNK": CHUNK, "KDA_BOUNDED": int(bounded)}
    for word in set(re.findall(r"\bk[A-Z]\w*\b", text)):
        names[word] = find(root, word, bounded)
    value = eval(text, {"__builtins__": {}}, names)  # noqa: S307: the project's own sources
    return float(np.float32(value)) if kind == "float" else value
