"""Options of the operator: what the numbers mean, not how they are computed."""

import math
from dataclasses import asdict, dataclass, fields

import numpy as np

from .errors import InputError
from .misnamed import suggest_names

GATES = ("lower_bound", "softplus", "log")
BETAS = ("logit", "logit2", "value")
STATE_LAYOUTS = ("KV", "VK")
DECAY_SKIPS = ("exact", "certified", "sampled")

# The bound below which sixteen tokens' decay no longer fits float32's exponent range.
LOWEST_LOWER_BOUND = -5.0


@dataclass(frozen=True, repr=False)
class Options:
    """How KDA's inputs are to be read. Immutable; every field is checked on construction.

    gate: "lower_bound" (log decay = lower_bound * sigmoid(exp(A_log) * (g + dt_bias))),
        "softplus" (-exp(A_log) * softplus(g + dt_bias)) or "log" (g is the natural log decay already).
    lower_bound: in [-5, 0), nats per token; read by the gate of that name only.
    beta: "logit" (sigmoid), "logit2" (2 * sigmoid, negative eigenvalues) or "value" (beta as it is).
    qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6) over K.
    scale: factor on q; None means 1/sqrt(K).
    state_layout: "KV" or "VK", of every state passed in and handed out.
    decay_skip: "exact", "certified" or "sampled"; None means certified if tolerance > 0, else exact.
    tolerance: bound on the norm of a segment transition that may be dropped, in [0, 1). A segment is a rank's, or one that
        a device cuts for itself; what was dropped there is in `ForwardResult.dropped`.

    Raises InputError for any other value.
    """

    gate: str = "lower_bound"
    lower_bound: float = -5.0
    beta: str = "logit"
    qk_l2norm: bool = True
    scale: float | None = None
    state_layout: str = "KV"
    decay_skip: str | None = None
    tolerance: float = 0.0

    def __post_init__(self):
        _check_choice("gate", self.gate, GATES)
        _check_choice("beta", self.beta, BETAS)
        _check_choice("state_layout", self.state_layout, STATE_LAYOUTS)
        if self.decay_skip is not None:
            _check_choice("decay_skip", self.decay_skip, DECAY_SKIPS)
        if not isinstance(self.qk_l2norm, (int, np.integer, np.bool_)) or self.qk_l2norm not in (0, 1):
            raise InputError(f"qk_l2norm: expected true or false, got {self.qk_l2norm!r}")
        object.__setattr__(self, "qk_l2norm", bool(self.qk_l2norm))
        object.__setattr__(self, "lower_bound", _number("lower_bound", self.lower_bound))
        object.__setattr__(self, "tolerance", _number("tolerance", self.tolerance))
        if not LOWEST_LOWER_BOUND <= self.lower_bound < 0:
            raise InputError(f"lower_bound: expected a number in [{LOWEST_LOWER_BOUND:g}, 0), got {self.lower_bound!r}")
        if self.scale is not None:
            object.__setattr__(self, "scale", _number("scale", self.scale))
        if not 0 <= self.tolerance < 1:
            raise InputError(f"tolerance: expected a number in [0, 1), got {self.tolerance!r}")
        if self.decay_skip in ("certified", "sampled") and self.tolerance == 0:
            raise InputError(f"tolerance: decay_skip={self.decay_skip!r} needs a tolerance above 0, got 0")

    @property
    def skip(self):
        """The decay skip in force: "exact", "certified" or "sampled"."""
        return self.decay_skip or ("certified" if self.tolerance > 0 else "exact")

    def scale_for(self, K):
        """The factor on q for key size K (float)."""
        return 1.0 / math.sqrt(K) if self.scale is None else self.scale

    def __repr__(self):
        # What differs from the defaults, which the docstring lists.
        given = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)
                 if getattr(self, field.name) != field.default]
        return f"Options({', '.join(given)})"

    def to_dict(self):
        """Plain types, as stored in files and reports."""
        return asdict(self)


# The constructor is the dataclass's own, so it can only be wrapped afterwards.
Options.__init__ = suggest_names(Options.__init__)


def _check_choice(name, value, allowed):
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def _number(name, value):
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected a number, got {value!r}") from None
    except OverflowError:
        raise InputError(f"{name}: expected a number that float64 holds, got a larger one") from None
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise InputError(f"{name}: expected a finite number, got {value!r}")
    return number
