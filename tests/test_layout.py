"""Shapes, types and layouts at the edge: what is accepted gives the same numbers, what is not is named."""

import sys
import types
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from oracle import arguments, assert_close, run

import kda_engine as kda
from kda_engine import cases
from kda_engine.hdf5.inputs import write_input
from kda_engine.hdf5.results import ResultFile
from mpi_runner.__main__ import main

ENGINES = ("numpy", "reference")


def both(case, engine="numpy", **changed):
    """(ForwardResult, Gradients) of a case with some arguments replaced."""
    given, options = arguments(case)
    named = dict(zip(("q", "k", "v", "g", "beta"), given)) | options
    d_out, d_final_state = changed.pop("d_out", case.d_out), changed.pop("d_final_state", case.d_final_state)
    fwd = kda.forward(**(named | changed), engine=engine)
    return fwd, kda.backward(fwd, d_out, d_final_state)


@pytest.mark.parametrize("engine", ENGINES)
def test_state_layouts_are_transposes_of_each_other(engine):
    case = cases.make("wide-keys", dtype="f8")
    expected = run(case, engine)
    turn = lambda x: x.swapaxes(2, 3)
    swapped = replace(case, options=replace(case.options, state_layout="VK"), initial_state=turn(case.initial_state),
                      d_final_state=turn(case.d_final_state))
    result = run(swapped, engine)
    for name in ("final_state", "d_initial_state"):
        assert result[name].shape == (1, 2, 8, 32) and result[name].flags.c_contiguous
        result[name] = turn(result[name])
    assert_close(result, expected, 1e-15)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_is_a_packed_run(engine):
    case = cases.make("grouped-heads", dtype="f8", lengths=(21, 21, 21))
    expected = run(case, engine)
    batch = lambda x: x.reshape((3, 21) + x.shape[1:])
    per_token = ("q", "k", "v", "g", "beta")
    fwd, grads = both(case, engine, cu_seqlens=None, d_out=batch(case.d_out),
                      **{name: batch(getattr(case, name)) for name in per_token})
    assert fwd.out.shape == (3, 21, 4, 16) and grads.dq.shape == (3, 21, 2, 16) and grads.dbeta.shape == (3, 21, 4)
    result = {"out": fwd.out, "final_state": fwd.final_state, **vars(grads)}
    for name in ("out", "dq", "dk", "dv", "dg", "dbeta"):
        result[name] = result[name].reshape(expected[name].shape)
    assert_close(result, expected, 1e-15)


def test_a_batch_of_one_may_have_cu_seqlens():
    case = cases.make("packed")
    expected = run(case, "numpy")
    fwd, _ = both(case, d_out=case.d_out[None],
                  **{name: getattr(case, name)[None] for name in ("q", "k", "v", "g", "beta")})
    assert np.array_equal(fwd.out[0], expected["out"]) and np.array_equal(fwd.final_state, expected["final_state"])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_batches(shape):
    q = np.zeros(shape + (2, 4), "f4")
    fwd = kda.forward(q, q, q, q, np.zeros(shape + (2,), "f4"), engine="numpy")
    grads = kda.backward(fwd, q)
    assert fwd.out.shape == q.shape and fwd.final_state.shape == (shape[0], 2, 4, 4)
    assert grads.dg.shape == q.shape and not grads.d_initial_state.any()


@pytest.mark.parametrize("integers", ["i4", "u4", "i8", "u2", "list"])
def test_cu_seqlens_of_any_integer_type(integers):
    case = cases.make("packed")
    bounds = case.cu_seqlens.tolist() if integers == "list" else case.cu_seqlens.astype(integers)
    assert np.array_equal(both(case, cu_seqlens=bounds)[0].out, run(case, "numpy")["out"])


