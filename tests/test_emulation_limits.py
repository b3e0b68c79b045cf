"""The limits of the fused kernels that docs/numerics.md tells, held by their emulation from both sides: how far results
are right, and from where on they are not. A kernel that reaches further turns the second half red: then the page, too,
has to change.
"""

from dataclasses import replace

import numpy as np
import pytest
from emulation import chunks
from emulation.constants import constant
from emulation.engine import EmulatedEngine
from gates import decaying, spanning
from stages import gradients, hold_gradients, hold_stages, stages

from kda_engine import cases
from kda_engine.engines.reference import ReferenceEngine

OF_TOKENS = ("dq", "dk", "dv", "dg", "dbeta")

# What rounding to bfloat16 and float16 operands alone cost at most, and what has lost digits beyond that.
RIGHT, LOST = 3e-3, 5e-3


def make(name, tokens=96, heads=1, **sizes):
    return cases.make(name, dtype="bfloat16", tokens=tokens, heads=heads, K=128, V=128, **sizes)


def results(case):
    """({name: emulated}, {name: float64}) of outputs, states and gradients."""
    wide = replace(case, **{name: getattr(case, name).astype("f8")
                            for name in ("q", "k", "v", "g", "beta", "d_out")})
    both = []
    for engine, inputs in ((EmulatedEngine(), case), (ReferenceEngine(), wide)):
        with np.errstate(all="ignore"):
            both.append(stages(engine, inputs, summaries=False) | gradients(engine, inputs))
    return both


def error(pair, name, rows=slice(None), head=slice(None)):
    """Relative to the float64 values however small they are, unlike `kda.compare`."""
    a, b = (x[name].astype("f8")[rows, head] for x in pair)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def finite(x):
    return np.isfinite(x.astype("f8"))


@pytest.mark.parametrize("logit, right", ((-8, True), (-30, True), (-60, True), (-80, False)))
def test_a_nearly_closed_head(logit, right):
    """beta = e^logit in one head, held by itself; without a state, whose gradient of the gate would hide its own."""
    case = make("strong", heads=2)
    beta = case.beta.copy()
    beta[:, 1] = logit
    pair = results(replace(case, beta=beta, initial_state=np.zeros_like(case.initial_state)))
    worst = max(error(pair, name, head=1) for name in OF_TOKENS)
    assert error(pair, "out", head=1) <= RIGHT
    assert worst <= LOST if right else worst > 1e-2


def test_a_state_that_fades():
    """Halved in every chunk down to 2^-32, beside values of full size that beta keeps out."""
    case = make("relay", tokens=500)
    hold_stages(case, stages(EmulatedEngine(), case, summaries=False))


@pytest.mark.parametrize("exponent, right", ((13, True), (20, False), (30, False)))
def test_small_values_after_large_ones(exponent, right):
    """And a reset between; behind a second reset, 24 tokens later, all is right again."""
    case = decaying(make("strong", tokens=150), "log", np.full((150, 1, 128), 0.01))
    g, v = case.g.copy(), case.v.copy()
    g[[40, 64]] = -np.inf
    v[40:] *= v.dtype.type(2.0**-exponent)
    pair = results(replace(case, g=g, v=v, initial_state=np.zeros_like(case.initial_state)))
    between = error(pair, "out", slice(48, 64))
    assert between <= RIGHT if right else between > LOST
    assert error(pair, "out", slice(64, None)) <= RIGHT and error(pair, "final_state") <= RIGHT


@pytest.mark.parametrize("exponent, right", ((10, True), (17, True), (21, True), (24, False)))
def test_large_values_later_in_a_chunk(exponent, right):
    """The chunk's unit follows its largest value: what stands before it in the chunk loses digits."""
    case = make("weak", heads=2)
    v = case.v.copy()
    v[40:48] *= v.dtype.type(2.0**exponent)
    pair = results(replace(case, v=v))
    before = slice(32, 40)
    worst = max(error(pair, name, before) for name in ("out", "dq", "dk", "dbeta"))
    assert worst <= LOST if right else worst > LOST
    # Not so the log decays' gradients, which get large terms of later pairs that cancel.
    assert error(pair, "dg", before) <= LOST if exponent <= 13 else error(pair, "dg", before) > LOST
    for rows in (slice(0, 32), slice(40, None)):
        assert max(error(pair, name, rows) for name in ("out", *OF_TOKENS)) <= LOST


