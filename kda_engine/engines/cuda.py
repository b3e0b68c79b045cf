"""The CUDA engine: all stages by kernel. CuPy is needed from the import of this module on."""

from dataclasses import replace

import cupy

from ..device import target
from ..layout import zero_states
from . import cuda_backward, cuda_chain, cuda_chain_backward, cuda_general, cuda_step
from .base import Engine, Forward, Saved
from .cuda_decay import DeviceMeasure
from .cuda_problem import contiguous, take_problem


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
        problem = take_problem(operands, self.target)
        path = cuda_chain if cuda_chain.covers(problem, options) else cuda_general
        return path.summarise(problem, options, initial_state, transition)

    def forward(self, operands, options, initial_state, save):
        self.poll()
        problem = take_problem(operands, self.target)
        if initial_state is not None:
            initial_state = contiguous(initial_state, initial_state.dtype)
        kept = None
        if cuda_chain.covers(problem, options) and not cuda_step.covers(problem):
            out, final_state, kept = cuda_chain.forward(problem, options, initial_state, save)
        else:
            if initial_state is None:
                initial_state = zero_states(operands)
            path = cuda_step if cuda_step.covers(problem) else cuda_general
            out, final_state = path.forward(problem, options, initial_state)
        saved = Saved(operands, options, initial_state, kept) if save else None
        if out.dtype != operands.v.dtype:
            out = out.astype(operands.v.dtype)
        return Forward(out, final_state, saved)

    def summarise_backward(self, operands, options, d_out, d_final_state):
        self.poll()
        problem = take_problem(operands, self.target)
        if cuda_chain.covers(problem, options) and d_out.dtype == problem.v.dtype:
            return cuda_chain_backward.summarise(problem, options, contiguous(d_out, d_out.dtype),
                                                 contiguous(d_final_state, d_final_state.dtype))
        return cuda_backward.summarise_backward(operands, options, d_out, d_final_state, self.target, self.poll)

    def backward(self, saved, d_out, d_final_state):
        if saved.states is not None and d_out.dtype == saved.operands.v.dtype:
            self.poll()
            problem = take_problem(saved.operands, self.target)
            return cuda_chain_backward.backward(problem, saved.options, saved.states, contiguous(d_out, d_out.dtype),
                                                contiguous(d_final_state, d_final_state.dtype))
        if saved.initial_state is None:
            saved = replace(saved, initial_state=zero_states(saved.operands))
        return cuda_backward.backward(saved, d_out, d_final_state, self.target, self.summarise, self.poll)
