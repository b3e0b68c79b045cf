"""The public calls on whole problems: check at the edge, run one engine, hand back in the caller's form."""

from dataclasses import dataclass, replace

import numpy as np

from . import conv, layout
from .affine import Affine
from .arrays import array_module, as_array, as_float_array, brief, like
from .chunk_states import chunk_states
from .decay import Dropped
from .engines import Saved, cuda_usable, make_engine
from .errors import InputError
from .finite import check_states, check_values, first_non_finite
from .gate import Gradients
from .misnamed import suggest_names
from .options import Options


# What each gradient has a row for.
_GRADIENT_ROWS = {"dq": "token", "dk": "token", "dv": "token", "dg": "token", "dbeta": "token",
                  "d_initial_state": "sequence", "dA_log": "head", "ddt_bias": "head"}


# Made in every call and therefore not frozen, which would take several times as long; nobody assigns to its fields.
@dataclass
class ForwardResult:
    """out, shaped and typed as v; final_state [N,HV,K,V] (or [N,HV,V,K], by state_layout), float32 or float64.

    path: what computed it: "decode", "fused" or "portable" kernels on a device, else the engine's name. path_reason: in
    words, why no faster path did, where the problem's shape allows one; else None.
    """

    out: object
    final_state: object
    path: str
    path_reason: str | None
    _engine: object
    _saved: Saved | None
    _packing: layout.Packing
    _example: object
    _dropped: tuple
    _cu_seqlens: np.ndarray

    def __repr__(self):
        return f"ForwardResult(out={brief(self.out)}, final_state={brief(self.final_state)}, path={self.path!r})"

    @property
    def dropped(self):
        """What the certified rule dropped at cuts within a device, in this forward and its last backward: `Dropped`.

        Found when it is asked for, which goes over the inputs again: leave them unchanged until then.
        """
        calls = self._dropped + (() if self._saved is None else self._saved.dropped)
        return Dropped.of([row for call in calls for row in call()])

    def first_non_finite(self, gradients=None):
        """The first NaN or infinity: a `NonFinite` with tensor, count, sequence, head and token; None without any.

        Looks at out, then final_state, then what `backward` returned, where that is given. Reads all values once.
        """
        tensors = [("out", self.out, "token"), ("final_state", self.final_state, "sequence")]
        if gradients is not None:
            tensors += [(name, getattr(gradients, name), rows) for name, rows in _GRADIENT_ROWS.items()]
        for name, x, rows in tensors:
            if x is None:
                continue
            x = as_array(name, x)
            if rows == "token" and self._packing.batch is not None:
                x = x.reshape((-1,) + x.shape[2:])
            found = first_non_finite(name, x, rows, self._cu_seqlens)
            if found is not None:
                return found
        return None

    def chunk_states(self, every):
        """The states behind every whole block of `every` tokens of each sequence, as caches of prefixes want them:
        a `ChunkStates`.

        Computed when asked for, from block to block: about the work of a summary, and only the states to hold. A
        forward of the tokens behind a block, from its state, gives the outputs of the whole. Raises InputError, also
        when the forward kept nothing (save=False).
        """
        if isinstance(every, bool) or not isinstance(every, (int, np.integer)) or every < 1:
            raise InputError(f"every: expected a whole number of tokens, at least 1, got {every!r}")
        if self._saved is None:
            raise InputError("chunk_states: expected a forward with save=True, got one that kept nothing")
        saved = self._saved
        sequence, token, states = chunk_states(self._engine, saved.operands, saved.options, saved.initial_state,
                                               int(every))
        states = like(layout.state_out(states, saved.options.state_layout), self._example)
        return ChunkStates(sequence, token, states)


@dataclass(frozen=True)
class ChunkStates:
    """states [M,HV,K,V] (or [M,HV,V,K], by state_layout): states[i] is that of sequence[i] behind token[i] tokens.

    sequence, token [M]: NumPy int64, ordered by sequence, then token.
    """

    sequence: np.ndarray
    token: np.ndarray
    states: object

    def __repr__(self):
        return f"ChunkStates(states={brief(self.states)})"


