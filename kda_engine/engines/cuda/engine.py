"""The CUDA engine: all stages by kernel."""

from functools import partial

import cupy

from ...device import target
from ..base import Engine, Forward, Saved
from . import slabs
from .decay import DeviceMeasure
from .paths import forward_path, reason, state_path
from .problem import contiguous, take_problem


class CudaEngine(Engine):
    """Computes on CuPy's current device and stream; states and sums are float32 whatever the inputs' types."""

    name = "cuda"

    def __init__(self, poll=lambda: None):
        super().__init__(poll)
        self.target = target.current()
        self.measure = DeviceMeasure(self.target)

    def take_array(self, x):
        return x if isinstance(x, cupy.ndarray) else cupy.asarray(x)

    def summarise(self, operands, options, initial_state, transition):
        self.poll()
        problem = take_problem(operands, options, self.target)
        path = state_path(problem)
        return slabs.summarise(path, operands, problem, initial_state, transition, self.poll)

    def forward(self, operands, options, initial_state, save):
        self.poll()
        problem = take_problem(operands, options, self.target)
        if initial_state is not None:
            initial_state = contiguous(initial_state, initial_state.dtype)
        path = forward_path(problem)
        out, final_state, kept, drops = slabs.forward(path, operands, problem, initial_state, save, self.poll)
        saved = Saved(operands, options, initial_state, kept) if save else None
        if out.dtype != operands.v.dtype:
            out = out.astype(operands.v.dtype)
        return Forward(out, final_state, saved, path.name, reason(path, problem), self._told(drops))

    def summarise_backward(self, operands, options, d_out, d_final_state):
        self.poll()
        path = state_path(take_problem(operands, options, self.target))
        return slabs.summarise_backward(path, operands, options, d_out, d_final_state, self.target, self.poll)

    def backward(self, saved, d_out, d_final_state):
        gradients, drops = slabs.backward(saved, d_out, d_final_state, self.target, self.poll)
        saved.dropped = self._told(drops)
        return gradients

    def _told(self, drops):
        """Calls that each give a report's rows on what was dropped at the cuts of one slab."""
        return tuple([partial(cuts.rows, self.measure, slab.tokens.start, slab.sequences.start)
                      for slab, cuts in drops]) if drops else ()
