"""Device memory that shows what a kernel should not have done: poisoned contents, guard bytes around every block."""

from contextlib import contextmanager

import cupy

# Bytes in front of and behind each block; a multiple of the pool's alignment, so blocks stay aligned.
GUARD = 512
GUARD_BYTE = 0xA5

# Every byte of fresh memory: NaN in all float types; then huge numbers in float32 and bfloat16, NaN in float16.
POISONS = (0xFF, 0x7F)


class GuardedMemory:
    """An allocator for CuPy. Blocks are kept until `check`, so that none is reused unpoisoned."""

    def __init__(self, poison):
        self.poison = poison
        self._blocks = []

    def allocate(self, size):
        block = cupy.get_default_memory_pool().malloc(size + 2 * GUARD)
        # On the current stream, as whatever is written there next: tables have a stream of their own.
        block.memset_async(GUARD_BYTE, size + 2 * GUARD)
        inside = block + GUARD
        inside.memset_async(self.poison, size)
        self._blocks.append((block, size))
        return inside

    def check(self):
        """Raises AssertionError where a guard byte has changed."""
        for block, size in self._blocks:
            for start in (0, GUARD + size):
                guard = cupy.ndarray((GUARD,), "u1", memptr=block + start)
                assert (guard == GUARD_BYTE).all(), f"write outside a block of {size} bytes"


@contextmanager
def guarded(poison):
    """CuPy's allocations inside the block are poisoned and guarded; the guards are checked at its end."""
    memory = GuardedMemory(poison)
    with cupy.cuda.using_allocator(memory.allocate):
        yield
    memory.check()
