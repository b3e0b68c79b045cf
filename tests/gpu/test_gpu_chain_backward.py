"""The tuned backward: every way of dealing a problem to the chain, the range of its operands, the certified skip."""

from dataclasses import replace

import numpy as np
import pytest
from device_run import check
from gradient_run import check_gradients
from stages import gradients
from test_gpu_chain import DTYPES, NAMES, tuned

import kda_engine as kda
from kda_engine import cases, layout
from kda_engine.arrays import to_host
from kda_engine.engines.cuda import CudaEngine, slabs
from kda_engine.engines.reference import ReferenceEngine

pytestmark = pytest.mark.usefixtures("needs_hopper")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length, columns", ((1 << 20, 128), (1, 64), (4, 128)))
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, length, columns, dtype, dealt):
    dealt(length, columns)
    check_gradients(tuned(cases.make(name, dtype=dtype, K=128, V=128)))


@pytest.mark.parametrize("tokens", (1, 15, 16, 17, 31, 32, 33, 100))
def test_tails(tokens):
    check_gradients(tuned(cases.make("weak", dtype="bfloat16", heads=2, K=128, V=128, tokens=tokens)))


@pytest.mark.parametrize("length", (1 << 20, 4))
@pytest.mark.parametrize("exponent", (-60, -20, 9, 40, 60))
def test_values_and_output_gradients_of_any_size(exponent, length, dealt):
    """The operands are float16: the kernels must choose their units by what they meet."""
    dealt(length, 128)
    case = tuned(cases.make("weak", dtype="bfloat16", heads=2, K=128, V=128, tokens=300))
    factor = np.float32(2.0**exponent)
    small = replace(case, v=case.v * case.v.dtype.type(factor), initial_state=case.initial_state * factor)
    check_gradients(small)
    check_gradients(replace(small, d_out=case.d_out / case.d_out.dtype.type(factor),
                            d_final_state=case.d_final_state / factor))


@pytest.mark.parametrize("states", (False, True))
@pytest.mark.parametrize("logit", (-8, -12, -16, -30, -60))
def test_a_nearly_closed_head(logit, states):
    """Held head by head: beside an open one it would not show."""
    case = tuned(cases.make("strong", dtype="bfloat16", heads=2, K=128, V=128, tokens=200))
    beta = case.beta.copy()
    beta[:, 1] = logit
    start = case.initial_state if states else np.zeros_like(case.initial_state)
    case = replace(case, beta=beta, initial_state=start)
    found, expected = gradients(CudaEngine(), case), gradients(ReferenceEngine(), case)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        for head in range(2):
            error = kda.compare(found[name][:, head], expected[name][:, head])
            assert error <= 5e-3, f"{name}: head {head}: {error:.1e}"


def test_a_head_that_closes_after_large_values():
    """What is written then is below float32's range beside what was, and d_out is large."""
    case = cases.make("weak", dtype="bfloat16", heads=1, K=128, V=128, tokens=400)
    v, beta = case.v.copy(), case.beta.copy()
    v[:16] *= v.dtype.type(2.0**23)
    beta[16:] = -86.0
    case = tuned(replace(case, v=v, beta=beta, d_out=case.d_out * case.d_out.dtype.type(1024)))
    found, expected = gradients(CudaEngine(), case), gradients(ReferenceEngine(), case)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.isfinite(found[name].astype("f4")).all(), name
        assert kda.compare(found[name], expected[name]) <= 5e-3, name


@pytest.mark.parametrize("name", ("strong", "weak", "relay"))
def test_certified_skip_keeps_within_its_tolerance(name, dealt, warmups):
    dealt(8, 128)
    case = tuned(cases.make(name, dtype="bfloat16", heads=8, K=128, V=128, tokens=512))
    skipping = replace(case, options=replace(case.options, tolerance=1e-6))
    check_gradients(skipping)
    assert warmups[True] and all((chunks >= 0).any() == (name == "strong") for chunks in warmups[True])
    exact, skipped = gradients(CudaEngine(), case), gradients(CudaEngine(), skipping)
    for key, value in exact.items():
        size = np.abs(value.astype("f4")).max()
        assert np.allclose(skipped[key].astype("f4"), value.astype("f4"), rtol=2.0**-7, atol=1e-4 * size), key


