"""The CUDA engine: all stages by kernel."""

from dataclasses import replace
from functools import partial, wraps

import cupy

from ...device.device import current, owned
from ...errors import InputError
from ..base import Engine, Forward, Saved
from . import slabs
from .calls import Calls
from .decay import DeviceMeasure
from .paths import forward_path, reason, state_path
from .problem import check_device, check_taken, contiguous, take_problem


def _stage(compute):
    """A stage on the engine's device; of a captured call the results hold all memory that a replay will use."""

    @wraps(compute)
    def stage(self, *given, **named):
        number = cupy.cuda.runtime.getDevice()
        if number != self.device.number:
            raise InputError(f"device: expected the current device to be {self.device.number}, where this engine "
                             f"computes, got {number}")
        self.poll()
        if not cupy.cuda.get_current_stream().is_capturing():
            return compute(self, *given, **named)
        with self.device.holding() as held:
            held.append((given, named))
            result = compute(self, *given, **named)
        return _holding(result, held)

    return stage


def _holding(result, held):
    """A stage's result whose arrays keep `held` alive."""
    if isinstance(result, cupy.ndarray):
        return owned(result, held)
    return replace(result, **{name: owned(x, held) for name, x in vars(result).items() if isinstance(x, cupy.ndarray)})


class CudaEngine(Engine):
    """Computes on the device that is CuPy's current one when it is made, and on CuPy's current stream; states and sums
    are float32 whatever the inputs' types.
    """

    name = "cuda"

    def __init__(self, poll=lambda: None):
        super().__init__(poll)
        self.device = current()
        self.measure = DeviceMeasure(self.device)
        self.calls = Calls(self.device)

    @property
    def target(self):
        return self.device.target

    def check(self, operands, options):
        check_taken(operands)

    def take_array(self, x):
        return x if isinstance(x, cupy.ndarray) else cupy.asarray(x)

    @_stage
    def summarise(self, operands, options, initial_state, transition):
        problem = take_problem(operands, options, self.device)
        self._check(initial_state=initial_state)
        return slabs.summarise(state_path(problem), operands, problem, initial_state, transition, self.poll)

    @_stage
    def forward(self, operands, options, initial_state, save):
        problem = take_problem(operands, options, self.device)
        if initial_state is not None:
            self._check(initial_state=initial_state)
            initial_state = contiguous(initial_state, initial_state.dtype)
        path = forward_path(problem)
        return self._forward(path, reason(path, problem), operands, problem, initial_state, save)

    @_stage
    def forward_again(self, call, arrays, initial_state, save):
        """`forward` of arrays that look as those of a remembered `Call`; initial_state: as kernels read it, None for zeros.
        """
        return self._forward(call.path, call.reason, *call.take(*arrays), initial_state, save)

    def _forward(self, path, why, operands, problem, initial_state, save):
        out, final_state, kept, drops = slabs.forward(path, operands, problem, initial_state, save, self.poll)
        saved = Saved(operands, problem.options, initial_state, kept) if save else None
        if out.dtype != operands.v.dtype:
            out = out.astype(operands.v.dtype)
        return Forward(out, final_state, saved, path.name, why, self._told(drops) if drops else ())

    @_stage
    def summarise_backward(self, operands, options, d_out, d_final_state):
        self._check(d_out=d_out, d_final_state=d_final_state)
        path = state_path(take_problem(operands, options, self.device))
        return slabs.summarise_backward(path, operands, options, d_out, d_final_state, self.device, self.poll)

    @_stage
    def backward(self, saved, d_out, d_final_state):
        self._check(d_out=d_out, d_final_state=d_final_state)
        gradients, drops = slabs.backward(saved, d_out, d_final_state, self.device, self.poll)
        saved.dropped = self._told(drops)
        return gradients

    def _check(self, **arrays):
        for name, x in arrays.items():
            check_device(name, x, self.device)

    def _told(self, drops):
        """Calls that each give a report's rows on what was dropped at the cuts of one slab."""
        return tuple([partial(cuts.rows, self.measure, slab.tokens.start, slab.sequences.start)
                      for slab, cuts in drops])
