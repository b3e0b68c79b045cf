"""Subnormal numbers taken as zeros by a thread: on many processors one such operand makes an instruction take a hundred
times as long, and strong decays are full of them.

The switch is a bit of a thread's floating-point control register, which C's <fenv.h> reads and writes. Where the
register lies in C's fenv_t is known for Linux on x86-64 and ARM64. Elsewhere, and where something does not look as
expected, nothing is changed: numbers are then exact and slower.
"""

import ctypes
import platform
import sys
from functools import cache

# By machine: the place of the control register in fenv_t, in 32-bit words; the bits that are to be set; a mask and the
# value that a register as Python leaves it has under that mask (x86-64: no floating-point trap is armed).
_REGISTERS = {"x86_64": (7, 0x8040, 0xFFFF1F80, 0x1F80), "aarch64": (0, 1 << 24, 0xF8000000, 0)}

# 32-bit words, more than any fenv_t has.
_WORDS = 64


@cache
def _library():
    """C's mathematical library with fegetenv and fesetenv, None where there is none."""
    for name in ("libm.so.6", None):
        try:
            library = ctypes.CDLL(name)
            if library.fegetenv and library.fesetenv:
                return library
        except (OSError, AttributeError):
            continue
    return None


def flush():
    """From now on the calling thread, and no other, takes subnormal operands and results as zeros.

    Returns whether it does: False on processors and systems where the switch is not known. There is no way back: for
    threads that end with their work.
    """
    register = _REGISTERS.get(platform.machine())
    if register is None or not sys.platform.startswith("linux") or _library() is None:
        return False
    word, bits, mask, expected = register
    environment = (ctypes.c_uint32 * _WORDS)()
    if _library().fegetenv(environment) != 0 or environment[word] & mask != expected:
        return False
    environment[word] |= bits
    return _library().fesetenv(environment) == 0