@suggest_names
def forward(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, cu_seqlens=None, options=Options(),
            engine="auto", save=True, check_finite=False) -> ForwardResult:
    """KDA forward.

    q, k [T,H,K] or [B,T,H,K]; v [..,HV,V]; g [..,HV,K]; beta [..,HV]; A_log [HV]; dt_bias [HV,K];
    initial_state [N,HV,K,V]; cu_seqlens [N+1] integers, with packed input or B = 1. bfloat16, float16, float32 or
    float64, mixed as you like; NumPy, CuPy or anything with DLPack or an array interface. PyTorch's tensors are read without
    their autograd history, and results have none: `backward` makes the gradients.

    save: keep what `backward` needs: states, and the inputs themselves, not copies of them, so leave those unchanged
    until then. check_finite: look for values that cannot be right first.
    Returns a ForwardResult. Raises InputError naming the argument.
    """
    _check_options(options)
    runner, seen = make_engine(engine), None
    arrays = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    if runner.calls is not None and not check_finite:
        seen = runner.calls.look(arrays, cu_seqlens, options)
    known = None if seen is None else runner.calls.find(seen)
    if known is not None:
        packing, bounds = known.packing, known.bounds
        result = runner.forward_again(known, arrays[:-1], initial_state, save)
    else:
        operands, packing = layout.pack(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, options.gate, initial_state)
        state = None
        if initial_state is not None:
            state = layout.state_in("initial_state", initial_state, operands, options.state_layout)
        if check_finite:
            check_values(operands, options)
            if state is not None:
                check_states(initial_state=state)
        operands = _taken(runner, operands)
        if state is not None:
            state = runner.take_array(state)
        result, bounds = runner.forward(operands, options, state, save), operands.cu_seqlens
        if seen is not None:
            runner.calls.add(seen, arrays, operands, packing, options, state)
    return ForwardResult(
        out=like(packing.unpack(result.out), v),
        final_state=like(layout.state_out(result.final_state, options.state_layout), v),
        path=result.path or runner.name, path_reason=result.path_reason,
        _engine=runner, _saved=result.saved, _packing=packing, _example=v, _dropped=result.dropped,
        _cu_seqlens=bounds,
    )


@suggest_names
def backward(fwd: ForwardResult, d_out, d_final_state=None) -> Gradients:
    """All gradients of a forward: a `Gradients` with each tensor shaped and typed as its input.

    d_out as fwd.out; d_final_state [N,HV,K,V] (zeros when absent). dA_log and ddt_bias are None when the parameter
    was not given or the gate is "log". Raises InputError, also when the forward kept nothing (save=False).
    """
    if not isinstance(fwd, ForwardResult):
        raise InputError(f"fwd: expected the result of forward, got {type(fwd).__name__}")
    if fwd._saved is None:
        raise InputError("fwd: expected a forward with save=True, got one that kept nothing for the backward")
    runner, operands, options = fwd._engine, fwd._saved.operands, fwd._saved.options
    packing, hand_back = fwd._packing, lambda x: like(x, fwd._example)
    # The operands are where the engine works by now, and so must these be before they are looked at.
    taken = lambda name, x: None if x is None else runner.take_array(as_float_array(name, x))
    d_out = layout.gradient_in("d_out", taken("d_out", d_out), operands, packing)
    d_state = layout.state_in("d_final_state", taken("d_final_state", d_final_state), operands, options.state_layout)
    raw = runner.backward(fwd._saved, d_out, d_state)
    of_parameter = lambda d, given: None if given is None else hand_back(d.astype(operands.state_dtype))
    return Gradients(
        **{name: hand_back(packing.unpack(getattr(raw, name))) for name in ("dq", "dk", "dv", "dg", "dbeta")},
        dA_log=of_parameter(raw.dA_log, operands.A_log),
        ddt_bias=of_parameter(raw.ddt_bias, operands.dt_bias),
        d_initial_state=hand_back(layout.state_out(raw.d_initial_state, options.state_layout)),
    )


