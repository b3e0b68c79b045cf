"""Activations of the operator and their derivatives, for any array module.

Gate forms (raw g to natural log decay), beta forms and the q/k norm; formulas as in the operator's definition
(docs/operator.md). Everything is elementwise or a sum over one head's channels, so slabs may be cut freely.
"""

from dataclasses import dataclass

import numpy as np

from .arrays import array_module, brief

# exp of these and of their negatives are normal numbers, by the bytes of the type.
LARGEST_EXPONENT = {4: 87.0, 8: 708.0}

# Under the root of the q/k norm.
L2NORM_EPSILON = 1e-6


def sigmoid(x):
    """1 / (1 + e^-x); accurate to rounding for either sign, 0 where e^-x overflows."""
    with np.errstate(over="ignore"):
        return 1 / (1 + array_module(x).exp(-x))


def softplus(x):
    """log(1 + e^x) without overflow."""
    module = array_module(x)
    return module.maximum(x, 0) + module.log1p(module.exp(-abs(x)))


def _factors(exponent):
    """Finite numbers whose product is e^exponent; one where that is a normal number everywhere, else two.

    In a product with a small number e^exponent may then leave the type's range, as far as its square. Where it does
    not, the second factor is 1.
    """
    module, largest = array_module(exponent), LARGEST_EXPONENT[exponent.dtype.itemsize]
    near = module.clip(exponent, -largest, largest)
    if (near == exponent).all():
        return (module.exp(near),)
    return module.exp(near), module.exp(module.clip(exponent - near, -largest, largest))


def _product(x, *factors):
    """x times each of the factors, in their order."""
    for factor in factors:
        x = x * factor
    return x


@dataclass(frozen=True)
class Gate:
    """The gate of some heads in the working type: raw g [T,HV,K] to log decay, and back.

    log_rate [HV,1]: A_log; bias [HV,K]: dt_bias (zeros where absent).

    rate = e^log_rate may leave the type's range, and so may the sigmoid that it multiplies; their product does not.
    Where one of them does, the product is formed from the sum of the two logarithms.
    """

    form: str
    lower_bound: float
    log_rate: object
    bias: object

    @classmethod
    def of(cls, operands, options, dtype):
        module = array_module(operands.k)
        HV, K = operands.value_heads, operands.K
        log_rate, bias = module.zeros((HV, 1), dtype), module.zeros((HV, K), dtype)
        if operands.A_log is not None:
            log_rate = operands.A_log.astype(dtype, copy=False)[:, None]
        if operands.dt_bias is not None:
            bias = operands.dt_bias.astype(dtype, copy=False)
        return cls(options.gate, options.lower_bound, log_rate, bias)

    def log_decay(self, g):
        """Log decay per token and channel, at most 0; the shape of g [...,HV,K]."""
        if self.form == "log":
            return g
        shifted = g + self.bias
        if self.form == "softplus":
            near, *far = _factors(self.log_rate)
            # Far to the left softplus(x) is e^x.
            return -self._where_deep(_product(near * softplus(shifted), *far), shifted)
        return self.lower_bound * sigmoid(_product(shifted, *_factors(self.log_rate)))

    def adjoint(self, d_log_decay, g):
        """(dg, dA_log [HV], ddt_bias [HV,K]) from the gradient of the log decay; g [T,HV,K].

        The parameter gradients are summed over T in float64. For the `log` form they are zeros.
        """
        module = array_module(g)
        if self.form == "log":
            return d_log_decay, module.zeros(g.shape[1], "f8"), module.zeros(g.shape[1:], "f8")
        shifted = g + self.bias
        near, *far = _factors(self.log_rate)
        if self.form == "softplus":
            dg = -self._where_deep(_product(near * sigmoid(shifted), d_log_decay, *far), shifted, d_log_decay)
            dx, x = d_log_decay, self.log_decay(g)
        else:
            x = _product(shifted, near, *far)
            bounded = d_log_decay * self.lower_bound
            dx = bounded * sigmoid(x) * sigmoid(-x)
            # Far out on either side the sigmoid's slope is e^-|x|.
            dg = self._where_deep(_product(dx, near, *far), -abs(x), bounded)
        # Of a channel that was reset or masked x is infinite and its gradient 0: 0 * inf is not to be summed.
        with np.errstate(invalid="ignore"):
            rate_part = module.where(dx == 0, 0, dx * x)
        return dg, rate_part.sum(axis=(0, 2), dtype="f8"), dg.sum(axis=0, dtype="f8")

    def _where_deep(self, usual, exponent, *factors):
        """`usual`, but rate e^exponent times the factors where e^exponent is no normal number."""
        module = array_module(usual)
        deep = exponent < -LARGEST_EXPONENT[usual.dtype.itemsize]
        if not deep.any():
            return usual
        first, *others = _factors(self.log_rate + exponent)
        return module.where(deep, _product(first, *others, *factors), usual)


