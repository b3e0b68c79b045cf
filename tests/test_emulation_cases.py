"""The emulation of the fused kernels on every case that they take, held to the tolerances of the device."""

from dataclasses import replace

import numpy as np
import pytest
from emulation.engine import EmulatedEngine
from emulation.problem import covers
from gates import gated
from stages import convolved, gradients, hold_gradients, hold_stages, packed, stages

import kda_engine as kda
from kda_engine import cases


def make(name, dtype):
    return convolved(cases.make(name, dtype=dtype, K=128, V=128))


NAMES = [name for name in cases.names() if covers(packed(case := make(name, "bfloat16")), case.options)]


def hold(case, engine):
    hold_stages(case, stages(engine, case))
    hold_gradients(case, gradients(engine, case))


def test_most_cases_are_covered():
    assert len(NAMES) >= 45 and {"relay", "thousands", "grouped-heads", "conv", "empty-all"} <= set(NAMES)


@pytest.mark.parametrize("dtype, piece", (("bfloat16", None), ("float16", 4)))
@pytest.mark.parametrize("name", NAMES)
def test_case(name, dtype, piece):
    """piece: chunks to which the chain's plan may cut sequences."""
    hold(make(name, dtype), EmulatedEngine(piece=piece))


@pytest.mark.parametrize("name", ("packed", "ragged", "strong", "weak", "repeat", "softplus-logit", "thousands"))
def test_many_cuts(name):
    hold(make(name, "bfloat16"), EmulatedEngine(piece=2))


@pytest.mark.parametrize("reach", (0.5, 8.0, 20.0, 90.0, 300.0, 1e4))
@pytest.mark.parametrize("form", ("softplus", "log"))
def test_decays_of_every_size(form, reach):
    """Nats of a token: mild, past what gradients share factors for, past float16 and past float32."""
    case = gated(form, reach, "bfloat16", heads=2, tokens=100)
    hold(case, EmulatedEngine())
    found, expected = gradients(EmulatedEngine(), case), gradients(kda.engines.make_engine("reference"), case)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        for head in range(2):
            error = kda.compare(found[name][:, head], expected[name][:, head])
            assert error <= 5e-3, f"{name}: head {head}: {error:.1e}"


def test_records_do_not_change_what_a_forward_gives():
    case = make("weak", "bfloat16")
    operands = packed(case)
    kept, dropped = (EmulatedEngine().forward(operands, case.options, case.initial_state, save=save)
                     for save in (True, False))
    assert kept.saved is not None and dropped.saved is None
    assert kept.out.tobytes() == dropped.out.tobytes() and np.isfinite(kept.out.astype("f4")).all()


@pytest.mark.parametrize("change", ({"beta": "value"}, {"qk_l2norm": False}))
def test_what_the_fused_kernels_do_not_take_is_refused(change):
    case = make("ordinary", "bfloat16")
    case = replace(case, options=replace(case.options, **change))
    assert not covers(packed(case), case.options)
    with pytest.raises(kda.InputError, match="16-bit"):
        stages(EmulatedEngine(), case)