@pytest.mark.parametrize("gate, right, lost", ((-6, 90, None), (0, 70, 90), (60, 64, 70)))
def test_the_product_of_values_and_output_gradients(gate, right, lost):
    """|v| |dO| in binary orders of magnitude: under weak decays, strong ones, and 5 nats everywhere."""
    for exponent, good in ((right, True), (lost, False)):
        if exponent is None:
            continue
        case = make("weak" if gate < 0 else "strong")
        if gate > 0:
            case = replace(case, g=np.full_like(case.g, gate))
        factor = 2.0 ** (exponent / 2)
        big = lambda x: x * x.dtype.type(factor)
        pair = results(replace(case, v=big(case.v), initial_state=big(case.initial_state), d_out=big(case.d_out),
                               d_final_state=big(case.d_final_state)))
        names = ("dq", "dk", "dv", "dbeta")
        if good:
            assert max(error(pair, name) for name in names) <= LOST and finite(pair[0]["dg"]).all()
        else:
            assert not finite(pair[0]["dq"]).all() and not finite(pair[0]["dg"]).all()
            assert error(pair, "dv") <= RIGHT and error(pair, "dbeta") <= RIGHT


# One NaN in token 20 of 96, chunks 16 to 31 and tiles 0 to 31: the first and last token that is not finite, by result.
SPOILT = {
    "q": {"out": (20, 20), "dq": (20, 20), "dk": (0, 31), "dv": (0, 31), "dg": (0, 31), "dbeta": (0, 31)},
    "k": {"out": (16, 95), "dq": (16, 95), "dk": (0, 95), "dv": (0, 31), "dg": (0, 95), "dbeta": (0, 95)},
    "v": {"out": (16, 95), "dq": (16, 95), "dk": (16, 95), "dv": None, "dg": (0, 95), "dbeta": (16, 95)},
    "g": {"out": (16, 95), "dq": (16, 95), "dk": (0, 95), "dv": (0, 31), "dg": (0, 95), "dbeta": (0, 95)},
    "beta": {"out": (16, 95), "dq": (16, 95), "dk": (0, 95), "dv": (0, 31), "dg": (0, 95), "dbeta": (0, 95)},
    "d_out": {"out": None, "dq": (16, 31), "dk": (0, 31), "dv": (0, 31), "dg": (0, 31), "dbeta": (0, 31)},
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_a_token_that_is_not_finite_spoils(name):
    case = make("weak", heads=2)
    spoilt = getattr(case, name).copy()
    spoilt[20, 0] = np.nan
    with np.errstate(all="ignore"):
        found = stages(EmulatedEngine(), replace(case, **{name: spoilt}), summaries=False)
        found |= gradients(EmulatedEngine(), replace(case, **{name: spoilt}))
    whole = stages(EmulatedEngine(), case, summaries=False) | gradients(EmulatedEngine(), case)
    for result, span in SPOILT[name].items():
        good = finite(found[result])
        rows = np.flatnonzero(~good[:, 0].reshape(96, -1).all(axis=1))
        assert (None if not len(rows) else (rows[0], rows[-1])) == span, result
        # The other head, and what comes before the chunk, are the same to the last bit.
        assert np.array_equal(found[result][:, 1], whole[result][:, 1]), result
    assert np.array_equal(found["out"][:16], whole["out"][:16])


@pytest.mark.parametrize("name, results_of, columns, rows", (("v", "out", (0, 16), 16), ("d_out", "dq", (0, 128), 16),
                                                             ("d_out", "dv", (0, 16), 0)))
def test_an_infinity_hides_its_neighbours(name, results_of, columns, rows):
    """In channel 3 of token 20: what shares its unit is lost, though it is finite."""
    case = make("weak", heads=2)
    spoilt = getattr(case, name).copy()
    spoilt[20, 0, 3] = np.inf
    found, expected = results(replace(case, **{name: spoilt}))
    a, b = (x[results_of].astype("f8")[rows:32, 0] for x in (found, expected))
    both = np.isfinite(a) & np.isfinite(b)
    wrong = np.zeros(a.shape, bool)
    wrong[both] = np.abs(a[both] - b[both]) > 0.1 * np.std(b[both])
    seen = np.flatnonzero(wrong.any(axis=0))
    assert wrong.sum() > 100 and columns[0] <= seen[0] and seen[-1] < columns[1]


@pytest.mark.parametrize("nats, right", ((8, True), (12, False), (17, False)))
def test_a_gradient_of_the_initial_state_that_has_faded(nats, right):
    """The first token decays so far in all channels. K+ and Q+ are float16: they lose digits from e^-10 on."""
    case = make("strong", tokens=40)
    decay = np.full(case.g.shape, 1e-3)
    decay[0] = nats
    pair = results(decaying(case, "log", decay))
    faded = error(pair, "d_initial_state")
    assert faded <= RIGHT if right else faded > (1e-2 if nats < 17 else 0.3)
    assert max(error(pair, name) for name in ("out", "final_state", *OF_TOKENS)) <= RIGHT


# Nats of a chunk: about the gradients' limit for shared factors, between, and about the chain's.
@pytest.mark.parametrize("tokens", ((), (6, 7), (0, 15)))
@pytest.mark.parametrize("nats", (79.0, 81.0, 120.0, 158.0, 162.0))
def test_where_factors_end_and_levels_begin(nats, tokens):
    case = spanning("log", nats, "bfloat16", tokens, slice(1, None), heads=1)
    hold_stages(case, stages(EmulatedEngine(), case, summaries=False))
    hold_gradients(case, gradients(EmulatedEngine(), case))


def test_factors_do_not_reach_much_further(monkeypatch):
    """Without the levels 162 nats still pass, and 190 do not: the limit of 160 is one."""
    endless = lambda name, bounded=True: np.inf if name == "kMostFromMiddle" else constant(name, bounded)
    monkeypatch.setattr(chunks, "constant", endless)
    for nats, good in ((162.0, True), (190.0, False)):
        case = spanning("log", nats, "bfloat16", (), slice(1, None), heads=1)
        assert finite(stages(EmulatedEngine(), case, summaries=False)["out"]).all() == good


def test_decays_beyond_float32_are_all_alike():
    """A token's decay is taken to be 2^-127 at least."""
    outputs = []
    for nats in (90.0, 1e4):
        case = decaying(make("strong", tokens=40), "log", np.full((40, 1, 128), nats))
        outputs.append(stages(EmulatedEngine(), case, summaries=False)["out"].tobytes())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("raw", (2.0, 6.0, 15.0))
def test_a_lone_strong_decay_under_a_bound(raw):
    """Among tokens that hardly decay: 4.4 to 5 nats, whose gradients are as small as 1e-8 of the others."""
    case = make("weak", tokens=128, heads=2)
    lone = np.arange(13, 128, 32)
    g = np.full_like(case.g, -9)
    g[lone] = raw
    pair = results(replace(case, g=g, A_log=None, dt_bias=None))
    assert error(pair, "dg", lone) <= RIGHT


@pytest.mark.parametrize("A_log", (62.0, 88.0, 89.0, 300.0))
def test_a_rate_that_overflows(A_log):
    """The sigmoid is saturated on either side of 0."""
    case = make("strong", tokens=40)
    g = np.sign(case.g.astype("f4")) * (0.1 + abs(case.g.astype("f4")))
    pair = results(replace(case, A_log=np.full(1, A_log, "f4"), dt_bias=None, g=g.astype(case.g.dtype)))
    for name in ("out", "dq", "dk", "dv", "dbeta"):
        assert error(pair, name) <= RIGHT, name


@pytest.mark.parametrize("g, right", ((-60.0, True), (-90.0, False)))
def test_softplus_far_to_the_left(g, right):
    """e^(A_log + g) is a decay of e^-2, but e^g is no normal number of float32 from -87.3 on: nothing decays then."""
    case = make("strong", tokens=40)
    pair = results(replace(case, A_log=np.full(1, -g - 2, "f4"), dt_bias=None, g=np.full_like(case.g, g),
                           options=replace(case.options, gate="softplus")))
    assert error(pair, "out") <= RIGHT if right else error(pair, "out") > 1e-2


@pytest.mark.parametrize("name", ("q", "k"))
@pytest.mark.parametrize("exponent", (60, 64, 120))
def test_keys_and_queries_whose_squares_overflow(name, exponent):
    case = make("weak", tokens=40)
    large = getattr(case, name) * case.k.dtype.type(2.0**exponent)
    pair = results(replace(case, **{name: large}))
    for name in ("out", "dq", "dk", "dg", "dbeta"):
        assert error(pair, name) <= RIGHT, name