@pytest.mark.parametrize("engine", ENGINES)
def test_non_contiguous_inputs(engine):
    case = cases.make("packed", dtype="f8")
    expected = run(case, engine)

    def scattered(x):
        """The same values with every axis strided, one of them backwards."""
        room = np.full(tuple(2 * n for n in x.shape), np.nan)
        view = room[tuple(slice(None, None, 2) for _ in x.shape)][::-1]
        view[...] = x
        return view

    names = [name for name, x in vars(case).items() if isinstance(x, np.ndarray) and x.dtype == np.float64]
    strided = replace(case, **{name: scattered(getattr(case, name)) for name in names})
    assert not strided.q.flags.contiguous
    assert_close(run(strided, engine), expected, 1e-15)
    fortran = replace(case, **{name: np.asfortranarray(getattr(case, name)) for name in names})
    assert_close(run(fortran, engine), expected, 1e-15)


@pytest.mark.parametrize("engine", ENGINES)
def test_mixed_types_come_back_as_given(engine):
    case = cases.make("ordinary")
    types = {"q": ml_dtypes.bfloat16, "k": np.float16, "v": np.float32, "g": np.float16, "beta": ml_dtypes.bfloat16}
    fwd, grads = both(case, engine, **{name: getattr(case, name).astype(dtype) for name, dtype in types.items()})
    assert fwd.out.dtype == np.float32
    for name, dtype in types.items():
        assert getattr(grads, "d" + name).dtype == dtype, name
    assert fwd.final_state.dtype == grads.dA_log.dtype == grads.d_initial_state.dtype == np.float32


@pytest.mark.parametrize("wide", ["g", "A_log", "initial_state"])
def test_one_float64_input_makes_states_float64(wide):
    case = cases.make("ordinary")
    fwd, grads = both(case, **{wide: getattr(case, wide).astype("f8")})
    assert fwd.final_state.dtype == grads.d_initial_state.dtype == grads.ddt_bias.dtype == np.float64
    assert fwd.out.dtype == grads.dq.dtype == np.float32


def test_absent_states_are_zeros():
    case = cases.make("packed", dtype="f8")
    expected = run(replace(case, initial_state=0 * case.initial_state, d_final_state=0 * case.d_final_state), "numpy")
    assert_close(run(replace(case, initial_state=None, d_final_state=None), "numpy"), expected, 0)


def test_absent_parameters_have_no_gradients():
    assert both(cases.make("no-A_log"))[1].dA_log is None and both(cases.make("no-A_log"))[1].ddt_bias is not None
    assert both(cases.make("no-dt_bias"))[1].ddt_bias is None
    log = cases.make("log-logit")
    given, ignored = both(log), both(log, A_log=np.ones(2, "f4"), dt_bias=np.ones((2, 16), "f4"))
    assert ignored[1].dA_log is None and ignored[1].ddt_bias is None
    assert np.array_equal(given[0].out, ignored[0].out)


class ArrayInterfaceOnly:
    """An array of another library, as far as NumPy can tell."""

    def __init__(self, x):
        self.__array_interface__ = x.__array_interface__
        self._keep = x


class DLPackOnly:
    def __init__(self, x):
        self._x = x
        self.dtype = x.dtype

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


@pytest.mark.parametrize("wrap", [ArrayInterfaceOnly, DLPackOnly])
def test_arrays_of_other_libraries(wrap):
    case = cases.make("ordinary")
    fwd, _ = both(case, **{name: wrap(getattr(case, name)) for name in ("q", "k", "v", "g", "beta", "A_log")})
    assert np.array_equal(fwd.out, run(case, "numpy")["out"])


