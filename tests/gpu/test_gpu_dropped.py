"""What the certified rule drops at cuts within a device is told, and no error is beyond what is told."""

from dataclasses import replace

import numpy as np
import pytest
from gates import decaying, gated
from test_gpu_chain import tuned

import kda_engine as kda
from kda_engine import cases
from kda_engine.arrays import to_host
from kda_engine.compare import DEVICE_TOLERANCES, REPEATED_KEY_DEVICE_TOLERANCES

pytestmark = pytest.mark.usefixtures("needs_hopper")

# How much more of its own size the error of a parameter's gradient may be.
CANCELLING = 4.0

FUSED = {"dtype": "bfloat16", "K": 128, "V": 128}


def even(nats):
    """Every channel of every token decays alike: errors come near their bounds."""
    case = cases.make("strong", heads=2, tokens=512, **FUSED)
    return decaying(case, "log", np.full(case.g.shape, nats))


# name -> (case, whether it drops at a tolerance of 0.3)
CASES = {
    "strong": (lambda: cases.make("strong", heads=4, tokens=512, **FUSED), True),
    "weak": (lambda: cases.make("weak", heads=2, tokens=512, **FUSED), False),
    "relay": (lambda: cases.make("relay", heads=4, tokens=512, **FUSED), False),
    "ragged": (lambda: cases.make("ragged", **FUSED), None),
    "repeat": (lambda: cases.make("repeat", heads=2, tokens=512, **FUSED), None),
    "grouped": (lambda: cases.make("grouped-heads", **FUSED), None),
    "softplus": (lambda: gated("softplus", 0.5, "bfloat16", heads=2, tokens=512, least=1.0), True),
    "even": (lambda: even(0.02), True),
}


def both(case, tolerance, engine="cuda"):
    """(ForwardResult, results by name) of forward and backward."""
    given = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")}
    options = replace(case.options, tolerance=tolerance)
    fwd = kda.forward(**given, cu_seqlens=case.cu_seqlens, options=options, engine=engine)
    gradients = {name: x for name, x in vars(kda.backward(fwd, case.d_out, case.d_final_state)).items()
                 if x is not None}
    return fwd, {"out": fwd.out, "final_state": fwd.final_state, **gradients}


@pytest.mark.parametrize("tolerance", (1e-6, 0.3))
@pytest.mark.parametrize("name", CASES)
def test_errors_are_within_what_is_told(name, tolerance, dealt):
    dealt(8, 128)
    make, drops = CASES[name]
    case = tuned(make())
    fwd, found = both(case, tolerance)
    assert fwd.path == "fused"
    dropped = fwd.dropped
    assert np.isfinite(dropped.total) and dropped.total == pytest.approx(sum(sum(row["bound"]) for row in dropped.rows))
    if drops is not None and tolerance == 0.3:
        assert {row["direction"] for row in dropped.rows} == ({"forward", "backward"} if drops else set())
    bounds = np.array([0, len(case.q)]) if case.cu_seqlens is None else np.asarray(case.cu_seqlens)
    for row in dropped.rows:
        start, stop = bounds[row["sequence"] : row["sequence"] + 2]
        assert start < row["token"] < stop and (row["token"] - start) % 32 == 0
        assert row["rule"] == "certified" and row["where"] == "device"
        for warmup, kept, log_norm, bound in zip(row["num_warmup"], row["fallback"], row["log_norm"], row["bound"]):
            assert (bound == warmup == 0) if kept else (warmup > 0 and log_norm <= np.log(tolerance) and bound >= 0)
    _, expected = both(case, 0.0, "reference")
    rounding = (REPEATED_KEY_DEVICE_TOLERANCES if case.repeated_keys else DEVICE_TOLERANCES)["bfloat16"]
    size = lambda x: float(np.linalg.norm(to_host(x).astype("f8")))
    for key, x in expected.items():
        difference = size(to_host(found[key]).astype("f8") - x.astype("f8"))
        # States and their gradients: the total itself. All else is linear in them, with factors of the order of its own
        # size beside states of the order of one.
        reach = 1.0 if key in ("final_state", "d_initial_state") else max(1.0, size(x))
        # Sums over all tokens cancel: their terms are larger than what is left of them.
        terms = CANCELLING if key in ("dA_log", "ddt_bias") else 1.0
        assert difference <= 2 * terms * rounding * size(x) + dropped.total * reach, f"{key}: {difference:.2e}"


def test_what_is_told_is_not_far_from_what_it_is(dealt):
    """A check that could not fail would hold nothing: here the drop is seen beside rounding."""
    dealt(8, 128)
    case = tuned(even(0.02))
    fwd, found = both(case, 0.3)
    _, expected = both(case, 0.0, "reference")
    for key in ("final_state", "d_initial_state"):
        difference = np.linalg.norm(to_host(found[key]).astype("f8") - expected[key])
        assert 1e-2 * np.linalg.norm(expected[key]) < difference <= fwd.dropped.total, key


def test_exact_runs_tell_of_nothing(dealt):
    dealt(8, 128)
    fwd, _ = both(tuned(even(0.02)), 0.0)
    assert fwd.dropped.rows == () and fwd.dropped.total == 0


def test_slabs_tell_too(dealt, monkeypatch):
    """Tokens and sequences are counted over the whole problem."""
    from kda_engine.engines.cuda import CudaEngine, slabs

    dealt(4, 128)
    case = tuned(even(0.05))
    monkeypatch.setattr(slabs, "WHOLE", 0.0)
    monkeypatch.setattr(slabs, "SLAB", 20 * 41_000 / CudaEngine().target.memory)
    fwd, _ = both(case, 0.3)
    assert len(fwd._saved.states.slabs) > 2
    assert len({row["token"] for row in fwd.dropped.rows}) > 3 and max(row["token"] for row in fwd.dropped.rows) > 256
    assert np.isfinite(fwd.dropped.total)
