"""A call's kernels as a CUDA graph."""

import cupy


class Replay:
    """Called, it launches all kernels of `call` again on the same arrays, at the cost of one launch for the host.

    result: what `call` returned; its arrays are written by every replay.
    """

    def __init__(self, call):
        # What is found out, compiled or uploaded once must not become part of the graph.
        call()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        # Memory that the kernels write belongs to nobody else for as long as they may be replayed.
        self._pool = cupy.cuda.MemoryPool()
        with stream, cupy.cuda.using_allocator(self._pool.malloc):
            stream.begin_capture()
            self.result = call()
            self._graph = stream.end_capture()

    def __call__(self):
        self._graph.launch(cupy.cuda.get_current_stream())