BAD_SHAPES = {
    "q": ((70, 2, 15), r"q: expected shape \(70, 2, 16\), got \(70, 2, 15\)"),
    "v": ((69, 2, 16), r"v: expected shape \(70, 2, 16\), got \(69, 2, 16\)"),
    "g": ((70, 1, 16), r"g: expected shape \(70, 2, 16\), got \(70, 1, 16\)"),
    "beta": ((70, 2, 16), r"beta: expected 2 dimensions beside k\(70, 2, 16\), got shape \(70, 2, 16\)"),
    "k": ((70, 32), r"k: expected 3 dimensions beside k\(70, 32\), got shape \(70, 32\)|q: expected"),
    "A_log": ((3,), r"A_log: expected shape \(2,\), got \(3,\)"),
    "dt_bias": ((2, 15), r"dt_bias: expected shape \(2, 16\), got \(2, 15\)"),
    "initial_state": ((2, 2, 16, 16), 
                      r"initial_state: expected shape \(1, 2, 16, 16\) \(state_layout 'KV'\), got \(2, "),
    "d_out": ((70, 2, 8), r"d_out: expected shape \(70, 2, 16\), got \(70, 2, 8\)"),
    "d_final_state": ((2, 16, 16), r"d_final_state: expected shape \(1, 2, 16, 16\) .*, got \(2, 16, 16\)"),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_bad_shapes_are_named(name):
    shape, message = BAD_SHAPES[name]
    with pytest.raises(kda.InputError, match=message):
        both(cases.make("ordinary"), **{name: np.zeros(shape, "f4")})


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_bad_types_are_named(name):
    case = cases.make("ordinary")
    for dtype in ("i4", "c8", "?"):
        with pytest.raises(kda.InputError, match=f"{name}: expected bfloat16, float16, float32 or float64, got "):
            both(case, **{name: getattr(case, name).astype(dtype)})
    for nonsense in ("text", object()):
        with pytest.raises(kda.InputError, match=f"{name}: expected "):
            both(case, **{name: nonsense})


@pytest.mark.parametrize("bounds, message", [
    ([0, 30, 20, 70], "non-decreasing bounds, got 30 then 20 at index 1"),
    ([0, 71], "end at T = 70, got 0 and 71"), ([1, 70], "start at 0 .* got 1 and 70"),
    ([], r"integers \[N\+1\], got"), ([[0, 70]], r"integers \[N\+1\], got int64 \(1, 2\)"),
    ([0.0, 70.0], r"integers \[N\+1\], got float64"), ([0, 35, 69], "end at T = 70")])
def test_bad_cu_seqlens(bounds, message):
    with pytest.raises(kda.InputError, match=f"cu_seqlens: expected .*{message}"):
        both(cases.make("ordinary"), cu_seqlens=bounds)


def test_other_bad_calls():
    case = cases.make("ordinary")
    with pytest.raises(kda.InputError, match="v: expected a multiple of 2 value heads .*, got 3"):
        both(case, v=np.zeros((70, 3, 16), "f4"))
    with pytest.raises(kda.InputError, match="engine: expected one of reference, numpy, cuda or auto, got 'fast'"):
        both(case, engine="fast")
    batch = {name: np.zeros((2, 5) + getattr(case, name).shape[1:], "f4") for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(kda.InputError, match="cu_seqlens: expected packed input or batch 1 beside it, got batch 2"):
        both(case, cu_seqlens=[0, 10], initial_state=None, **batch)
    with pytest.raises(kda.InputError, match="at least one head and channel"):
        both(case, **{name: np.zeros((70, 0, 16), "f4") for name in ("q", "k", "v", "g")}, beta=np.zeros((70, 0), "f4"))


def test_bounds_changed_in_place_are_looked_at_again():
    case = replace(cases.make("ordinary"), initial_state=None, d_final_state=None)
    bounds = np.array([0, 30, 70])
    first = both(case, cu_seqlens=bounds)[0]
    bounds[1] = 48
    second = both(case, cu_seqlens=bounds)[0]
    expected = both(case, cu_seqlens=[0, 48, 70])[0]
    assert np.array_equal(second.final_state, expected.final_state)
    assert not np.array_equal(first.final_state, expected.final_state)
    bounds[1] = 71
    with pytest.raises(kda.InputError, match="got 71 then 70 at index 1"):
        both(case, cu_seqlens=bounds)
    with pytest.raises(kda.InputError, match="end at T = 69, got 0 and 70"):
        kda.forward(*(getattr(case, name)[:69] for name in ("q", "k", "v", "g", "beta")), cu_seqlens=[0, 30, 70],
                    engine="numpy")


def test_a_batch_and_packed_tokens_of_the_same_size_are_told_apart():
    case = replace(cases.make("ordinary"), initial_state=None)
    given = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
    pairs = {name: x.reshape((2, 35) + x.shape[1:]) for name, x in given.items()}
    for arrays, sequences in ((given, 1), (pairs, 2), (given, 1)):
        assert len(kda.forward(**arrays, engine="numpy").final_state) == sequences


def test_bad_calls_are_refused_as_often_as_they_come():
    case = cases.make("ordinary")
    both(case)
    for _ in range(2):
        with pytest.raises(kda.InputError, match=r"^g: expected shape \(70, 2, 16\), got \(70, 1, 16\)$"):
            both(case, g=case.g[:, :1])
        with pytest.raises(kda.InputError, match="^g: expected bfloat16, float16, float32 or float64, got int32$"):
            both(case, g=case.g.astype("i4"))
        with pytest.raises(kda.InputError, match="^cu_seqlens: expected to start at 0"):
            both(case, cu_seqlens=[1, 70])


def test_results_never_share_memory_with_inputs():
    case = cases.make("empty-all")
    fwd, grads = both(case)
    assert not np.shares_memory(fwd.final_state, case.initial_state)
    assert not np.shares_memory(grads.d_initial_state, case.d_final_state)


class CompiledPart:
    """An array of a library whose class lives in another module than its functions, as JAX's does."""

    def __init__(self, x):
        self.x, self.dtype = x, x.dtype

    def view(self, dtype):
        return CompiledPart(self.x.view(dtype))

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16])
def test_results_come_back_in_jax(monkeypatch, dtype):
    library = types.ModuleType("jax.numpy")
    library.int16, library.bfloat16 = np.int16, ml_dtypes.bfloat16
    library.from_dlpack = lambda x: CompiledPart(np.from_dlpack(x))
    monkeypatch.setitem(sys.modules, "jax.numpy", library)
    monkeypatch.setattr(CompiledPart, "__module__", "jaxlib._jax")
    case = cases.make("ordinary", dtype=dtype)
    fwd, grads = both(case, **{name: CompiledPart(getattr(case, name)) for name in ("q", "k", "v", "g", "beta")})
    expected = run(case, "numpy")
    for name, result in {"out": fwd.out, "final_state": fwd.final_state, "dq": grads.dq}.items():
        assert isinstance(result, CompiledPart)
        assert np.array_equal(result.x, expected[name])


