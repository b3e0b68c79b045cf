"""The paths through the kernels, the fastest first; the first that covers a problem computes it."""

from ...device import target as targets
from . import decode, fused, fused_backward, portable, portable_backward


class Path:
    """One way to compute the stages of a problem (a `Problem`); states are [N,HV,K,V] float32.

    name: as results, reports and benchmarks show it. of_backward: the path whose backward follows a forward on this one.
    """

    name = ""

    @property
    def of_backward(self):
        return self

    def runs_on(self, target):
        """Whether a Target has what the kernels need."""
        return True

    def refusal(self, problem):
        """Why this path does not compute a problem, in words; None where it does."""
        raise NotImplementedError

    def covers(self, problem):
        """Whether this path computes a problem."""
        return self.refusal(problem) is None

    def forward_bytes(self, problem, save):
        """Bytes of scratch memory and records that grow with the tokens; of a saving forward, also the backward's."""
        raise NotImplementedError

    def forward(self, problem, initial_state, save, out, final_state):
        """Writes out [T,HV,V] of the element type and final_state; returns (what the backward needs, Cuts that were
        certified), None for what there is not.

        initial_state: the true ones, None for zeros.
        """
        raise NotImplementedError

    def summary_bytes(self, problem):
        """As `forward_bytes`, of `summarise`."""
        raise NotImplementedError

    def summarise(self, problem, initial_state, transition):
        """Affine(M, S) of every sequence; S is reached from initial_state; M None unless `transition`."""
        raise NotImplementedError

    def gradient_operands(self, operands, options, d_out):
        """Operands and d_out as the next ones want them, but for d_out's type, which becomes the element type."""
        return operands, d_out

    def backward_chunks(self, operands):
        """Chunks of a slab of the next two, None where only a forward that was cut into slabs asks for them."""
        return None

    def summarise_backward(self, problem, d_out, d_final_state):
        """The gradient of the initial states reached from d_final_state."""
        raise NotImplementedError

    def backward(self, problem, record, entering, d_out, d_leaving, gradients):
        """Writes dq, dk, dv, dg and dbeta, `gradients` by name, of the element type; returns the gradient of the
        states that enter, of A_log [HV] and of dt_bias [HV,K], float64 both, and the Cuts that were certified or None.

        record: the forward's, None to make it again from the states `entering`. d_leaving: the final states' gradient.
        """
        raise NotImplementedError


class Fused(Path):
    """Everything of a chunk in one kernel."""

    name = "fused"

    def runs_on(self, target):
        return target.hopper

    def refusal(self, problem):
        return fused.refusal(problem)

    def covers(self, problem):
        return fused.covers(problem)

    def forward_bytes(self, problem, save):
        return fused.record_bytes(problem) if save else 0

    def forward(self, problem, initial_state, save, out, final_state):
        return fused.forward(problem, initial_state, save, out, final_state)

    def summary_bytes(self, problem):
        return 0

    def summarise(self, problem, initial_state, transition):
        return fused.summarise(problem, initial_state, transition)

    def summarise_backward(self, problem, d_out, d_final_state):
        return fused_backward.summarise(problem, d_out, d_final_state)

    def backward(self, problem, record, entering, d_out, d_leaving, gradients):
        if record is None:
            record, _ = fused.forward(problem, entering, True, problem.empty_like_values(), problem.empty_states())
        return fused_backward.backward(problem, record, d_out, d_leaving, gradients)


class Portable(Path):
    """Prepared chunks in global memory, then chains over them: any size, type and option that the engine takes."""

    name = "portable"

    def refusal(self, problem):
        return None

    def forward_bytes(self, problem, save):
        return portable.record_bytes(problem)

    def forward(self, problem, initial_state, save, out, final_state):
        portable.forward(problem, initial_state, out, final_state)
        return None, None

    def summary_bytes(self, problem):
        return portable.record_bytes(problem)

    def summarise(self, problem, initial_state, transition):
        return portable.summarise(problem, initial_state, transition)

    def gradient_operands(self, operands, options, d_out):
        return portable_backward.gradient_operands(operands, options, d_out)

    def backward_chunks(self, operands):
        return portable_backward.chunks_per_slab(operands)

    def summarise_backward(self, problem, d_out, d_final_state):
        return portable_backward.summarise(problem, d_out, d_final_state)

    def backward(self, problem, record, entering, d_out, d_leaving, gradients):
        return *portable_backward.backward(problem, entering, d_out, d_leaving, gradients), None


class Decode(Path):
    """Outputs and final states of sequences of a few tokens, token by token. All else is other paths' work: what it
    leaves for a backward are its inputs, with which the portable one begins.
    """

    name = "decode"

    @property
    def of_backward(self):
        return PORTABLE

    def refusal(self, problem):
        return None if decode.covers(problem) else f"a sequence of more than {decode.LONGEST} tokens"

    def covers(self, problem):
        return decode.covers(problem)

    def forward_bytes(self, problem, save):
        return 0

    def forward(self, problem, initial_state, save, out, final_state):
        decode.forward(problem, initial_state, out, final_state)
        return None, None


DECODE, FUSED, PORTABLE = PATHS = Decode(), Fused(), Portable()


def on_device(number):
    """Names of the paths whose kernels run on a device, in order; none on one that is too old."""
    try:
        target = targets.of_device(number)
    except RuntimeError:
        return []
    return [path.name for path in PATHS if path.runs_on(target)]


def forward_path(problem):
    """The Path that computes a problem's outputs."""
    for path in PATHS:
        if path.covers(problem):
            return path


def state_path(problem):
    """The Path that computes a problem's summaries, forward and backward, for which nothing was kept."""
    for path in PATHS:
        if path is not DECODE and path.covers(problem):
            return path


def reason(path, problem):
    """Why no faster path than this one computes a problem; None on the fastest that its shape allows."""
    return FUSED.refusal(problem) if path is PORTABLE and fused.shape_allows(problem) else None
