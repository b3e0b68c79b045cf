"""The distributed forward (and backward) of a benchmark's problem on the ranks of an exchange."""

import numpy as np

from kda_engine.arrays import to_host
from kda_engine.bench.problem import BOTH, pick_heads
from kda_engine.compare import compare
from kda_engine.engines import make_engine
from kda_engine.layout import Operands
from kda_engine.partition import partition

from ..clock import Clock
from ..share import Share
from ..staged import StagedEngine
from ..step import Step


class DistributedCall:
    """Everything a rank needs to run its share again and again; every rank holds the whole Problem.

    what: FORWARD or BOTH. scan: "allgather" or "serial". threads: of the rank, for an engine on the host.
    """

    def __init__(self, problem, what, exchange, scan, threads):
        self.problem, self.what, self.exchange, self.scan = problem, what, exchange, scan
        self.segments = partition(problem.shape.cu_seqlens, exchange.size)
        self.segment = self.segments[exchange.rank]
        start, stop = self.segment.start, self.segment.stop
        operands = Operands(**{name: x for name, x in problem.inputs.items() if name != "initial_state"},
                            cu_seqlens=problem.shape.cu_seqlens, state_dtype=np.dtype("f4"))
        self.share = Share.of(self.segment, operands.slice_tokens(start, stop))
        self.engine = StagedEngine(make_engine(problem.machine.engine, self._poll, threads))
        self.states = np.zeros(self.share.operands.state_shape, "f4")
        first = len(self.states) - len(self.segment.started)
        self.states[first:] = _rows(problem.inputs["initial_state"], self.segment.started)
        if what == BOTH:
            d_out = problem.gradients["d_out"][start:stop]
            self.d_outs = {name: d_out[group.start : group.stop] for name, group in self.share.named_groups}
            self.d_states = np.zeros_like(self.states)
            self.d_states[: len(self.segment.ended)] = _rows(problem.gradients["d_final_state"], self.segment.ended)

    def run(self):
        """One forward (and backward, with the sum of the parameter gradients); (ShareResult, that sum or None)."""
        step = Step(self.engine, self.exchange, Clock(), self.segments, self.problem.options, self.scan,
                    self.what == BOTH)
        result, total = step.forward(self.share, self.states), None
        if self.what == BOTH:
            step.backward(self.d_outs, self.d_states)
            HV, K = self.share.operands.value_heads, self.share.operands.K
            mine = np.zeros((HV, 1 + K))
            for gradients in result.gradients.values():
                mine += np.concatenate([to_host(gradients.dA_log)[:, None], to_host(gradients.ddt_bias)], axis=1)
            total = self.exchange.sum(mine, "summing the parameter gradients")
        self.problem.machine.synchronize()
        return result, total

    def error(self, expected):
        """The largest error of any of this rank's results; expected: of `Problem.expected`."""
        result, total = self.run()
        heads, segment = self.problem.checked_heads, self.segment
        ended = result.final_state[: len(segment.ended)]
        pairs = [("final_state", ended, _rows(expected["final_state"], segment.ended))]
        if total is not None:
            first = len(self.states) - len(segment.started)
            pairs += [("d_initial_state", result.d_initial_state[first:],
                       _rows(expected["d_initial_state"], segment.started)),
                      ("dA_log", total[:, 0], expected["dA_log"]), ("ddt_bias", total[:, 1:], expected["ddt_bias"])]
        for name, group in self.share.named_groups:
            tokens = slice(segment.start + group.start, segment.start + group.stop)
            pairs.append(("out", result.forwards[name].out, expected["out"][tokens]))
            if total is not None:
                pairs += [(tensor, getattr(result.gradients[name], tensor), expected[tensor][tokens])
                          for tensor in ("dq", "dk", "dv", "dg", "dbeta")]
        return float(np.max([compare(pick_heads(name, ours, heads), theirs) for name, ours, theirs in pairs]))

    def _poll(self):
        self.exchange.progress()
        self.exchange.poll()


def _rows(states, sequences):
    return to_host(states)[sequences.start : sequences.stop]
