"""An engine as the host sees it: states and boundary matrices are NumPy arrays, tokens stay where the engine works."""

from dataclasses import replace

import numpy as np

from kda_engine.affine import Affine
from kda_engine.arrays import array_module, to_host


class StagedEngine:
    """The four stages of `Engine` with NumPy states in and out, as MPI through host memory needs them.

    While a device works towards a state, the engine's `poll` is called, so that transfers under way move on. A state
    comes from a device into pinned memory that stays: buffer(name, shape, dtype, allocate) gives it. It is therefore
    good until the same stage is called again.
    """

    def __init__(self, engine, buffer):
        self.engine, self._buffer = engine, buffer
        self.measure = engine.measure

    def summarise(self, operands, options, initial_state, transition):
        pair = self.engine.summarise(operands, options, self.engine.take_array(initial_state), transition)
        M = None if pair.M is None else self._fetch("M", pair.M)
        return Affine(M, self._fetch("S", pair.S))

    def forward(self, operands, options, initial_state, save):
        result = self.engine.forward(operands, options, self.engine.take_array(initial_state), save)
        return replace(result, final_state=self._fetch("final_state", result.final_state))

    def summarise_backward(self, operands, options, d_out, d_final_state):
        return self._fetch("D", self.engine.summarise_backward(operands, options, d_out,
                                                               self.engine.take_array(d_final_state)))

    def backward(self, saved, d_out, d_final_state):
        result = self.engine.backward(saved, d_out, self.engine.take_array(d_final_state))
        return replace(result, d_initial_state=self._fetch("d_initial_state", result.d_initial_state),
                       dA_log=to_host(result.dA_log), ddt_bias=to_host(result.ddt_bias))

    def steps(self, operands, options):
        """Of a `FoldingEngine`, which works on the host."""
        return self.engine.steps(operands, options)

    def d_steps(self, saved, d_out):
        """Of a `FoldingEngine`, which works on the host."""
        return self.engine.d_steps(saved, d_out)

    def _fetch(self, name, x):
        """x on the host."""
        module = array_module(x)
        if module is np:
            return x
        into = self._buffer(f"staged {name}", x.shape, x.dtype, _pinned)
        x.get(out=into, blocking=False)
        done = module.cuda.Event(disable_timing=True)
        done.record()
        while not done.done:
            self.engine.poll()
        return into


def _pinned(nbytes):
    """Page-locked bytes, into which a device copies while the host goes on."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)
