"""Calls on several streams, in captured graphs, beside one another, on a device that is not the current one."""

import cupy
import numpy as np
import pytest

import kda_engine as kda
from kda_engine.arrays import BFLOAT16, to_host
from kda_engine.compare import DEVICE_TOLERANCES
from kda_engine.device import device as devices

# K = V and type: of the fused path on Hopper, and of the portable one.
KINDS = ((128, BFLOAT16), (64, np.dtype("f4")))


def drawn(tokens, K, dtype, seed, heads=2):
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.standard_normal(shape, dtype="f4").astype(dtype)
    return {"q": draw(tokens, heads, K), "k": draw(tokens, heads, K), "v": draw(tokens, heads, K),
            "g": draw(tokens, heads, K), "beta": draw(tokens, heads)}


def on_device(x):
    return {name: cupy.asarray(value) for name, value in x.items()}


def forward(x, cu_seqlens, **more):
    return kda.forward(**x, cu_seqlens=cu_seqlens, engine="cuda", **more)


def hold(out, x, cu_seqlens, what):
    expected = kda.forward(**x, cu_seqlens=cu_seqlens, engine="reference").out
    error = kda.compare(to_host(out), expected)
    assert error <= DEVICE_TOLERANCES[str(x["v"].dtype)], f"{what}: {error:.1e}"


def busy(seconds):
    """Launches a kernel on the current stream that does nothing for about so long."""
    kernel = cupy.RawKernel("""extern "C" __global__ void spin(long long n) {
        long long start = clock64(); while (clock64() - start < n) {} }""", "spin")
    kernel((1,), (1,), (np.int64(seconds * 1.7e9),))


@pytest.mark.parametrize("cu_seqlens", ([0, 37, 300], [0, 5, 6, 200, 300]))
@pytest.mark.parametrize("K, dtype", KINDS)
def test_a_shape_met_on_one_stream_is_used_at_once_on_another(K, dtype, cu_seqlens):
    x = drawn(300, K, dtype, 1)
    d = on_device(x)
    forward(d, [0, 150, 300])
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with first:
        busy(0.5)
        late = forward(d, cu_seqlens)
    with second:
        early = forward(d, cu_seqlens)
        second.synchronize()
        hold(early.out, x, cu_seqlens, "second stream")
    first.synchronize()
    hold(late.out, x, cu_seqlens, "first stream")


