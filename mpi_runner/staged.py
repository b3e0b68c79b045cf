"""An engine as the host sees it: states and boundary matrices are NumPy arrays, tokens stay where the engine works."""

from dataclasses import replace

import numpy as np

from kda_engine.affine import Affine
from kda_engine.arrays import array_module, to_host


class StagedEngine:
    """The four stages of `Engine` with NumPy states in and out, as MPI through host memory needs them.

    While a device works towards a state, the engine's `poll` is called, so that transfers under way move on.
    """

    def __init__(self, engine):
        self._engine = engine
        self.measure = engine.measure

    def summarise(self, operands, options, initial_state, transition):
        pair = self._engine.summarise(operands, options, self._engine.take_array(initial_state), transition)
        return Affine(None if pair.M is None else self._fetch(pair.M), self._fetch(pair.S))

    def forward(self, operands, options, initial_state, save):
        result = self._engine.forward(operands, options, self._engine.take_array(initial_state), save)
        return replace(result, final_state=self._fetch(result.final_state))

    def summarise_backward(self, operands, options, d_out, d_final_state):
        return self._fetch(self._engine.summarise_backward(operands, options, d_out,
                                                           self._engine.take_array(d_final_state)))

    def backward(self, saved, d_out, d_final_state):
        result = self._engine.backward(saved, d_out, self._engine.take_array(d_final_state))
        return replace(result, d_initial_state=self._fetch(result.d_initial_state), dA_log=to_host(result.dA_log),
                       ddt_bias=to_host(result.ddt_bias))

    def _fetch(self, x):
        """x on the host."""
        module = array_module(x)
        if module is not np:
            done = module.cuda.Event(disable_timing=True)
            done.record()
            while not done.done:
                self._engine.poll()
        return to_host(x)
