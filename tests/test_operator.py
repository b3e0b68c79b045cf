"""The operator with everything but its arrays fixed: it launches what `kda.forward` and `kda.backward` launch."""

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from fake_device import fake_device  # noqa: E402

import kda_engine as kda  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@pytest.fixture
def device():
    with fake_device() as found:
        yield found


def arrays(device, tokens=1024, heads=4, value_heads=None, batch=None, dtype=BFLOAT16, states=1):
    lead, HV = (tokens,) if batch is None else (batch, tokens), value_heads or heads
    x = {name: device.array(lead + (count, 128), dtype) for name, count in zip("qkvg", (heads, heads, HV, HV))}
    return x | {"beta": device.array(lead + (HV,), dtype), "A_log": device.array((HV,), "f4"),
                "dt_bias": device.array((HV, 128), "f4"), "initial_state": device.array((states, HV, 128, 128), "f4")}


def told(device, run, known):
    """Kernels, grids and arguments of the launches that `run` makes, with names for known addresses and none for others."""
    device.launches.clear()
    names = {x.data.ptr: name for name, x in known(run()).items() if x is not None}
    shown = lambda x: names.get(x, "scratch" if isinstance(x, int) and x > 1 << 39 else x)
    return [(kernel, variant, blocks, {name: shown(x) for name, x in given.items() if name not in ("pieces", "tiles")})
            for kernel, variant, blocks, given in device.launches]


KINDS = [{}, {"value_heads": 8}, {"batch": 2, "tokens": 512, "states": 2}, {"tokens": 8192}, {"tokens": 4}]
OPTIONS = (kda.Options(), kda.Options(gate="softplus"), kda.Options(tolerance=1e-6))


@pytest.mark.parametrize("options", OPTIONS, ids=("exact", "softplus", "certified"))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_launches_what_the_public_calls_launch(device, kind, options):
    example, x = arrays(device, **kind), arrays(device, **kind)
    backward = kind.get("tokens") != 4
    operator = kda.Operator(**example, options=options, backward=backward)
    assert not device.launches
    d_out, d_state = device.array(x["v"].shape, BFLOAT16), device.array(x["initial_state"].shape, "f4")
    found = told(device, lambda: operator.forward(**x), lambda y: x | {"out": y[0], "final_state": y[1]})
    forwards = []

    def forward():
        forwards.append(kda.forward(**x, options=options, engine="cuda", save=backward))
        return forwards[-1]

    assert found == told(device, forward, lambda y: x | {"out": y.out, "final_state": y.final_state})
    if not backward:
        return
    known = lambda y: x | {"d_out": d_out, "d_final_state": d_state, **{
        name: getattr(y, name) for name in ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state")}}
    # The sums over tiles need a device.
    operator._sum_parameters = lambda: (None, None)
    found = told(device, lambda: operator.backward(d_out, d_state), known)
    assert [launched[0] for launched in found if launched[0] != "sum_groups"][-2:] == [
        "sm90_backward_chain", "sm90_gradients"]
    assert all(given["d_out"] == "d_out" for _, _, _, given in found if "d_out" in given)
    assert {given["dv"] for kernel, _, _, given in found if kernel == "sm90_gradients"} == {"dv"}


def test_no_memory_is_taken_by_a_call(device):
    x = arrays(device)
    operator = kda.Operator(**x)
    out, final_state = device.array(x["v"].shape, BFLOAT16), device.array((1, 4, 128, 128), "f4")
    device.allocations.clear()
    assert operator.forward(**x, out=out, final_state=final_state)[0].data.ptr == out.data.ptr
    operator.forward(**x)
    assert not device.allocations and len(device.launches) == 6


@pytest.mark.parametrize("name", NAMES)
def test_arrays_unlike_those_it_was_made_of_are_refused_by_name(device, name):
    x = arrays(device)
    operator = kda.Operator(**x)
    shape = (x[name].shape[0] + 1,) + x[name].shape[1:]
    for other in (None, device.array(shape, x[name].dtype), device.array(x[name].shape, "f2"),
                  device.array(x[name].shape, x[name].dtype, number=1), np.zeros(x[name].shape, "f4"), x[name][..., ::-1]):
        with pytest.raises(kda.InputError, match=f"^{name}: expected "):
            operator.forward(**x | {name: other})
    assert not device.launches


@pytest.mark.parametrize("change, said", (
    ({"options": kda.Options(beta="value")}, "beta is 'value'"), ({"tokens": 4, "backward": True}, None),
    ({"dtype": np.dtype("f4")}, "computed in float32"), ({"options": kda.Options(state_layout="VK")}, "state_layout 'KV'")))
def test_what_it_cannot_fix_is_refused(device, change, said):
    kind = {name: x for name, x in change.items() if name in ("tokens", "dtype")}
    more = {name: x for name, x in change.items() if name not in kind}
    make = lambda: kda.Operator(**arrays(device, **kind), **more)
    if said is None:
        # A few tokens, with their gradients: not by the decoding kernel.
        assert make().backward
        return
    with pytest.raises(kda.InputError, match=f"^operator: .*{said}"):
        make()


def test_a_backward_needs_a_forward(device):
    x = arrays(device)
    for operator in (kda.Operator(**x), kda.Operator(**x, backward=True)):
        with pytest.raises(kda.InputError, match="^operator: expected backward=True .* and a forward"):
            operator.backward(x["v"])
