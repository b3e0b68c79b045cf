"""What reaches the driver: every argument in its place, and nothing of an earlier call. Needs no GPU."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from fake_device import FIRST_ADDRESS, fake_device  # noqa: E402

import kda_engine as kda  # noqa: E402
from kda_engine import api, layout  # noqa: E402
from kda_engine.device.kernels import KERNELS  # noqa: E402
from kda_engine.device.kernels.table import INTEGER, POINTER  # noqa: E402
from kda_engine.device.launch import MOST_BLOCKS, Prepared, launch  # noqa: E402
from kda_engine.device.target import KNOWN  # noqa: E402
from kda_engine.engines import make_engine  # noqa: E402

TARGET = KNOWN["sm_90a"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def device():
    with fake_device() as found:
        yield found


def arguments(kernel, start):
    """A value of its own for every parameter, exact in its type."""
    kinds = enumerate(kernel.parameters, start)
    return {name: (i << 36) + 8 if kind is POINTER else i if kind is INTEGER else i + 0.5 for i, (name, kind) in kinds}


@pytest.mark.parametrize("name", KERNELS)
def test_every_argument_reaches_its_place(device, name):
    kernel = KERNELS[name]
    variant = kernel.variants(TARGET)[0]
    for start in (1, 50):
        given = arguments(kernel, start)
        launch(name, variant, device.device, count=3, **given)
        assert device.launches.pop() == (name, variant, kernel.blocks({"count": 3, **given}), given)


def test_arrays_and_null_pointers(device):
    kernel = KERNELS["fold_states"]
    variant, given = kernel.variants(TARGET)[0], arguments(kernel, 1)
    x = device.array((4, 3), "f4")
    launch("fold_states", variant, device.device, count=1, **given)
    launch("fold_states", variant, device.device, count=1, **given | {"carried": x, "warmup_chunks": None})
    assert device.launches[1][3] == given | {"carried": x.data.ptr, "warmup_chunks": 0}


def test_no_blocks_and_too_many(device):
    kernel = KERNELS["fold_states"]
    variant, given = kernel.variants(TARGET)[0], arguments(kernel, 1)
    launch("fold_states", variant, device.device, count=0, **given)
    assert device.launches == []
    with pytest.raises(ValueError, match=f"fold_states: expected at most {MOST_BLOCKS} blocks"):
        launch("fold_states", variant, device.device, count=MOST_BLOCKS, **given)


def test_prepared_arguments_are_each_their_own(device):
    kernel = KERNELS["sm90_chain"]
    variant, given = kernel.variants(TARGET)[0], arguments(kernel, 1)
    fixed = ("pieces", "items", "key_heads", "value_heads", "gate_form", "beta_form", "lower_bound", "scale")
    changing = {name: x for name, x in given.items() if name not in fixed}
    order = tuple(reversed(changing))
    first = {name: given[name] for name in fixed}
    second = {name: x + 1 for name, x in first.items()}
    prepared = [Prepared("sm90_chain", variant, device.device, order, count=132, **some) for some in (first, second)]

    def launch_all():
        for one in (*prepared, *prepared):
            one(*(changing[name] for name in order))

    launch_all()
    other = threading.Thread(target=launch_all)
    other.start()
    other.join()
    expected = [("sm90_chain", variant, kernel.blocks({"count": 132, **some}), changing | some)
                for some in (first, second)]
    assert device.launches == 4 * expected


def inputs(device, tokens=1024, heads=4, value_heads=None, dtype=BFLOAT16, batch=None):
    """Tensors of a call, K = V = 128."""
    lead, HV = (tokens,) if batch is None else (batch, tokens), value_heads or heads
    x = {name: device.array(lead + (count, 128), dtype) for name, count in zip("qkvg", (heads, heads, HV, HV))}
    return x | {"beta": device.array(lead + (HV,), dtype), "A_log": device.array((HV,), "f4"),
                "dt_bias": device.array((HV, 128), "f4")}


OPTIONS = kda.Options()


def call(device, options=OPTIONS, **given):
    """(result, launches) of one forward; tables in place of the addresses that they were uploaded to."""
    device.launches.clear()
    result = kda.forward(**given, options=options, engine="cuda")
    shown = lambda x: device.uploads[x].tobytes() if x in device.uploads else x
    return result, [(name, variant, blocks, {key: shown(x) for key, x in arguments.items()})
                    for name, variant, blocks, arguments in device.launches]


def variations(device):
    """Calls, each with one thing changed from the first but for those called "same"."""
    x, float16 = inputs(device), inputs(device, dtype=np.dtype("f2"))
    state = device.array((1, 4, 128, 128), "f4")
    bounds = np.array([0, 300, 1024])
    yield "first", x
    yield "cu_seqlens", x | {"cu_seqlens": bounds}
    bounds[1] = 700
    yield "changed in place", x | {"cu_seqlens": bounds}
    yield "empty sequence", x | {"cu_seqlens": [0, 0, 700, 1024]}
    yield "state", x | {"initial_state": state}
    yield "same", x
    yield "lower bound", x | {"options": replace(OPTIONS, lower_bound=-2.0)}
    yield "scale", x | {"options": replace(OPTIONS, scale=0.25)}
    yield "beta", x | {"options": replace(OPTIONS, beta="logit2")}
    yield "gate", x | {"options": replace(OPTIONS, gate="softplus")}
    yield "certified", x | {"options": replace(OPTIONS, tolerance=1e-6)}
    yield "tolerance", x | {"options": replace(OPTIONS, tolerance=1e-3)}
    yield "type", float16
    yield "heads", inputs(device, heads=8)
    yield "value heads", inputs(device, value_heads=8)
    yield "batch", inputs(device, tokens=512, batch=2)
    yield "few tokens", inputs(device, tokens=4) | {"initial_state": state}
    yield "same", x


def test_no_call_takes_anything_from_one_before_it(device):
    """Every call launches what it launches where nothing is remembered."""
    calls, seen = [], []
    for name, given in variations(device):
        # The bounds may change before they are used again.
        calls.append((name, given | {"cu_seqlens": list(given["cu_seqlens"])} if "cu_seqlens" in given else given))
        seen.append(named(given, *call(device, **given)))
    for (name, given), found in zip(calls, seen):
        with fake_device() as fresh:
            # The arrays of the other device will do: nothing reads them.
            assert found == named(given, *call(fresh, **given)), name
    for (name, _), found in zip(calls[1:], seen[1:]):
        assert (found == seen[0]) == (name == "same"), name


def named(given, result, launches):
    """Launches with names for the addresses of inputs and results, and scratch memory counted from its start."""
    names = {x.data.ptr: name for name, x in given.items() if isinstance(x, cupy.ndarray)}
    names |= {result.out.data.ptr: "out", result.final_state.data.ptr: "final_state"}
    is_address = lambda x: isinstance(x, int) and x >= FIRST_ADDRESS
    start = min((x for *_, arguments in launches for x in arguments.values() if is_address(x) and x not in names),
                default=0)
    shown = lambda x: names.get(x, x - start if is_address(x) else x)
    return [(*head, {key: shown(x) for key, x in arguments.items()}) for *head, arguments in launches]


def test_a_second_call_allocates_its_results_and_scratch_memory_alone(device):
    x = inputs(device)
    first, launches = call(device, save=False, **x)
    device.allocations.clear()
    device.uploads, known = {}, device.uploads
    second, _ = call(device, save=False, **x)
    assert [launched[0] for launched in launches] == ["sm90_chain", "fold_states", "sm90_chain"]
    assert len(device.allocations) == 3 and not device.uploads and known
    assert second.out.data.ptr != first.out.data.ptr and second.final_state.data.ptr != first.final_state.data.ptr


@pytest.mark.parametrize("tokens", (1024, 8192))
def test_absent_initial_states_are_a_null_pointer_to_the_kernels(device, tokens):
    x = inputs(device, tokens)
    for more in ({}, {"initial_state": device.array((2, 4, 128, 128), "f4")}):
        _, launches = call(device, **x, cu_seqlens=[0, 500, tokens], **more)
        assert all(bool(arguments["initial_state"]) == bool(more) for name, *_, arguments in launches
                   if name == "sm90_chain")


def test_calls_share_an_engine_unless_they_poll(device):
    poll = lambda: None
    first, polling = make_engine("cuda"), make_engine("cuda", poll)
    assert make_engine("cuda") is make_engine("auto") is first
    assert polling is not first and polling.poll is poll and first.poll is not poll
    with fake_device("sm_80"):
        assert make_engine("cuda").target == KNOWN["sm_80"]


def test_operands_move_once_each_or_not_at_all(device):
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    pack = lambda x: layout.pack(*(x[name] for name in names), None, "lower_bound")[0]
    there = pack(inputs(device))
    assert api._taken(make_engine("cuda"), there) is there and not device.uploads
    here = pack({name: np.ones(x.shape, x.dtype) for name, x in inputs(device).items()})
    moved = api._taken(make_engine("cuda"), here)
    assert set(device.uploads) == {getattr(moved, name).data.ptr for name in names} and len(device.uploads) == 7


def test_every_launch_is_timed_by_bench(device, monkeypatch):
    """Whether its arguments were prepared or not."""
    from kda_engine.bench.device import Device

    now = iter(range(1000))
    monkeypatch.setattr(cupy.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, at=next(now)))
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda before, after: 1e3 * (after.at - before.at))
    machine = Device.__new__(Device)
    machine._device = SimpleNamespace(synchronize=lambda: None)
    x = inputs(device) | {"initial_state": device.array((1, 4, 128, 128), "f4")}
    run = lambda: [call(device, **x, options=options) for options in (OPTIONS, replace(OPTIONS, beta="value"))]
    found = machine.kernel_seconds(run, samples=2)
    assert found.keys() > {"sm90_chain", "fold_states", "prepare", "forward"}
    assert found["sm90_chain"] == [2.0, 2.0] and found["prepare"] == [1.0, 1.0]
    timed = next(now)
    run()
    assert next(now) == timed + 1


@pytest.mark.parametrize("name", ("q", "v", "g", "beta"))
def test_operands_on_two_sides_are_refused(device, name):
    x = inputs(device)
    with pytest.raises(kda.InputError, match=f"^{name}: expected an array on the same side as k .cupy., got .*numpy"):
        kda.forward(**x | {name: np.ones(x[name].shape, "f4")}, engine="cuda")


@pytest.mark.parametrize("name", ("A_log", "dt_bias"))
def test_parameters_of_a_device_are_not_fetched(device, name):
    x = inputs(device)
    host = {key: np.zeros(given.shape, given.dtype) for key, given in x.items() if key != name}
    with pytest.raises(kda.InputError, match=f"^{name}: expected an array on the same side as k .numpy., got .*cupy"):
        kda.forward(**host, **{name: x[name]}, engine="numpy")


@pytest.mark.parametrize("name", ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"))
def test_arrays_on_another_device_are_refused_by_name(device, name):
    x = inputs(device) | {"initial_state": device.array((1, 4, 128, 128), "f4")}
    x[name] = device.array(x[name].shape, x[name].dtype, number=1)
    with pytest.raises(kda.InputError, match=f"^{name}: expected an array on the current device, 0, got one on device 1"):
        kda.forward(**x, engine="cuda")
    assert not device.launches


def test_gradients_on_another_device_are_refused_by_name(device):
    fwd = kda.forward(**inputs(device), engine="cuda")
    device.launches.clear()
    with pytest.raises(kda.InputError, match="^d_out: expected an array on the current device, 0, got one on device 1"):
        fwd._engine.backward(fwd._saved, device.array(fwd.out.shape, fwd.out.dtype, number=1), fwd.final_state)
    assert not device.launches


def test_an_engine_stays_on_its_device(device, monkeypatch):
    engine, x = make_engine("cuda"), inputs(device)
    operands, _ = layout.pack(*(x[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), None, "lower_bound")
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
    with pytest.raises(kda.InputError, match="^device: expected the current device to be 0, .* got 1"):
        engine.forward(operands, OPTIONS, None, False)


def test_the_first_call_of_its_kind_is_not_captured(device):
    """Nothing of it is remembered, so the next one that is not captured makes everything ready."""
    x = inputs(device)
    device.capturing = True
    with pytest.raises(kda.InputError, match="^stream: .* make it once before the capture"):
        kda.forward(**x, engine="cuda")
    assert not device.launches and not device.uploads
    device.capturing = False
    _, expected = call(device, **x)
    device.capturing = True
    result, captured = call(device, **x)
    assert [launched[:3] for launched in captured] == [launched[:3] for launched in expected]
    # Another kind.
    with pytest.raises(kda.InputError, match="^stream: "):
        kda.forward(**x, cu_seqlens=[0, 500, 1024], engine="cuda")


@pytest.mark.parametrize("K", (64, 128))
def test_the_results_of_a_captured_call_hold_what_a_replay_will_use(device, K):
    x = {name: device.array(given.shape[:-1] + (K,), given.dtype) if given.shape[-1] == 128 else given
         for name, given in inputs(device).items()} | {"initial_state": device.array((1, 4, K, K), "f4")}
    kda.forward(**x, engine="cuda", save=False)
    device.capturing = True
    device.launches.clear()
    result = kda.forward(**x, engine="cuda", save=False)
    used = {address for *_, arguments in device.launches for address in arguments.values()
            if isinstance(address, int) and address >= FIRST_ADDRESS}
    for array in (result.out, result.final_state):
        held = list(_held(array.data.mem))
        assert not used - {x.data.ptr for x in x.values()} - {
            address for address in used for start, size in held if start <= address < start + size}


def _held(memory):
    """(start, size) of every block that memory keeps alive."""
    stack = [memory]
    while stack:
        one = stack.pop()
        if isinstance(one, (list, tuple)):
            stack += one
        elif isinstance(one, cupy.ndarray):
            stack.append(one.data.mem)
        elif isinstance(one, cupy.cuda.MemoryPointer):
            stack.append(one.mem)
        elif hasattr(one, "_owner"):
            yield one.ptr, one.size
            stack.append(one._owner)
        elif hasattr(one, "__dict__"):
            stack += vars(one).values()


def test_what_the_engine_does_not_compute_is_told_without_an_array_of_the_device(device):
    """As the main job asks before it reads anything."""
    engine = make_engine("cuda")
    pack = lambda dtype, K: layout.pack(*(np.zeros((0, 1, K), dtype),) * 4, np.zeros((0, 1), dtype), None, None, None,
                                        "lower_bound")[0]
    engine.check(pack("f4", 256), OPTIONS)
    for dtype, K, message in (("f8", 8, "float64"), ("f4", 257, "^k: expected a head size of at most 256")):
        with pytest.raises(kda.InputError, match=message):
            engine.check(pack(dtype, K), OPTIONS)
    make_engine("numpy").check(pack("f8", 300), OPTIONS)
    assert not device.launches and not device.uploads
