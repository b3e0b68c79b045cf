"""What an engine offers. Every engine computes one rank's packed problem; distribution is built on these calls.

Per-token results come back in the type of the matching input (out as v, dq as q, ...), states and boundary
matrices in `operands.state_dtype` and [N,HV,K,V] order, parameter gradients in float64.
"""

from dataclasses import dataclass, replace

from ..decay import Measure
from ..gate import Gradients
from ..layout import Operands
from ..options import Options


# Both are made in every call and therefore not frozen, which would take several times as long; nobody assigns to their
# fields.
@dataclass
class Saved:
    """What the backward needs of a forward: its inputs and, per engine, the states it kept. No initial state: zeros.

    dropped: of the last backward, as `Forward.dropped`.
    """

    operands: Operands
    options: Options
    initial_state: object
    states: object
    dropped: tuple = ()


@dataclass
class Forward:
    """out [T,HV,V]; final_state [N,HV,K,V]; saved is None when nothing was kept.

    path: which of an engine's ways through its kernels it took, None of an engine with but one. path_reason: why no
    faster one, where the problem's shape allows one. dropped: what the certified rule dropped inside the engine: calls,
    each of which gives rows of a report (`decay.Dropped`); operands must stay as they are until then.
    """

    out: object
    final_state: object
    saved: Saved | None
    path: str | None = None
    path_reason: str | None = None
    dropped: tuple = ()


class Engine:
    """The four stages. `poll` is called now and then, from the calling thread, and may raise to stop the work.

    measure: what decay decisions look at operands with, where this engine computes. calls: the kinds of calls that it
    remembers, None of an engine to which checking a call is nothing beside computing it.
    """

    name = ""
    measure = Measure()
    calls = None

    def __init__(self, poll=lambda: None):
        self.poll = poll

    def fix_sums(self):
        """Let the bits of sums over tokens depend on the tokens alone, not on how the work is shared out."""

    @classmethod
    def memory(cls, tokens, sequences, state_bytes):
        """Bytes that a forward keeps for its backward at most, inputs apart; state_bytes: of a sequence's [HV,K,V]."""
        return 0

    def check(self, operands, options):
        """Raises InputError for types and head sizes that this engine does not compute; looks at no value."""

    def take_array(self, x):
        """x where this engine computes."""
        return x

    def take(self, operands):
        """All operands where this engine computes."""
        arrays = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
        moved = {name: taken for name in arrays
                 if (x := getattr(operands, name)) is not None and (taken := self.take_array(x)) is not x}
        return replace(operands, **moved) if moved else operands

    def summarise(self, operands, options, initial_state, transition):
        """The affine map of every sequence: `Affine(M, S)`.

        S [N,HV,K,V] is the state reached from initial_state; M [N,HV,K,K] the transition, None unless `transition`.
        Reads no q.
        """
        raise NotImplementedError

    def forward(self, operands, options, initial_state, save):
        """Outputs and final states from the true initial states [N,HV,K,V], None for zeros; keeps what the backward
        needs if `save`.
        """
        raise NotImplementedError

    def summarise_backward(self, operands, options, d_out, d_final_state):
        """The gradient of the initial states [N,HV,K,V] reached from d_final_state, and nothing else.

        Does not depend on the states themselves, so it needs no forward before it.
        """
        raise NotImplementedError

    def backward(self, saved, d_out, d_final_state) -> Gradients:
        """All gradients from d_out [T,HV,V] and d_final_state [N,HV,K,V]."""
        raise NotImplementedError
