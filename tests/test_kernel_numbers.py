"""Numbers that stand in the kernels' sources and in Python are the same."""

import re
from functools import cache

import pytest

pytest.importorskip("cupy")

from kda_engine.device import sources  # noqa: E402
from kda_engine.device.kernels import KERNELS, fused, others, portable  # noqa: E402
from kda_engine.device.plans.fused import TILE_CHUNKS  # noqa: E402
from kda_engine.device.target import KNOWN  # noqa: E402
from kda_engine.options import BETAS, GATES  # noqa: E402

TARGET = KNOWN["sm_90a"]
_CONSTANT = re.compile(r"\bconstexpr\s+int\s+(k\w+)\s*=\s*([^;{}]+);")


@cache
def _texts(file):
    """The kernel's own text first: where a header has another constant of the name, its own is meant."""
    order = [file, *(name for name in sources.reachable(file) if name != file)]
    return [re.sub(r"//[^\n]*", "", (sources.ROOT / name).read_text()) for name in order]


def constant(kernel, variant, name):
    """The value of an int constexpr in a kernel as compiled for a variant; name: with its struct's where it has one."""
    scope, _, own = name.rpartition("::")
    texts = _texts(kernel.file)
    if scope:
        texts = [text[text.index(f"struct {scope} "):] for text in texts if f"struct {scope} " in text]
    found = next(match[2] for text in texts for match in _CONSTANT.finditer(text) if match[1] == own)
    text = re.sub(r"^(.+?)\?(.+?):(?!:)(.+)$", r"((\2) if (\1) else (\3))", " ".join(found.split())).replace("/", "//")
    names = dict(variant.defines)
    for word in set(re.findall(r"\b(?:\w+::)?k[A-Z]\w*\b", text)):
        names[word.replace("::", "_")] = constant(kernel, variant, word)
    return eval(text.replace("::", "_"), {"__builtins__": {}}, names)  # noqa: S307: the project's own sources


# (kernel, constant, what Python has for it, of a variant).
NUMBERS = [
    *((name, constant, value) for name in ("sm90_chain", "sm90_backward_chain", "sm90_gradients")
      for constant, value in (("kSize", fused.CHAIN_SIZE), ("kStateWords", fused.STATE_WORDS),
                              ("kTokenWords", fused.TOKEN_WORDS), ("kForwardUnits", fused.FORWARD_UNITS),
                              ("kBackwardUnits", fused.BACKWARD_UNITS), ("kTileChunks", TILE_CHUNKS))),
    *((name, "kThreads", None) for name in ("sm90_chain", "sm90_backward_chain", "sm90_gradients", "fold_states",
                                            "prepare", "step", "backward_tokens")),
    *((name, "kRecord", "record") for name in ("prepare", "forward", "summary", "backward_states", "backward_sweep")),
    ("backward_sweep", "kTurned", "turned_record"),
    *((name, "kTileColumns", portable.TILE_COLUMNS) for name in ("backward_states", "backward_sweep")),
    ("certify_cuts", "kSize", fused.CHAIN_SIZE), ("fold_states", "kSize", fused.CHAIN_SIZE),
    ("fold_states", "kColumns", fused.FOLD_COLUMNS), ("scan", "kColumns", portable.SCAN_COLUMNS),
    ("step", "kColumns", None), ("decay_bounds", "kWarps", others.DECAY_WARPS),
    ("sum_groups", "kWarps", fused.SUM_WARPS),
]


@pytest.mark.parametrize("name, constant_name, value", NUMBERS, ids=lambda x: str(x))
def test_kernel_and_table_have_the_same_number(name, constant_name, value):
    kernel = KERNELS[name]
    for variant in kernel.variants(TARGET):
        expected = value
        if isinstance(value, str):
            expected = getattr(variant, value)
        elif value is None:
            expected = portable.STEP_COLUMNS if constant_name == "kColumns" else kernel.threads(variant)
        assert constant(kernel, variant, constant_name) == expected, variant


@pytest.mark.parametrize("enum, names", (("GateForm", GATES), ("BetaForm", BETAS)))
def test_a_form_is_its_place_among_the_options(enum, names):
    text = (sources.ROOT / "common" / "gate.cuh").read_text()
    members = re.search(rf"enum class {enum} : int \{{([^}}]*)\}}", text).group(1)
    found = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", members)}
    assert found == {"".join(word.capitalize() for word in name.split("_")): i for i, name in enumerate(names)}
