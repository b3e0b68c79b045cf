"""How much device memory a call needs at most."""

from cupy.cuda import memory_hook


class PeakMemory(memory_hook.MemoryHook):
    """Within `with`: bytes that CuPy's pool has handed out and not got back; peak: the most there were at once."""

    name = "peak memory"

    def __init__(self):
        self.peak = self._now = 0

    def malloc_postprocess(self, **what):
        self._now += what["mem_size"]
        self.peak = max(self.peak, self._now)

    def free_postprocess(self, **what):
        self._now -= what["mem_size"]