def test_what_is_not_read_makes_no_state_float64(tmp_path):
    """Neither do parameters beside the gate `log`, nor d_out, nor weights of the convolution: in calls as in runs."""
    case = cases.make("log-value", tokens=20, heads=2, K=16, V=16)
    wide = lambda *shape: np.ones(shape, "f8")
    fwd = kda.forward(case.q, case.k, case.v, case.g, case.beta, wide(2), wide(2, 16), case.initial_state,
                      case.cu_seqlens, options=case.options, engine="numpy")
    assert fwd.final_state.dtype == np.float32
    assert kda.backward(fwd, case.d_out.astype("f8")).d_initial_state.dtype == np.float32
    given, output = str(tmp_path / "in.h5"), str(tmp_path / "out.h5")
    tensors = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state",
                                                    "d_final_state")}
    write_input(given, **tensors, A_log=wide(2), dt_bias=wide(2, 16), d_out=case.d_out.astype("f8"), options=case.options)
    assert main(["run", given, output, "--backward", "--engine", "numpy"]) == 0
    with ResultFile(output) as result:
        assert result.read("outputs/final_state").dtype == result.read("grads/d_initial_state").dtype == np.float32


def test_a_float64_state_of_another_library_counts():
    class Foreign(DLPackOnly):
        def __init__(self, x):
            super().__init__(x)
            self.dtype = "library.float64"

    case = cases.make("ordinary")
    assert both(case, initial_state=Foreign(case.initial_state.astype("f8")))[0].final_state.dtype == np.float64


def test_what_dlpack_cannot_hand_over_is_named():
    class Elsewhere(DLPackOnly):
        def __dlpack_device__(self):
            raise BufferError("no memory behind it")

    case = cases.make("ordinary")
    with pytest.raises(kda.InputError, match="q: expected an array that DLPack can hand over, got .*no memory"):
        both(case, q=Elsewhere(case.q))


def test_options_and_forward_results_of_other_types_are_named():
    case = cases.make("ordinary")
    with pytest.raises(kda.InputError, match="options: expected kda_engine.Options, got dict"):
        both(case, options={"gate": "log"})
    with pytest.raises(kda.InputError, match="fwd: expected the result of forward, got NoneType"):
        kda.backward(None, case.d_out)
