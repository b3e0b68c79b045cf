"""Argument names that are not known here: which one was meant. Other libraries' names lead to this one's."""

import difflib
import inspect
from functools import wraps
from typing import TypeVar

Function = TypeVar("Function")

# Names that other implementations of the operator use, and the argument or option of the same meaning here.
_ARGUMENTS = {
    **dict.fromkeys(("h0", "state", "initial_state"), ("initial_state", "state")),
    **dict.fromkeys(("cu_seqlens_cpu", "offsets"), ("cu_seqlens",)),
    **dict.fromkeys(("do", "dout", "grad_output"), ("d_out", "dy")),
    **dict.fromkeys(("dt", "bias"), ("dt_bias",)),
    "A": ("A_log",), "dht": ("d_final_state",), "transpose_state_layout": ("state_v_first",),
}
_OPTIONS = {
    "use_qk_l2norm_in_kernel": "qk_l2norm=...",
    "use_gate_in_kernel": 'gate="lower_bound" or "softplus", and "log" for False',
    "use_beta_sigmoid_in_kernel": 'beta="logit", and "value" for False',
    "allow_neg_eigval": 'beta="logit2"',
    "safe_gate": 'gate="lower_bound", lower_bound=...',
    "state_v_first": 'state_layout="VK"',
    "transpose_state_layout": 'state_layout="VK"',
}
_NEEDLESS = {
    "output_final_state": "the final state is always handed out",
    "chunk_size": "the engine chooses the chunk's size",
    "disable_recompute": "save=True keeps what the backward needs",
    "cp_context": "`kda-engine run` under mpirun cuts sequences over ranks",
}


def suggest_names(function: Function) -> Function:
    """The function, whose TypeError for an unknown keyword says which one was probably meant."""
    names = tuple(name for name in inspect.signature(function).parameters if name != "self")
    known = frozenset(names)

    @wraps(function)
    def checked(*args, **kwargs):
        if not known.issuperset(kwargs):
            wrong = next(name for name in kwargs if name not in known)
            raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}() got an unexpected keyword argument "
                            f"'{wrong}': {_hint(wrong, names)}")
        return function(*args, **kwargs)

    return checked


def _hint(wrong, names):
    from .options import Options

    options = inspect.signature(Options).parameters.keys()
    # How an option is said there: inside of `options`, or as an argument of Options itself.
    say = "options=Options({})".format if "options" in names else str if names == tuple(options) else None
    for name in _ARGUMENTS.get(wrong, ()):
        if name in names:
            return f"did you mean {name}?"
    if say is not None and wrong in _OPTIONS:
        return f"here that is {say(_OPTIONS[wrong])}; kda_engine.compat.chunk_kda takes the name as it is"
    if say is not None and wrong in options:
        return f"did you mean {say(wrong + '=...')}?"
    if wrong in _NEEDLESS:
        return f"not needed here, {_NEEDLESS[wrong]}"
    near = difflib.get_close_matches(wrong, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    near = difflib.get_close_matches(wrong, options, n=1) if say is not None else []
    return f"did you mean {say(near[0] + '=...')}?" if near else f"expected {', '.join(names)}"
