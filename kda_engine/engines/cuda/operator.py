"""The operator with everything but its arrays fixed: what a call costs the host is the launches themselves."""

import cupy

from ... import layout
from ...device.device import capturing
from ...device.tape import Tape
from ...errors import InputError
from ...gate import Gradients
from ...options import Options
from .. import make_engine
from . import fused_backward, slabs
from .paths import DECODE, FUSED
from .problem import VECTOR

_ARGUMENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
_TOKENS = ("dq", "dk", "dv", "dg", "dbeta")


class Operator:
    """KDA for one kind of call on CuPy's current device: shapes, types, options and sequences are those of the arrays given
    here, whose values do not matter. Scratch memory is this object's own.

    Arguments as for `kda_engine.forward`; the arrays are CuPy's, contiguous, on multiples of 16 bytes, q, k, v, g and beta
    of one 16-bit type, the others float32; cu_seqlens is NumPy int64 or None; options.state_layout is "KV". backward:
    whether `backward` is wanted, for which the forward then leaves records. Head sizes, options and device must be those
    of the fused kernels, or without `backward` sequences of a few tokens. Raises InputError for all else.

    Calls are launched on the current stream and may be captured in a graph. They share scratch memory, so each must
    follow the one before on one stream, or wait for it.
    """

    def __init__(self, q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, cu_seqlens=None, options=Options(),
                 backward=False):
        self._engine, self._options = make_engine("cuda"), options
        arrays = q, k, v, g, beta, A_log, dt_bias, initial_state
        calls, device = self._engine.calls, self._engine.device
        operands, self._packing = layout.pack(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options.gate, initial_state)
        seen = None
        if options.state_layout == "KV":
            initial_state = initial_state if initial_state is None else layout.state_in(
                "initial_state", initial_state, operands, "KV")
            seen = calls.look(arrays, cu_seqlens, options)
        if seen is not None:
            calls.add(seen, arrays, operands, self._packing, options, initial_state)
        call = None if seen is None else calls.find(seen)
        if call is None:
            raise InputError("operator: expected contiguous CuPy arrays on multiples of 16 bytes, of one type but for "
                             "float32 A_log, dt_bias and initial_state (none of the first two with gate 'log'), cu_seqlens "
                             "as NumPy int64 and state_layout 'KV', got others")
        self._look, self._seen = calls.look, seen[2:]
        self._like = [None if x is None else (x.shape, x.dtype) for x in arrays]
        _, problem = call.take(*arrays[:-1])
        path = FUSED if backward or not DECODE.covers(problem) else DECODE
        reason = path.refusal(problem)
        if reason is not None:
            raise InputError(f"operator: expected a problem of the fused kernels: {reason}")
        if slabs.chunks_of_slab(problem, path.forward_bytes(problem, backward)) is not None:
            raise InputError("operator: expected a problem whose records fit in half of the device's memory, got one that "
                             "is computed in slabs")
        with device.holding() as self._held:
            self._problem, self._arrays = problem, None
            self._out, self._final_state = problem.empty_like_values(), problem.empty_states()
            if path is DECODE and initial_state is None:
                # The kernel reads it.
                initial_state = problem.zero_states()
            self._zeros = initial_state if path is DECODE else None
            like = *problem[:7], initial_state, self._out, self._final_state

            def forward(*given):
                return path.forward(_with(problem, given), given[7], backward, *given[8:])

            self._forward = Tape(forward, like)
            self._record = self._forward.result[0]
            self._backward = self._make_backward() if backward else None

    def _make_backward(self):
        """The Tape of the backward: operands, d_out, d_final_state, then the results."""
        problem, states = self._problem, self._problem.empty_states()
        self._gradients = {name: cupy.empty(x.shape, x.dtype) for name, x in zip(_TOKENS, problem[:5])}
        self._d_initial_state = states
        like = *problem[:7], self._out, states, *self._gradients.values(), states

        def backward(*given):
            return fused_backward.launch_all(_with(problem, given), self._record, given[7], given[8],
                                             dict(zip(_TOKENS, given[9:14])), given[14])

        return Tape(backward, like)

    def forward(self, q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, out=None, final_state=None):
        """(out, final_state) of arrays like those of the constructor; of `kda_engine.forward` bit for bit.

        out, final_state: where results go, shaped and typed as they are, contiguous, on multiples of 16 bytes; None: this
        object's own arrays, which the next call overwrites. Arrays must stay as they are until the backward is done.
        Raises InputError naming the argument that is not like the constructor's.
        """
        arrays = q, k, v, g, beta, A_log, dt_bias, initial_state, out, final_state
        if not _same(arrays, self._arrays):
            self._check(arrays)
            out = self._taken("out", out, self._out, v.shape)
            final_state = self._taken("final_state", final_state, self._final_state, self._final_state.shape)
            state = self._zeros if initial_state is None else initial_state
            self._addresses = [0 if x is None else x.data.ptr for x in (*arrays[:7], state, out, final_state)]
            self._arrays, self._results = arrays, (out.reshape(v.shape), final_state)
        self._forward(self._addresses)
        return self._results

    def backward(self, d_out, d_final_state=None):
        """The `Gradients` of the last forward, as `kda_engine.backward` gives them, in this object's own arrays.

        d_out: shaped and typed as v; d_final_state: float32, absent: zeros. Raises InputError, also where the
        constructor was not asked for it or no forward was made.
        """
        if self._backward is None or self._arrays is None:
            raise InputError("operator: expected backward=True when it was made and a forward before its backward")
        self._expect("d_out", d_out, (self._arrays[2].shape, self._out.dtype))
        if d_final_state is not None:
            self._expect("d_final_state", d_final_state, (self._d_initial_state.shape, self._d_initial_state.dtype))
        own = self._gradients
        self._backward((*self._addresses[:7], d_out.data.ptr, 0 if d_final_state is None else d_final_state.data.ptr,
                        *[x.data.ptr for x in own.values()], self._d_initial_state.data.ptr))
        A_log, dt_bias = self._sum_parameters()
        return Gradients(**{name: self._packing.unpack(x) for name, x in own.items()}, dA_log=A_log, ddt_bias=dt_bias,
                         d_initial_state=self._d_initial_state)

    def _sum_parameters(self):
        """dA_log and ddt_bias in float32, None for those that are absent. What a graph works with is held."""
        A_log, dt_bias = self._arrays[5:7]
        of_rate, of_bias, _ = self._backward.result
        if not capturing():
            sums = fused_backward.sum_tiles(of_rate, of_bias)
            return [None if given is None else d.astype("f4") for given, d in zip((A_log, dt_bias), sums)]
        with self._engine.device.holding() as held:
            sums = fused_backward.sum_tiles(of_rate, of_bias)
            found = [None if given is None else d.astype("f4") for given, d in zip((A_log, dt_bias), sums)]
        self._held += held
        return found

    def _check(self, arrays):
        number = self._engine.device.number
        if cupy.cuda.runtime.getDevice() != number:
            raise InputError(f"device: expected the current device to be {number}, of which this operator is, got "
                             f"{cupy.cuda.runtime.getDevice()}")
        seen = self._look(arrays[:8], None, self._options)
        if seen is None or seen[2:] != self._seen:
            for name, x, like in zip(_ARGUMENTS, arrays, self._like):
                self._expect(name, x, like)

    def _taken(self, name, x, own, shape):
        """Where a result goes, or a gradient comes from: x, which must be like `own` in the caller's shape, or `own`."""
        if x is None:
            return own
        self._expect(name, x, (shape, own.dtype))
        return x

    def _expect(self, name, x, like):
        """Raises InputError unless x is like (shape, type), or None where that is None."""
        if like is None or x is None:
            if x is not like:
                given = lambda found: "none" if found is None else "an array"
                raise InputError(f"{name}: expected {given(like)}, as when the operator was made, got {given(x)}")
            return
        shape, dtype = like
        if type(x) is not cupy.ndarray or x.shape != shape or x.dtype != dtype:
            found = f"{x.dtype} {x.shape}" if hasattr(x, "dtype") and hasattr(x, "shape") else ""
            raise InputError(f"{name}: expected a CuPy array {dtype} {shape}, got {type(x).__name__} {found}")
        number = self._engine.device.number
        if not x.flags.c_contiguous or x.data.ptr % VECTOR or x.data.device_id != number:
            raise InputError(f"{name}: expected a contiguous array on a multiple of {VECTOR} bytes on device {number}, got "
                             f"one that is not")


def _same(arrays, others):
    """Whether they are the very same arrays."""
    if others is None:
        return False
    for x, other in zip(arrays, others):
        if x is not other:
            return False
    return True


def _with(problem, arrays):
    """The Problem with the addresses of other operands."""
    return problem._replace(addresses=tuple(0 if x is None else x.data.ptr for x in arrays[:7]))
