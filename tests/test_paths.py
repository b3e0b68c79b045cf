"""Which path through the kernels computes what, and what is said about it. Needs no GPU."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from fake_device import fake_device  # noqa: E402

import kda_engine as kda  # noqa: E402
from kda_engine import cases, layout  # noqa: E402
from kda_engine.device.target import KNOWN  # noqa: E402
from kda_engine.engines.cuda import fused_backward, paths, slabs  # noqa: E402
from kda_engine.engines.cuda.problem import take_problem  # noqa: E402

OPTIONS = kda.Options()
BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype("f4")

# Architecture, tokens, K, type of v, options -> path, what its reason names, path of the backward.
PROBLEMS = [
    ("sm_90a", 100, 128, BFLOAT16, OPTIONS, "fused", None, "fused"),
    ("sm_90a", 8, 128, BFLOAT16, OPTIONS, "decode", None, "portable"),
    ("sm_90a", 9, 128, BFLOAT16, OPTIONS, "fused", None, "fused"),
    ("sm_90a", 100, 64, BFLOAT16, OPTIONS, "portable", None, "portable"),
    ("sm_90a", 100, 128, FLOAT32, OPTIONS, "portable", "computed in float32", "portable"),
    ("sm_90a", 100, 128, BFLOAT16, replace(OPTIONS, beta="value"), "portable", "beta is 'value'", "portable"),
    ("sm_90a", 100, 128, BFLOAT16, replace(OPTIONS, qk_l2norm=False), "portable", "qk_l2norm is off", "portable"),
    ("sm_80", 100, 128, BFLOAT16, OPTIONS, "portable", None, "portable"),
    ("sm_100", 4, 128, BFLOAT16, OPTIONS, "decode", None, "portable"),
]


def inputs(device, tokens, heads=2, K=128, dtype=BFLOAT16):
    lead = lambda *shape: device.array((tokens, heads) + shape, dtype)
    return {"q": lead(K), "k": lead(K), "v": lead(K), "g": lead(K), "beta": lead()}


@pytest.mark.parametrize("name, tokens, K, dtype, options, path, reason, of_backward", PROBLEMS)
def test_the_path_that_ran_is_named(name, tokens, K, dtype, options, path, reason, of_backward):
    with fake_device(name) as device:
        fwd = kda.forward(**inputs(device, tokens, K=K, dtype=dtype), options=options, engine="cuda",
                          initial_state=device.array((1, 2, K, K), "f4"))
        assert fwd.path == path and fwd._saved.states.path.name == of_backward
        assert fwd.path_reason is None if reason is None else reason in fwd.path_reason
        launched = {launch[0] for launch in device.launches}
        assert ("sm90_chain" in launched, "step" in launched, "prepare" in launched) == (
            path == "fused", path == "decode", path == "portable")


def test_paths_are_tried_in_order():
    assert [path.name for path in paths.PATHS] == ["decode", "fused", "portable"]


def test_paths_of_a_device():
    for name, expected in (("sm_90a", ["decode", "fused", "portable"]), ("sm_80", ["decode", "portable"])):
        with fake_device(name):
            assert paths.on_device(0) == expected


@pytest.mark.parametrize("engine", ("numpy", "reference"))
def test_engines_with_one_path_are_named_themselves(engine):
    case = cases.make("ordinary")
    fwd = kda.forward(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, engine=engine)
    assert fwd.path == engine and fwd.path_reason is None


@pytest.mark.parametrize("tokens, heads, cut", ((440_000, 32, False), (1 << 20, 32, True), (1 << 20, 12, False)))
def test_a_saving_forward_is_cut_where_records_would_take_much_of_the_memory(tokens, heads, cut):
    """And stays on its path; of a slab they take little. On a device of 80 GiB."""
    with fake_device() as device:
        given = inputs(device, tokens, heads)
        operands, _ = layout.pack(*given.values(), None, None, None, "lower_bound")
        problem = take_problem(operands, OPTIONS, device.device)
        path = paths.forward_path(problem)
        assert path.name == "fused" and slabs.chunks_of_slab(problem, path.forward_bytes(problem, False)) is None
        chunks = slabs.chunks_of_slab(problem, path.forward_bytes(problem, True))
        assert (chunks is not None) == cut
        if cut:
            slab = slabs.cut_slabs(operands.cu_seqlens, chunks)[0]
            part = take_problem(slab.take(operands), OPTIONS, device.device)
            share = path.forward_bytes(part, True) / KNOWN["sm_90a"].memory
            assert 0.8 * slabs.SLAB <= share <= 1.01 * slabs.SLAB
        else:
            fwd = kda.forward(**given, engine="cuda")
            assert fwd._saved.states.slabs is None and device.launches[-1][3]["states"] != 0


class Summed(cupy.ndarray):
    """An array whose sums nobody computes."""

    def sum(self, **given):
        return self


@pytest.mark.parametrize("tolerance", (0.0, 1e-6))
@pytest.mark.parametrize("tokens, value_heads", ((100, 2), (8192, 2), (8192, 4)))
def test_the_fused_backward_launches_its_kernels(tokens, value_heads, tolerance, monkeypatch):
    """All in one pass over the problem; cut sequences are certified where that is allowed."""
    with fake_device() as device:
        here = lambda shape, dtype: Summed(shape, dtype, memptr=device.array(shape, dtype).data)
        monkeypatch.setattr(fused_backward, "cupy", SimpleNamespace(empty=here))
        x = inputs(device, tokens)
        for name in ("v", "g", "beta"):
            x[name] = device.array((tokens, value_heads) + x[name].shape[2:], BFLOAT16)
        fwd = kda.forward(**x, options=replace(OPTIONS, tolerance=tolerance), engine="cuda")
        device.launches.clear()
        state = device.array((1, value_heads, 128, 128), "f4")
        found = fwd._engine.backward(fwd._saved, device.array(fwd.out.shape, BFLOAT16), state)
        names = [launch[0] for launch in device.launches]
        cut = tokens > 100
        assert names.count("sm90_gradients") == 1 and names[-1] == ("sum_groups" if value_heads > 2 else "sm90_gradients")
        assert names.count("sm90_backward_chain") == (2 if cut else 1) and ("certify_cuts" in names) == (cut and tolerance > 0)
        arguments = next(launch[3] for launch in device.launches if launch[0] == "sm90_gradients")
        assert arguments["dv"] == found.dv.data.ptr and arguments["dg"] == found.dg.data.ptr
        assert (arguments["dq"] == found.dq.data.ptr) == (value_heads == 2)
        assert found.dq.shape == x["q"].shape and len(fwd._saved.dropped) == (1 if cut and tolerance else 0)