@suggest_names
def summarize(k, v, g, beta, A_log=None, dt_bias=None, cu_seqlens=None, options=Options(),
              engine="auto") -> Affine:
    """The affine map of each sequence's state: Affine(M [N,HV,K,K], S [N,HV,K,V]), S_out = M S_in + S.

    Arguments as in `forward`. M and S are always in [K,.] order, whatever the state_layout; float32, or float64 where
    the problem is. Raises InputError naming the argument.
    """
    _check_options(options)
    operands, _ = layout.pack(None, k, v, g, beta, A_log, dt_bias, cu_seqlens, options.gate)
    runner = make_engine(engine)
    operands = _taken(runner, operands)
    zeros = layout.state_in("initial_state", None, operands, "KV")
    pair = runner.summarise(operands, options, zeros, transition=True)
    return Affine(like(pair.M, v), like(pair.S, v))


@suggest_names
def step(q, k, v, g, beta, state, A_log=None, dt_bias=None, options=Options(),
         engine="auto") -> tuple:
    """Decoding: one or a few tokens of every sequence of a batch from `state` [B,HV,K,V]; returns (out, new state).

    q, k [B,T,H,K] and so on, or [T,H,K] for a single sequence (state [1,HV,K,V]; [..,V,K] by state_layout); types as
    in `forward`. out is shaped and typed as v, the new state float32, or float64 where the problem is. None as state is
    zeros. Raises InputError naming the argument.
    """
    try:
        result = forward(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=state, options=options,
                         engine=engine, save=False)
    except InputError as error:
        # Under the name that it has here.
        raise InputError(str(error).replace("initial_state:", "state:", 1)) from None
    return result.out, result.final_state


@suggest_names
def short_conv(x, weight, bias=None, activation="silu", cu_seqlens=None, halo=None):
    """The short causal depthwise convolution before q, k or v: y, shaped and typed as x.

    x [T,H,K] or [T,channels], bfloat16, float16, float32 or float64, on the host or a device; weight [channels,W] with
    channels = H K; bias [channels]; activation "silu" or None; cu_seqlens [N+1] integers; halo [N,W-1,channels]: the
    tokens before each sequence's first, oldest first (None: zeros). By kernel where x lives on a usable device. Raises
    InputError naming the argument.
    """
    given = conv.ConvArguments.of(x, weight, bias, activation, cu_seqlens, halo)
    kernels = _conv_kernels(given)
    if kernels is not None:
        return like(kernels.short_conv(given), x)
    return conv.short_conv(x, weight, bias, activation, cu_seqlens, halo)


@suggest_names
def short_conv_backward(dy, x, weight, bias=None, activation="silu", cu_seqlens=None, halo=None) -> tuple:
    """The gradients of `short_conv`: (dx, dweight [channels,W], dbias [channels] or None, dhalo [N,W-1,channels]).

    dy is shaped as x, the other arguments are as in `short_conv`. dx is typed as x, the others are float32, or float64
    where x is. dhalo is the gradient of the zeros before each sequence when no halo was given. Raises InputError naming
    the argument.
    """
    given = conv.ConvArguments.of(x, weight, bias, activation, cu_seqlens, halo)
    kernels = _conv_kernels(given)
    if kernels is not None:
        gradients = kernels.short_conv_backward(given, given.take_gradient(dy))
        return tuple(like(d, x) for d in gradients)
    return conv.short_conv_backward(dy, x, weight, bias, activation, cu_seqlens, halo)


def _conv_kernels(given):
    """The module of the convolution's kernels where they cover a `conv.ConvArguments`, else None."""
    if array_module(given.x) is np or not cuda_usable():
        return None
    from .engines.cuda import conv as kernels

    return kernels if kernels.covers(given) else None


def _taken(runner, operands):
    """Packed operands where the engine works. `layout.pack` has all of them on one side, so one tells whether to move.
    """
    k = runner.take_array(operands.k)
    return operands if k is operands.k else runner.take(replace(operands, k=k))


def _check_options(options):
    if not isinstance(options, Options):
        raise InputError(f"options: expected kda_engine.Options, got {type(options).__name__}")