def activate_beta(beta, form):
    """The write strength from raw beta: sigmoid, 2 * sigmoid or beta itself."""
    if form == "value":
        return beta
    return sigmoid(beta) if form == "logit" else 2 * sigmoid(beta)


def beta_adjoint(d_activated, beta, form):
    """Gradient of raw beta from that of the activated one."""
    if form == "value":
        return d_activated
    slope = sigmoid(beta) * sigmoid(-beta)
    return d_activated * (slope if form == "logit" else 2 * slope)


def l2norm(x, enabled):
    """(x / sqrt(sum x^2 + 1e-6), the factor itself [...,1]) over the last axis; (x, None) when not enabled."""
    if not enabled:
        return x, None
    module = array_module(x)
    factor = _norm_factor(x)
    if x.dtype.itemsize < 8:
        # Rows whose squares leave float32; by row, so that a row's factor does not depend on what its neighbours hold.
        overflown = ~(factor[..., 0] > 0)
        if overflown.any():
            factor[overflown] = _norm_factor(x[overflown].astype("f8")).astype(x.dtype)
    return x * factor, factor


def _norm_factor(x):
    module = array_module(x)
    square = module.einsum("...d,...d->...", x, x)[..., None]
    return 1 / module.sqrt(square + square.dtype.type(L2NORM_EPSILON))


def l2norm_adjoint(d_normed, normed, factor):
    """Gradient of the raw vector: factor * (d - normed (normed . d)); d itself when the norm was off."""
    if factor is None:
        return d_normed
    if normed.shape[-1] == 1:
        # 1 - normed^2, with normed near 1, formed without the difference.
        return factor * (L2NORM_EPSILON * factor * factor * d_normed)
    along = array_module(normed).einsum("...d,...d->...", normed, d_normed)[..., None]
    return factor * (d_normed - normed * along)


@dataclass(frozen=True)
class Activated:
    """A slab of tokens after activation, working type: q, k [T,HV,K] (repeated per value head), v, log_decay, beta.

    q carries no scale.
    """

    q: object
    k: object
    v: object
    log_decay: object
    beta: object


def activate(operands, options, dtype):
    """All activations of a (slab of a) problem; the numbers every engine computes with."""
    module = array_module(operands.k)
    group = operands.value_heads // operands.heads
    wide = lambda x: module.repeat(x, group, axis=1) if group > 1 else x
    gate = Gate.of(operands, options, dtype)
    return Activated(
        q=wide(l2norm(operands.q.astype(dtype, copy=False), options.qk_l2norm)[0]),
        k=wide(l2norm(operands.k.astype(dtype, copy=False), options.qk_l2norm)[0]),
        v=operands.v.astype(dtype, copy=False),
        log_decay=gate.log_decay(operands.g.astype(dtype, copy=False)),
        beta=activate_beta(operands.beta.astype(dtype, copy=False), options.beta),
    )


@dataclass(frozen=True)
class Gradients:
    """Gradients of one problem, each in the working type; the parameters' float64.

    dq, dk [T,H,K]; dv [T,HV,V]; dg [T,HV,K]; dbeta [T,HV]; dA_log [HV]; ddt_bias [HV,K];
    d_initial_state [N,HV,K,V].
    """

    dq: object
    dk: object
    dv: object
    dg: object
    dbeta: object
    dA_log: object
    ddt_bias: object
    d_initial_state: object

    def __repr__(self):
        return f"Gradients({', '.join(f'{name}={brief(x)}' for name, x in vars(self).items())})"


def activate_adjoint(d, operands, options, dtype, d_initial_state=None):
    """Gradients of the raw operands from `d`, an `Activated` that holds the gradients of the activated ones.

    dq and dk are summed over the value heads that share a query/key head before the norm.
    """
    group = operands.value_heads // operands.heads
    narrow = lambda x: x.reshape(x.shape[0], operands.heads, group, x.shape[2]).sum(axis=2) if group > 1 else x
    through_norm = lambda dx, x: l2norm_adjoint(narrow(dx), *l2norm(x.astype(dtype, copy=False), options.qk_l2norm))
    dg, dA_log, ddt_bias = Gate.of(operands, options, dtype).adjoint(d.log_decay, operands.g.astype(dtype, copy=False))
    return Gradients(
        dq=through_norm(d.q, operands.q),
        dk=through_norm(d.k, operands.k),
        dv=d.v,
        dg=dg,
        dbeta=beta_adjoint(d.beta, operands.beta.astype(dtype, copy=False), options.beta),
        dA_log=dA_log,
        ddt_bias=ddt_bias,
        d_initial_state=d_initial_state,
    )
