"""The distributed forward (and backward) of a benchmark's problem on the ranks of a transport."""

import numpy as np

from kda_engine.arrays import to_host
from kda_engine.bench.problem import BOTH, pick_heads
from kda_engine.compare import compare
from kda_engine.engines import make_engine
from kda_engine.layout import Operands
from kda_engine.partition import partition

from ..parallel.problem import RankProblem


class DistributedCall:
    """Everything a rank needs to run its share again and again; every rank holds the whole Problem.

    what: FORWARD or BOTH. scan: as `RankProblem` takes it. threads: of the rank, for an engine on the host.
    """

    def __init__(self, problem, what, transport, scan, threads):
        self.problem, self.what, self.transport = problem, what, transport
        segments = partition(problem.shape.cu_seqlens, transport.size)
        segment = self.segment = segments[transport.rank]
        tokens = slice(segment.start, segment.stop)
        operands = Operands(**{name: x for name, x in problem.inputs.items() if name != "initial_state"},
                            cu_seqlens=problem.shape.cu_seqlens, state_dtype=np.dtype("f4"))
        engine = make_engine(problem.machine.engine, self._poll, threads)
        self.mine = RankProblem(engine, transport, scan, segments,
                                operands.slice_tokens(tokens.start, tokens.stop), problem.options)
        self.initial_states = _rows(problem.inputs["initial_state"], segment.started)
        if what == BOTH:
            self.d_out = problem.gradients["d_out"][tokens]
            self.d_final_states = _rows(problem.gradients["d_final_state"], segment.ended)

    def run(self):
        """One forward (and backward, with the sum of the parameter gradients): its results, the second may be None."""
        forward, gradients = self.mine.forward(self.initial_states, save=self.what == BOTH), None
        if self.what == BOTH:
            gradients = self.mine.backward(forward, self.d_out, self.d_final_states)
        self.problem.machine.synchronize()
        return forward, gradients

    def error(self, expected):
        """The largest error of any of this rank's results; expected: of `Problem.expected`."""
        forward, gradients = self.run()
        heads, segment = self.problem.checked_heads, self.segment
        pairs = [("final_state", forward.final_states, _rows(expected["final_state"], segment.ended))]
        if gradients is not None:
            pairs += [("d_initial_state", gradients.d_initial_states,
                       _rows(expected["d_initial_state"], segment.started))]
            pairs += [(name, x, expected[name]) for name, x in gradients.parameters.items()]
        for number, (_, group) in enumerate(self.mine.share.named_groups):
            tokens = slice(segment.start + group.start, segment.start + group.stop)
            pairs.append(("out", forward.outs[number], expected["out"][tokens]))
            if gradients is not None:
                pairs += [(tensor, gradients.per_token(tensor)[number], expected[tensor][tokens])
                          for tensor in ("dq", "dk", "dv", "dg", "dbeta")]
        return float(np.max([compare(pick_heads(name, ours, heads), theirs) for name, ours, theirs in pairs]))

    def _poll(self):
        self.transport.control.progress()
        self.transport.control.poll()


def _rows(states, sequences):
    return to_host(states)[sequences.start : sequences.stop]