def test_what_a_forward_saves_is_used():
    """And nothing is kept unasked."""
    case = tuned(cases.make("weak", dtype="bfloat16", heads=2, K=128, V=128, tokens=100))
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate, case.initial_state)
    engine = CudaEngine()
    operands, state = engine.take(operands), engine.take_array(case.initial_state)
    kept = engine.forward(operands, case.options, state, save=True)
    dropped = engine.forward(operands, case.options, state, save=False)
    assert kept.saved.states is not None and dropped.saved is None
    assert to_host(kept.out).tobytes() == to_host(dropped.out).tobytes()


@pytest.fixture
def in_slabs(monkeypatch):
    """Every problem is cut into slabs of about so many bytes of records."""
    target = CudaEngine().target

    def cut(size):
        monkeypatch.setattr(slabs, "WHOLE", 0.0)
        monkeypatch.setattr(slabs, "SLAB", size / target.memory)

    return cut


# Bytes of the records of a chunk and head, both directions.
OF_CHUNK = 41_000


@pytest.mark.parametrize("size", (1, 5 * OF_CHUNK, 40 * OF_CHUNK))
@pytest.mark.parametrize("name", ("strong", "weak", "repeat", "ragged", "empty-runs", "grouped-heads", "log-logit2",
                                  "no-states"))
def test_records_that_would_not_fit(name, size, in_slabs):
    """The forward then goes slab by slab, and the backward makes the records of each again."""
    in_slabs(size)
    check_gradients(tuned(cases.make(name, dtype="bfloat16", heads=2, K=128, V=128)))
    check(tuned(cases.make(name, dtype="bfloat16", heads=2, K=128, V=128)))


@pytest.mark.parametrize("tolerance", (0.0, 1e-6))
@pytest.mark.parametrize("d_out_type", ("bfloat16", "float32"))
def test_slabs_are_the_whole_within_rounding(tolerance, d_out_type, in_slabs):
    """Ragged sequences, slab ends in the middle of them, initial and final states; on the fused path either way."""
    case = cases.make("packed", dtype="bfloat16", heads=2, K=128, V=128, lengths=(333, 0, 70, 1000, 5, 16))
    options = replace(case.options, tolerance=tolerance)
    given = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")}

    def both():
        fwd = kda.forward(**given, cu_seqlens=case.cu_seqlens, options=options, engine="cuda")
        gradients = kda.backward(fwd, case.d_out.astype(d_out_type), case.d_final_state)
        assert fwd.path == "fused" and fwd._saved.states.path.name == "fused"
        return fwd, {"out": fwd.out, "final_state": fwd.final_state, **vars(gradients)}

    fwd, expected = both()
    assert fwd._saved.states.slabs is None
    in_slabs(20 * OF_CHUNK)
    fwd, found = both()
    assert len(fwd._saved.states.slabs) > 5
    for name, x in expected.items():
        error = kda.compare(to_host(found[name]), to_host(x))
        assert error <= 3e-3, f"{name}: {error:.1e}"


def test_an_output_gradient_of_another_type_stays_on_the_path():
    case = cases.make("weak", dtype="bfloat16", heads=2, K=128, V=128, tokens=300)
    given = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")}
    fwd = kda.forward(**given, options=case.options, engine="cuda")
    same, wide = (kda.backward(fwd, d_out, case.d_final_state) for d_out in (case.d_out, case.d_out.astype("f4")))
    for name, x in vars(same).items():
        assert to_host(getattr(wide, name)).tobytes() == to_host(x).tobytes(), name
