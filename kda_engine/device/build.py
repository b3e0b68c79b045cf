"""From a kernel file to machine code by NVRTC. Needs no GPU."""

import re
from dataclasses import dataclass

from . import sources


class BuildError(RuntimeError):
    """NVRTC refused a kernel; the message holds the file, the target and the compiler's log."""


@dataclass(frozen=True)
class Resources:
    """What the assembler reports of one kernel: registers a thread; bytes of stack, spill stores and spill loads."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def compiler_version():
    """(major, minor) of the NVRTC in use."""
    from cupy.cuda import nvrtc

    return nvrtc.getVersion()


def compile_file(path, defines, architecture):
    """(cubin, log) of one file under ROOT for a target such as "sm_90a"; defines: (name, value) pairs.

    Raises BuildError.
    """
    from cupy.cuda import nvrtc

    options = (
        f"--gpu-architecture={architecture}",
        f"--include-path={sources.ROOT}",
        "--std=c++17",
        "--generate-line-info",
        "--ptxas-options=-v",
        *(f"--define-macro={name}={value}" for name, value in defines),
    )
    program = nvrtc.createProgram((sources.ROOT / path).read_text(), path, (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise BuildError(f"{path} for {architecture}: {error}\n{nvrtc.getProgramLog(program)}") from None
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def resources(log):
    """`Resources` per kernel name from a compile log."""
    found = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part).group(1)
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        found[name] = Resources(int(registers.group(1)), *(int(x) for x in spills.groups()))
    return found
