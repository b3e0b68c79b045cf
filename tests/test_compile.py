"""Every kernel compiles for every target, by NVRTC and without a GPU; the launch table fits the compiled kernels.

`python -m tests.test_compile` renews docs/kernels/resources.md.
"""

import os
import re
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy")

sys.path.insert(0, str(Path(__file__).parent))

import cubin  # noqa: E402
from code_digest import kernel_digest  # noqa: E402

from kda_engine.device import build, sources  # noqa: E402
from kda_engine.device.kernels import KERNELS  # noqa: E402
from kda_engine.device.kernels.table import ELEMENTS, POINTER  # noqa: E402
from kda_engine.device.kernels.probes import PROBES  # noqa: E402
from kda_engine.device.target import KNOWN  # noqa: E402

REPORT = Path(__file__).resolve().parents[1] / "docs" / "kernels" / "resources.md"


ALL = KERNELS | PROBES

# Where float16 is compiled too: it differs from bfloat16 in the conversion of elements alone, so one target is enough.
EVERY_ELEMENT = "sm_90a"


def jobs(target):
    """All (kernel, variant) to compile for a target."""
    return [(kernel, variant) for kernel in ALL.values() for variant in kernel.variants(target)
            if target.architecture == EVERY_ELEMENT or ("KDA_ELEMENT", ELEMENTS["float16"]) not in variant.defines]


@cache
def compiled(architecture):
    """(kernel, variant) -> (cubin, Resources) for one target."""
    target = KNOWN[architecture]

    def compile_one(job):
        kernel, chosen = job
        code, log = build.compile_file(kernel.file, chosen.defines, architecture)
        return code, build.resources(log)[kernel.name]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(jobs(target), pool.map(compile_one, jobs(target))))


@pytest.mark.parametrize("architecture", KNOWN)
def test_every_kernel_compiles_and_fits_its_target(architecture):
    for (kernel, chosen), (code, used) in compiled(architecture).items():
        where = f"{kernel.name} {chosen} for {architecture}"
        shared = cubin.static_shared_bytes(code, kernel.name) + kernel.shared(chosen)
        assert shared <= KNOWN[architecture].shared_limit, where
        assert used.registers * kernel.threads(chosen) <= 65536, where


@pytest.mark.parametrize("architecture", KNOWN)
def test_launch_table_fits_the_compiled_parameters(architecture):
    for (kernel, _), (code, _) in compiled(architecture).items():
        sizes = [8 if kind is POINTER else np.dtype(kind).itemsize for _, kind in kernel.parameters]
        assert cubin.parameter_sizes(code, kernel.name) == sizes, kernel.name


@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_launch_table_names_the_parameters_in_order(kernel):
    text = (sources.ROOT / kernel.file).read_text()
    declared = re.search(rf"^ *{kernel.name}\((.*?)\) {{", text, re.MULTILINE | re.DOTALL).group(1)
    kinds = {"int": np.int32, "float": np.float32, "i64": np.int64}
    found = []
    for parameter in declared.split(","):
        words = parameter.split()
        kind, name = " ".join(words[:-1]), words[-1]
        found.append((name, POINTER if kind.endswith("*") else kinds[kind]))
    assert tuple(found) == kernel.parameters


def test_every_kernel_file_is_in_a_table():
    files = {str(path.relative_to(sources.ROOT)) for path in sources.ROOT.rglob("*.cu")}
    assert files == {kernel.file for kernel in ALL.values()}


LAYERS = ("common", "ptx", "varlen", "tile", "kernels", "probes")


def test_includes_point_one_way():
    for path in sources.ROOT.rglob("*.cu*"):
        name = str(path.relative_to(sources.ROOT))
        for included in sources.includes(name):
            assert (sources.ROOT / included).is_file(), f"{name} includes {included}"
            upward = LAYERS.index(included.split("/")[0]) > LAYERS.index(name.split("/")[0])
            assert not upward and not included.endswith(".cu"), f"{name} includes {included}"


