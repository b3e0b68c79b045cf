"""Scratch memory of one call: named regions of one allocation, sized once."""

import cupy

# Every region starts on a multiple of this many bytes: a line of the L2 cache, and enough for any vector access.
ALIGNMENT = 256


class Workspace:
    """Device addresses by name, as attributes, inside one block of memory; regions: name -> number of float32.

    The block comes from CuPy's stream-ordered pool and goes back with this object, which must therefore live until the
    kernels that use it have been launched. Contents are undefined.
    """

    def __init__(self, **regions):
        size = 0
        for name, floats in regions.items():
            regions[name] = size
            size += -(-4 * floats // ALIGNMENT) * ALIGNMENT
        self._memory = cupy.cuda.alloc(size)
        start = self._memory.ptr
        for name, offset in regions.items():
            setattr(self, name, start + offset)