@pytest.mark.parametrize("K, dtype", KINDS)
def test_tables_outlive_the_work_that_reads_them(K, dtype, monkeypatch):
    """More other shapes than are remembered, or than wait to be given back, while a stream has yet to begin."""
    monkeypatch.setattr(devices, "RETIRED", 1 << 30)
    x, cu_seqlens = drawn(400, K, dtype, 3), [0, 37, 90, 400]
    d = on_device(x)
    slow, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with other:
        forward(d, cu_seqlens)
    cupy.cuda.Device().synchronize()
    with slow:
        forward(d, cu_seqlens)
        cupy.cuda.Device().synchronize()
        busy(3.0)
        late = forward(d, cu_seqlens)
    with other:
        devices.current().forget()
        for i in range(150):
            forward(d, [0, 100 + i, 300 + i // 2, 400], save=False)
        other.synchronize()
    slow.synchronize()
    hold(late.out, x, cu_seqlens, "late")


def test_retired_tables_are_given_back(monkeypatch):
    """And all is right afterwards."""
    monkeypatch.setattr(devices, "RETIRED", 20)
    device = devices.current()
    x = drawn(400, 64, np.dtype("f4"), 3)
    d = on_device(x)
    # What earlier tests left is given back with the first upload.
    device.forget()
    for i in range(30):
        bounds = [0, 100 + i, 300 + i // 2, 400]
        result = forward(d, bounds, save=False)
        device.forget()
        assert len(device._retired) <= 60
    hold(result.out, x, bounds, "last")


def captured(d, cu_seqlens, gradients=None):
    """(graph, ForwardResult, gradients or None) of a call that was made before."""
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    try:
        fwd = forward(d, cu_seqlens)
        found = None if gradients is None else kda.backward(fwd, gradients)
    finally:
        graph = stream.end_capture()
    return graph, fwd, found


@pytest.mark.parametrize("K, dtype", KINDS)
def test_the_first_call_of_its_kind_is_refused_while_it_is_captured(K, dtype):
    x, cu_seqlens = drawn(300, K, dtype, 4), [0, 41, 300]
    d = on_device(x)
    devices.current().forget()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        forward(d, [0, 150, 300])
        stream.begin_capture()
        try:
            with pytest.raises(kda.InputError, match="^stream: .* make it once before the capture"):
                forward(d, cu_seqlens)
        finally:
            stream.end_capture()
        for _ in range(2):
            hold(forward(d, cu_seqlens).out, x, cu_seqlens, "afterwards")


@pytest.mark.parametrize("cu_seqlens", ([0, 41, 300], [0, 300]))
@pytest.mark.parametrize("K, dtype", KINDS)
def test_a_replay_equals_the_eager_call(K, dtype, cu_seqlens):
    """With new inputs in place, and other calls between."""
    d = on_device(drawn(300, K, dtype, 5))
    d_out = cupy.ones_like(d["v"])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(2):
            kda.backward(forward(d, cu_seqlens), d_out)
        stream.synchronize()
        graph, fwd, gradients = captured(d, cu_seqlens, d_out)
        out, final_state, d_values = fwd.out, fwd.final_state, vars(gradients)
        # What the user holds are arrays; that must do.
        del fwd, gradients
        for seed in range(6, 10):
            for name, value in drawn(300, K, dtype, seed).items():
                d[name].set(value)
            graph.launch(stream)
            other = forward(d, cu_seqlens)
            expected = kda.backward(other, d_out)
            forward(on_device(drawn(500, K, dtype, seed)), None)
            graph.launch(stream)
            stream.synchronize()
            assert to_host(out).tobytes() == to_host(other.out).tobytes()
            assert to_host(final_state).tobytes() == to_host(other.final_state).tobytes()
            for name, value in vars(expected).items():
                if value is not None:
                    assert to_host(d_values[name]).tobytes() == to_host(value).tobytes(), name


@pytest.mark.parametrize("K, dtype", KINDS)
def test_a_replay_writes_nowhere_else(K, dtype):
    """Memory that was free when the call was captured may be anybody's when it is replayed."""
    cu_seqlens, d = [0, 41, 300], on_device(drawn(300, K, dtype, 5))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        forward(d, cu_seqlens)
        graph, fwd, _ = captured(d, cu_seqlens)
        others = [cupy.full(size, 7, "u1") for size in (512, 4096, 1 << 16, 1 << 20, 1 << 23) for _ in range(20)]
        graph.launch(stream)
        stream.synchronize()
        assert all((x == 7).all() for x in others)
        hold(fwd.out, drawn(300, K, dtype, 5), cu_seqlens, "replay")


def test_tables_outlive_the_graph_that_reads_them():
    cu_seqlens, x = [0, 41, 300], drawn(300, 128, BFLOAT16, 5)
    d = on_device(x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        forward(d, cu_seqlens)
        graph, fwd, _ = captured(d, cu_seqlens)
        out = fwd.out
        del fwd
        devices.current().forget()
        for i in range(20):
            forward(d, [0, 100 + i, 300])
        graph.launch(stream)
        stream.synchronize()
        hold(out, x, cu_seqlens, "replay")


@pytest.mark.two_devices
def test_arrays_on_another_device_are_refused_by_name():
    x = drawn(100, 128, BFLOAT16, 1)
    with cupy.cuda.Device(1):
        there = on_device(x)
        fwd = forward(there, None)
        hold(fwd.out, x, None, "on the second device")
    with cupy.cuda.Device(0):
        with pytest.raises(kda.InputError, match="current device, 0, got one on device 1"):
            forward(there, None)
        with pytest.raises(kda.InputError, match="device"):
            kda.backward(fwd, fwd.out)