def test_the_tiles_of_one_path_include_none_of_the_other():
    for path in (sources.ROOT / "tile").rglob("*.cuh"):
        if path.parent.name == "shared":
            others = ("tile/portable", "tile/fused")
        else:
            others = ("tile/fused",) if path.parent.name == "portable" else ("tile/portable",)
        found = [x for x in sources.includes(str(path.relative_to(sources.ROOT))) if x.startswith(others)]
        assert not found, f"{path} includes {found}"


def test_inline_ptx_only_in_ptx():
    for path in sources.ROOT.rglob("*.cu*"):
        if path.parent.name != "ptx":
            assert not re.search(r"\basm\b", path.read_text()), path


def test_every_spill_is_explained():
    assert UNEXPLAINED not in REPORT.read_text()


def test_resource_report_is_current():
    """The digest lines always; the figures too where the compiler is the one that the report was made with."""
    text, now = REPORT.read_text(), report()
    lines = lambda report, start: [line for line in report.splitlines() if line.startswith(start)]
    assert lines(text, "- ") == lines(now, "- "), "renew with `python -m tests.test_compile`"
    if lines(text, "NVRTC") == lines(now, "NVRTC"):
        assert text == now, "renew with `python -m tests.test_compile`"


UNEXPLAINED = "not explained"

# Why a kernel spills, for each that does.
SPILLS = {
    "backward_states": "at K = 256, as in `forward`",
    "backward_sweep": "at K = 256, as in `forward`",
    "backward_tokens": "capped at 168 registers a thread, so that 384 threads share a multiprocessor",
    "forward": "at K = 256 a warp's strip of the state alone is 128 registers a thread; with the operands that are "
               "fetched ahead of the products that use them, the 255 that a thread may have do not suffice",
    "summary": "at K = 256, as in `forward`",
    "short_conv": "on sm_80 one address, kept out of the 32 registers that the compiler settles for",
    "short_conv_backward": "on sm_80 one value in float32, kept out of the 80 registers that the compiler settles for",
    "sm90_backward_chain": "as in `sm90_chain`",
    "sm90_gradients": "two blocks fill the registers of a multiprocessor; what a lane has of 16 channels and 32 tokens, "
                      "six values of each, nearly fills its 128; without a bound on the gates also what lives over the "
                      "calls of the two rare ways",
    "sm90_chain": "a block fills the registers of a multiprocessor; up to two values of the preparation's bookkeeping, "
                  "used once a chunk, do not fit; without a bound on the gates up to twelve",
    "step": "two blocks of 128 channels fill the registers of a multiprocessor; a thread asks for 64 values of the state "
            "at once, and up to ten addresses do not fit beside them",
}


def report():
    """docs/kernels/resources.md: registers, shared memory and spills of every kernel, target by target."""
    text = ["# Resources", "", "What the assembler reports, per kernel and variant. Made by `python -m tests.test_compile`.", "",
            f"NVRTC {'.'.join(str(x) for x in build.compiler_version())}", ""]
    text += [f"- {name}: sources {kernel_digest(kernel.file)[:16]}" for name, kernel in ALL.items()]
    spilling = set()
    for architecture in KNOWN:
        rows = defaultdict(list)
        for (kernel, chosen), (code, used) in compiled(architecture).items():
            shared = cubin.static_shared_bytes(code, kernel.name) + kernel.shared(chosen)
            shown = ", ".join(f"{name[4:].lower()} {value}" for name, value in chosen.defines if name != "KDA_CHUNK")
            rows[kernel.name].append(f"| {kernel.name} | {shown} | {used.registers} | {shared} | {used.stack} "
                                     f"| {used.spill_stores} / {used.spill_loads} |")
            if used.spill_stores or used.spill_loads:
                spilling.add(kernel.name)
        text += ["", f"## {architecture}", "",
                 "| kernel | variant | registers | shared bytes | stack bytes | spill bytes stored / loaded |",
                 "| --- | --- | --- | --- | --- | --- |"]
        text += [row for name in ALL for row in rows[name]]
    text += ["", "## Spills", ""]
    text += [f"{name}: {SPILLS.get(name, UNEXPLAINED)}." for name in sorted(spilling)] or ["None."]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(report())
    sys.exit(0)
