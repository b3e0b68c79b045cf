"""What an entry of the kernel table says: a kernel's file, what it is compiled for, its launch shape and its parameters."""

from dataclasses import dataclass

import numpy as np

from ...arrays import BFLOAT16
from ...layout import CHUNK

# Element types of per-token operands and the names their structs have in the kernels.
ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}

# The same by NumPy type.
ELEMENT_OF = {BFLOAT16: "bfloat16", np.dtype("f2"): "float16", np.dtype("f4"): "float32"}

# Kinds of parameters: the C type's size follows from the NumPy type; an array is passed as its address.
POINTER = "pointer"
INTEGER = np.int32
REAL = np.float32


@dataclass(frozen=True)
class Defines:
    """What a kernel with few choices is compiled for: its (name, value) pairs."""

    defines: tuple


def element_variant(element):
    """The variant for an element type of a kernel that has one for each."""
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS[element])))


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    file: under kernels_cu; the entry point has the kernel's name. parameters: (name, kind) in order.
    variants(target): all that it may be launched as on a target, none where it doesn't run; a variant has `defines`.
    threads(variant): of a block. shared(variant): bytes of dynamic shared memory.
    blocks(arguments): of the one-dimensional grid, from the launch's arguments by name; `count` is among them, the
    number of chunks, spans or sequences that the kernel's grid runs over.
    """

    name: str
    file: str
    parameters: tuple
    variants: object
    threads: object
    shared: object
    blocks: object


def hopper_variants(*variants):
    """Those variants where kernels of sm_90a run."""
    return lambda target: list(variants) if target.hopper else []


def tiles(columns, width):
    """Tiles of that width that cover so many columns."""
    return -(-columns // width)


def pointers(*names):
    return tuple((name, POINTER) for name in names)


def integers(*names):
    return tuple((name, INTEGER) for name in names)


def reals(*names):
    return tuple((name, REAL) for name in names)


SIZES = integers("value_heads", "key_size", "value_size")
ACTIVATION = integers("gate_form", "beta_form", "qk_l2norm") + reals("lower_bound", "scale")
