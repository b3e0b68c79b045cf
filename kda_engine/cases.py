"""Named, seeded problems: ordinary ones, every option, ragged and empty sequences, and the inputs that break kernels.

Values are drawn in float32 and then cast, so a float64 case holds the same numbers as the float32 one.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from .arrays import FLOAT_TYPES, brief
from .errors import InputError
from .options import BETAS, GATES, Options

CONV_WIDTH = 4

# Chunk grid of the cases whose gates change from chunk to chunk.
GRID = 16


@dataclass(frozen=True)
class Convolution:
    """The short convolution before q, k and v: then a case's q, k and v are its inputs.

    activation: "silu" or None. weights: {"q", "k", "v"} to [channels,W]; biases: the same keys to [channels], or empty.
    """

    activation: str | None
    weights: dict
    biases: dict


@dataclass(frozen=True)
class Case:
    """One problem, forward and backward; NumPy arrays shaped as `kda_engine.forward` takes them (packed).

    A_log, dt_bias, cu_seqlens, initial_state, d_final_state and conv may be None. q, k, v, g, beta and d_out have the
    case's dtype; parameters, states and convolution weights float32, or float64 with it.
    repeated_keys: the problem itself is ill-conditioned, `compare.REPEATED_KEY_TOLERANCES` hold for it.
    """

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    A_log: np.ndarray | None
    dt_bias: np.ndarray | None
    cu_seqlens: np.ndarray | None
    initial_state: np.ndarray | None
    d_out: np.ndarray
    d_final_state: np.ndarray | None
    options: Options
    conv: Convolution | None
    repeated_keys: bool

    def __repr__(self):
        return f"Case({self.name!r}, q={brief(self.q)}, v={brief(self.v)}, options={self.options!r})"

    @property
    def lengths(self):
        """Tokens of each sequence, a NumPy array."""
        return np.array([len(self.q)]) if self.cu_seqlens is None else np.diff(self.cu_seqlens)


@dataclass(frozen=True)
class Sizes:
    """tokens in all; lengths: of each sequence, None for one sequence of all tokens."""

    tokens: int = 70
    heads: int = 2
    value_heads: int = 2
    K: int = 16
    V: int = 16
    lengths: tuple | None = None


@dataclass(frozen=True)
class Recipe:
    """How a case differs from the ordinary one.

    gate: mean and deviation of the raw gate's normal distribution (of log(-g) with the gate form "log").
    change: called with (random generator, drawn arrays by name, Sizes), edits the arrays in place.
    absent: arrays that are left out.
    """

    options: dict = field(default_factory=dict)
    sizes: Sizes = Sizes()
    gate: tuple = (-2.0, 2.0)
    change: object = None
    absent: tuple = ()
    conv: tuple | None = None
    repeated_keys: bool = False


def names():
    """All case names, in a fixed order."""
    return tuple(RECIPES)


def make(name, dtype="float32", seed=0, **overrides):
    """The named `Case`; the same arguments give the same numbers everywhere.

    dtype: bfloat16, float16, float32 or float64, a name or a NumPy type. overrides: tokens, heads, value_heads, K, V,
    sequences (tokens shared out raggedly among so many) or lengths (each sequence's tokens).
    Raises InputError for an unknown name, dtype or override, or sizes that do not fit.
    """
    if name not in RECIPES:
        raise InputError(f"case: expected one of {', '.join(RECIPES)}, got {name!r}")
    if seed < 0:
        raise InputError(f"seed: expected at least 0, got {seed}")
    recipe, dtype = RECIPES[name], float_type(dtype)
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    sizes = _sizes(recipe.sizes, overrides, random)
    options = Options(**recipe.options)
    x = _draw(random, sizes, options, recipe.gate)
    if recipe.change is not None:
        recipe.change(random, x, sizes)
    wide = np.dtype("f8" if dtype == np.float64 else "f4")
    parameters = ("A_log", "dt_bias", "initial_state", "d_final_state")
    cast = {key: x[key].astype(wide if key in parameters else dtype) for key in x}
    if options.state_layout == "VK":
        for key in ("initial_state", "d_final_state"):
            cast[key] = np.ascontiguousarray(cast[key].swapaxes(2, 3))
    absent = recipe.absent + (("A_log", "dt_bias") if options.gate == "log" else ())
    cast.update(dict.fromkeys(absent))
    return Case(
        name=name, **cast, options=options, repeated_keys=recipe.repeated_keys,
        cu_seqlens=None if sizes.lengths is None else np.concatenate([[0], np.cumsum(sizes.lengths)]).astype(np.int64),
        conv=None if recipe.conv is None else _convolution(random, sizes, wide, *recipe.conv),
    )


def float_type(dtype):
    for known in FLOAT_TYPES:
        if dtype in (known.name, known.str, known.str[1:], known.type):
            return known
    raise InputError(f"dtype: expected bfloat16, float16, float32 or float64, got {dtype}")


def _sizes(sizes, overrides, random):
    for key, given in overrides.items():
        least = {"tokens": 0, "sequences": 0, "lengths": 0}.get(key, 1)
        if key not in (*Sizes.__dataclass_fields__, "sequences"):
            raise InputError(f"{key}: expected an override named {', '.join(Sizes.__dataclass_fields__)} or sequences")
        for number in given if key == "lengths" else (given,):
            if not isinstance(number, (int, np.integer)) or number < least:
                raise InputError(f"{key}: expected integers of at least {least}, got {number!r}")
    group = sizes.value_heads // sizes.heads
    heads = overrides.get("heads", sizes.heads)
    value_heads = overrides.get("value_heads", heads * group)
    if value_heads % heads:
        raise InputError(f"value_heads: expected a multiple of {heads} heads, got {value_heads}")
    tokens, lengths = overrides.get("tokens", sizes.tokens), sizes.lengths
    if "lengths" in overrides:
        lengths = tuple(overrides["lengths"])
        if "sequences" in overrides or overrides.get("tokens", sum(lengths)) != sum(lengths):
            raise InputError("lengths: expected no tokens or sequences beside it that say otherwise")
    elif "sequences" in overrides or (lengths is not None and "tokens" in overrides):
        count = overrides.get("sequences", len(lengths or ()))
        if count == 0 and tokens:
            raise InputError(f"sequences: expected at least 1 for {tokens} tokens, got 0")
        lengths = tuple(random.multinomial(tokens, random.dirichlet(np.ones(count)))) if count else ()
    if lengths is not None:
        tokens = int(sum(lengths))
    return Sizes(tokens, heads, value_heads, overrides.get("K", sizes.K), overrides.get("V", sizes.V), lengths)


def _draw(random, sizes, options, gate):
    T, H, HV, K, V = sizes.tokens, sizes.heads, sizes.value_heads, sizes.K, sizes.V
    N = 1 if sizes.lengths is None else len(sizes.lengths)
    normal = lambda *shape: random.standard_normal(shape, dtype="f4")
    uniform = lambda *shape: random.random(shape, dtype="f4")
    mean, deviation = (np.float32(x) for x in gate)
    x = {"q": normal(T, H, K), "k": normal(T, H, K), "v": normal(T, HV, V), "g": mean + deviation * normal(T, HV, K),
         "beta": uniform(T, HV) if options.beta == "value" else normal(T, HV),
         "A_log": uniform(HV), "dt_bias": uniform(HV, K), "d_out": normal(T, HV, V),
         "initial_state": np.float32(0.1) * normal(N, HV, K, V), "d_final_state": np.float32(0.1) * normal(N, HV, K, V)}
    if options.gate == "log":
        x["g"] = -np.exp(x["g"])
    if not options.qk_l2norm:
        # About unit length without the norm; longer keys would let the state grow without bound.
        x["q"] *= np.float32(K**-0.5)
        x["k"] *= np.float32(K**-0.5)
    return x


def _convolution(random, sizes, dtype, activation, biased):
    channels = {"q": sizes.heads * sizes.K, "k": sizes.heads * sizes.K, "v": sizes.value_heads * sizes.V}
    bound = CONV_WIDTH**-0.5
    weights = {key: random.uniform(-bound, bound, (n, CONV_WIDTH)).astype("f4").astype(dtype)
               for key, n in channels.items()}
    biases = {key: random.uniform(-bound, bound, n).astype("f4").astype(dtype) for key, n in channels.items()}
    return Convolution(activation, weights, biases if biased else {})


def _saturated_gates(random, x, sizes):
    x["g"][...] = random.choice([-1, 1], x["g"].shape) * random.uniform(30, 60, x["g"].shape)


def _thousands_of_nats(random, x, sizes):
    strong = random.random(x["g"].shape) < 0.3
    x["g"][strong] = random.uniform(500, 3000, np.count_nonzero(strong))


def _resets(random, x, sizes):
    x["g"][random.random(x["g"].shape) < 0.1] = -np.inf
    # Now and then all channels at once, and a whole chunk's worth of them.
    x["g"][7::23] = -np.inf


def _nearly_repeated_keys(random, x, sizes):
    x["k"][...] = x["k"][:1] + np.float32(0.02) * x["k"]
    x["beta"][...] = abs(x["beta"]) + 4


def _equal_keys(random, x, sizes):
    x["k"][...] = x["k"][:1]
    x["beta"][...] = 1


def _equal_keys_reflecting(random, x, sizes):
    x["k"][...] = x["k"][:1]
    x["beta"][...] = 20


def _zero_keys(random, x, sizes):
    x["k"][::3] = 0


def _zero_queries(random, x, sizes):
    x["q"][::3] = 0


def _expanding(random, x, sizes):
    # |1 - beta |k|^2| up to about 1.5: the state grows unless it decays.
    x["k"] *= 1.25
    x["beta"][...] = random.uniform(0.5, 1.6, x["beta"].shape)


def _heads_differ(random, x, sizes):
    x["A_log"][...] = np.linspace(-4, 3, sizes.value_heads)
    x["dt_bias"] += np.linspace(-6, 4, sizes.value_heads)[:, None]


def _alternating(beta):
    def change(random, x, sizes):
        # Two groups of channels decay in turn; the one fixed key spans both and carries the state across.
        x["k"][...] = 1
        x["beta"][...] = beta
        x["g"][...] = 0
        x["g"][0::2, :, 1::2] = -5
        x["g"][1::2, :, 0::2] = -5

    return change


def _relay(random, x, sizes):
    """One pair of channels per head hands its state over once a chunk, each time before the half it left decays.

    Every channel decays by 8 x 5 = 40 nats in every chunk of 16, and half of the state survives each chunk.
    """
    half = sizes.K // 2
    if half == 0:
        raise InputError(f"K: case relay expected at least 2, got {sizes.K}")
    x["g"][...], x["beta"][...] = -60, -60
    x["initial_state"][...], x["q"] = 0, np.float32(0.1) * x["q"]
    bounds = np.concatenate([[0], np.cumsum(sizes.lengths or (sizes.tokens,))])
    heads = np.arange(sizes.heads)
    channel = heads % half
    for start, stop in zip(bounds[:-1], bounds[1:]):
        for number, first in enumerate(range(start, stop, GRID)):
            middle, end = min(first + GRID // 2, stop), min(first + GRID, stop)
            leaving, entering = (slice(0, half), slice(half, None))[:: 1 if number % 2 == 0 else -1]
            x["g"][first:middle, :, entering] = 60
            x["g"][middle:end, :, leaving] = 60
            hand_over = middle - 1
            if hand_over == first + GRID // 2 - 1:
                x["k"][hand_over], x["v"][hand_over], x["beta"][hand_over] = 0, 0, 30
                x["k"][hand_over, heads, channel] = x["k"][hand_over, heads, channel + half] = 1
        if stop > start:
            # What is handed on: the first token's value, under the channel that leaves first.
            x["k"][start], x["beta"][start] = 0, 30
            x["k"][start, heads, channel] = 1
        x["q"][start:stop, heads, channel] += 1
        x["q"][start:stop, heads, channel + half] += 1


def _packed(*lengths):
    return Sizes(tokens=sum(lengths), lengths=lengths)


_REGIME = Sizes(tokens=128, heads=2, value_heads=2, K=64, V=64)
_LOG_VALUE = {"gate": "log", "beta": "value"}

RECIPES = {
    "ordinary": Recipe(),
    **{f"tokens-{T}": Recipe(sizes=Sizes(tokens=T)) for T in (0, 1, 15, 16, 17, 61, 127)},
    "packed": Recipe(sizes=_packed(33, 16, 48, 5)),
    "empty-first": Recipe(sizes=_packed(0, 20, 17)),
    "empty-middle": Recipe(sizes=_packed(20, 0, 17)),
    "empty-last": Recipe(sizes=_packed(20, 17, 0)),
    "empty-runs": Recipe(sizes=_packed(0, 0, 16, 0, 0, 0, 31, 1, 0, 0)),
    "empty-all": Recipe(sizes=_packed(0, 0, 0)),
    "ragged": Recipe(sizes=_packed(1, 7, 16, 2, 40, 0, 3, 15, 17, 1, 1, 29)),
    "many-short": Recipe(sizes=_packed(*([1, 2, 3] * 12))),
    "no-states": Recipe(sizes=_packed(19, 30), absent=("initial_state", "d_final_state")),
    **{f"{gate}-{beta}": Recipe(options={"gate": gate, "beta": beta}, sizes=_packed(37, 20))
       for gate in GATES for beta in BETAS},
    "mild-bound": Recipe(options={"lower_bound": -0.5}),
    "no-l2norm": Recipe(options={"qk_l2norm": False}),
    "expanding": Recipe(options={"qk_l2norm": False, "beta": "value"}, gate=(-4.0, 1.0), change=_expanding),
    "scale": Recipe(options={"scale": 0.37}),
    "grouped-heads": Recipe(sizes=Sizes(heads=2, value_heads=4)),
    "one-key-head": Recipe(sizes=Sizes(heads=1, value_heads=3), options={"gate": "softplus"}),
    "wide-keys": Recipe(sizes=Sizes(K=32, V=8)),
    "wide-values": Recipe(sizes=Sizes(K=8, V=32)),
    "odd-sizes": Recipe(sizes=Sizes(heads=3, value_heads=3, K=13, V=7)),
    "one-channel": Recipe(sizes=Sizes(heads=1, value_heads=1, K=1, V=1), options={"qk_l2norm": False}),
    "K128": Recipe(sizes=Sizes(heads=1, value_heads=1, K=128, V=128)),
    "VK": Recipe(sizes=Sizes(tokens=50, K=16, V=8, lengths=(17, 33)), options={"state_layout": "VK"}),
    "no-A_log": Recipe(absent=("A_log",)),
    "no-dt_bias": Recipe(absent=("dt_bias",), options={"gate": "softplus"}),
    "no-parameters": Recipe(absent=("A_log", "dt_bias")),
    "heads-differ": Recipe(sizes=Sizes(heads=4, value_heads=4, tokens=90), change=_heads_differ),
    "saturated": Recipe(change=_saturated_gates),
    "saturated-softplus": Recipe(options={"gate": "softplus"}, change=_saturated_gates),
    "vanishing": Recipe(gate=(-20.0, 3.0), sizes=Sizes(tokens=130)),
    "thousands": Recipe(options={"gate": "softplus"}, change=_thousands_of_nats),
    "resets": Recipe(options=_LOG_VALUE, change=_resets, sizes=_packed(60, 30)),
    "zero-keys": Recipe(change=_zero_keys),
    "zero-queries": Recipe(change=_zero_queries),
    "equal-keys": Recipe(options={"beta": "value"}, gate=(-8.0, 1.0), change=_equal_keys, repeated_keys=True),
    "equal-keys-reflecting": Recipe(options={"beta": "logit2"}, gate=(-8.0, 1.0), change=_equal_keys_reflecting,
                                    repeated_keys=True),
    "alternating": Recipe(options=_LOG_VALUE, change=_alternating(1), repeated_keys=True),
    "alternating-reflecting": Recipe(options=_LOG_VALUE, change=_alternating(2), repeated_keys=True),
    "relay": Recipe(sizes=Sizes(tokens=128, K=32, V=16), change=_relay),
    "strong": Recipe(sizes=_REGIME, gate=(0.0, 1.0)),
    "weak": Recipe(sizes=_REGIME, gate=(-6.0, 1.0)),
    "repeat": Recipe(sizes=_REGIME, gate=(-8.0, 1.0), change=_nearly_repeated_keys, repeated_keys=True),
    "conv": Recipe(sizes=_packed(33, 2, 0, 40), conv=("silu", False)),
    "conv-biased": Recipe(sizes=Sizes(heads=1, value_heads=2, K=8, V=12), conv=("silu", True)),
    "conv-linear": Recipe(conv=(None, False)),
}
