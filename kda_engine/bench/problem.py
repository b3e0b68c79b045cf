"""What one row of an engine's benchmark measures: a shape and a gate regime on a machine, its work, and its check."""

import math
from functools import cached_property

import numpy as np

from .. import api
from ..arrays import as_array, to_host
from ..compare import compare, tolerance_for
from ..options import Options
from . import roofline
from .shapes import HEAD_SIZE, draw, draw_gradients, parse

FORWARD, BOTH = "forward", "forward+backward"


class Problem:
    """A named shape (see `shapes.parse`) in one gate regime on one machine (`host.Host` or `device.Device`).

    path: what computed the forward that was checked (`ForwardResult.path`), None before.
    """

    def __init__(self, machine, name, regime, tolerance, gate="lower_bound"):
        self.machine, self.name, self.regime, self.shape = machine, name, regime, parse(name)
        self.options = Options(tolerance=tolerance, gate=gate)
        self.inputs = draw(self.shape, regime, gate, dtype=machine.dtype, module=machine.module)
        self._errors, self.path = {}, None

    @cached_property
    def gradients(self):
        """d_out and d_final_state by name."""
        return draw_gradients(self.shape, dtype=self.machine.dtype, module=self.machine.module)

    def describe(self):
        """What a case of this problem consists of, in plain values."""
        return {"lengths": list(self.shape.lengths), "heads": self.shape.heads, "head_size": HEAD_SIZE,
                "dtype": self.machine.dtype.name, "tolerance": self.options.tolerance}

    def forward(self, save=False):
        """The public call."""
        return api.forward(**self.inputs, cu_seqlens=self.shape.cu_seqlens, options=self.options,
                           engine=self.machine.engine, save=save)

    def both(self):
        """The public calls of forward and backward."""
        return api.backward(self.forward(save=True), **self.gradients)

    def input_bytes(self, what):
        """Memory of everything that FORWARD or BOTH is given."""
        given = [*self.inputs.values()] + ([*self.gradients.values()] if what == BOTH else [])
        return sum(x.nbytes for x in given)

    def work(self, what):
        """(bytes, FLOPs) of FORWARD or BOTH at the least."""
        moved = roofline.forward_bytes(self.inputs)
        sizes = (self.shape.lengths, self.shape.heads, HEAD_SIZE, HEAD_SIZE, self.machine.chunk_length)
        products = roofline.forward_flops(*sizes)
        if what == BOTH:
            moved += roofline.backward_bytes(self.inputs)
            products += roofline.backward_flops(*sizes)
        return moved, products

    @property
    def checked_heads(self):
        """The heads that results are checked on: the first and the last."""
        return sorted({0, self.shape.heads - 1})

    def expected(self, what):
        """All results of FORWARD or BOTH by name, of the checked heads, from the machine's oracle in float64."""
        few = lambda arrays: {name: pick_heads(name, x, self.checked_heads).astype("f8") for name, x in arrays.items()}
        fwd = api.forward(**few(self.inputs), cu_seqlens=self.shape.cu_seqlens, options=self.options,
                          engine=self.machine.oracle, save=what == BOTH)
        results = {"out": fwd.out, "final_state": fwd.final_state}
        return results | vars(api.backward(fwd, **few(self.gradients))) if what == BOTH else results

    def error(self, what):
        """The largest error of any result of FORWARD or BOTH on the checked heads; found out once."""
        if what not in self._errors:
            self._errors[what] = self._find_error(what)
        return self._errors[what]

    def distance(self, out):
        """How far somebody else's out, of any array library, is from ours, on the checked heads."""
        pair = as_array("out", out), self.forward().out
        return compare(*(pick_heads("out", x, self.checked_heads) for x in pair))

    def _find_error(self, what):
        fwd = self.forward(save=what == BOTH)
        self.path = fwd.path
        found = {"out": fwd.out, "final_state": fwd.final_state}
        if what == BOTH:
            found |= vars(api.backward(fwd, **self.gradients))
        # Log decays have no parameters. np.max, unlike max, does not pass over a NaN.
        return float(np.max([compare(pick_heads(name, found[name], self.checked_heads), x)
                             for name, x in self.expected(what).items() if x is not None]))


def start_row(problem, what, cold, graph, error):
    """A row with all but its measurements."""
    options, machine = problem.options, problem.machine
    case = {"what": what, "shape": problem.name, "regime": problem.regime, "gate": options.gate,
            "engine": machine.engine, "cache": "cold" if cold else "warm", "launch": "graph" if graph else "direct",
            "skip": options.skip}
    return {"case": case, "problem": problem.describe(), "path": problem.path, "error": finite(error),
            "allowed": tolerance_for(machine.dtype)}


def finite(error):
    """The error, None where it is no finite number: JSON has no other."""
    return error if math.isfinite(error) else None


def passed(row):
    """Whether the row's result may be timed."""
    return row["error"] is not None and row["error"] <= row["allowed"]


def pick_heads(name, x, heads):
    """Some heads of a tensor, by the axis that its name says, on the host."""
    axis = 0 if name in ("A_log", "dt_bias", "dA_log", "ddt_bias") else 1
    return to_host(x[(slice(None),) * axis + (heads,)])
