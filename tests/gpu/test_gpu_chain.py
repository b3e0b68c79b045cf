"""The tuned path: every way of dealing a problem to the chain kernel, the range of its operands, the certified skip."""

from dataclasses import replace

import numpy as np
import pytest
from device_run import check
from stages import stages

from kda_engine import cases, layout
from kda_engine.arrays import to_host
from kda_engine.engines.cuda import CudaEngine, fused
from kda_engine.engines.cuda.problem import take_problem

pytestmark = pytest.mark.usefixtures("needs_hopper")

DTYPES = ("bfloat16", "float16")
NAMES = ("packed", "ragged", "tokens-61", "empty-runs", "many-short", "no-states", "lower_bound-logit2", "mild-bound",
         "scale", "grouped-heads", "no-parameters", "heads-differ", "saturated", "vanishing", "zero-keys",
         "zero-queries", "equal-keys-reflecting", "relay", "strong", "weak", "repeat", "softplus-logit", "log-logit2",
         "one-key-head", "no-dt_bias", "saturated-softplus", "thousands")


def tuned(case):
    """The case, once it is seen that the tuned path takes it."""
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate, case.initial_state)
    engine = CudaEngine()
    assert fused.covers(take_problem(engine.take(operands), case.options, engine.device))
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length, columns", ((1 << 20, 128), (1 << 20, 64), (1, 128), (1, 64), (3, 128)))
@pytest.mark.parametrize("name", NAMES)
def test_case(name, length, columns, dtype, dealt):
    dealt(length, columns)
    check(tuned(cases.make(name, dtype=dtype, K=128, V=128)))


@pytest.mark.parametrize("length", (1 << 20, 4))
@pytest.mark.parametrize("exponent", (-60, -20, 9, 40, 90))
def test_values_of_any_size(exponent, length, dealt):
    """The operands are float16: the kernel must choose their unit by what it meets."""
    dealt(length, 128)
    case = tuned(cases.make("weak", dtype="bfloat16", K=128, V=128, tokens=500))
    grown = replace(case, v=case.v * case.v.dtype.type(2.0**exponent),
                    initial_state=case.initial_state * np.float32(2.0**exponent))
    check(grown, summaries=False)


def test_growing_and_shrinking_values():
    case = tuned(cases.make("weak", dtype="bfloat16", K=128, V=128, tokens=900))
    for exponents in (np.linspace(-30, 30, case.q.shape[0]), np.linspace(30, 0, case.q.shape[0])):
        factors = np.exp2(np.round(exponents)).astype(case.v.dtype)[:, None, None]
        check(replace(case, v=case.v * factors), summaries=False)


def test_a_state_that_fades():
    """Halved in every chunk, beside values of full size that beta keeps out."""
    check(tuned(cases.make("relay", dtype="bfloat16", heads=2, K=128, V=128, tokens=1000)), summaries=False)


@pytest.mark.parametrize("name", ("strong", "weak", "relay"))
def test_certified_skip_keeps_within_its_tolerance(name, dealt, warmups):
    dealt(8, 128)
    case = tuned(cases.make(name, dtype="bfloat16", heads=8, K=128, V=128, tokens=512))
    skipping = replace(case, options=replace(case.options, tolerance=1e-6))
    check(skipping, summaries=False)
    assert warmups[False] and all((chunks >= 0).any() == (name == "strong") for chunks in warmups[False])
    exact, skipped = (stages(CudaEngine(), x, summaries=False) for x in (case, skipping))
    for key, value in exact.items():
        assert np.allclose(to_host(skipped[key]).astype("f4"), value.astype("f4"), rtol=2.0**-7, atol=1e-4)
