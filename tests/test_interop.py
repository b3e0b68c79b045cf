"""Arrays of other libraries, in and out: DLPack, the array interfaces, PyTorch's and JAX's where they are there."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kda_engine as kda
from kda_engine import cases
from kda_engine.arrays import BFLOAT16
from kda_engine.errors import InputError

PER_TOKEN = ("q", "k", "v", "g", "beta")
TENSORS = (*PER_TOKEN, "A_log", "dt_bias", "initial_state")
TYPES = ("float64", "float32", "float16", "bfloat16")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def tensor(torch, x):
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view("i2").copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def array(x):
    return x.view(__import__("torch").int16).numpy().view(BFLOAT16) if "bfloat16" in str(x.dtype) else x.numpy()


def forward(case, **arrays):
    given = {name: getattr(case, name) for name in TENSORS} | {"cu_seqlens": case.cu_seqlens} | arrays
    return kda.forward(**given, options=case.options, engine="numpy")


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_in_and_out(torch, dtype):
    case = cases.make("packed", dtype=dtype)
    tensors = {name: tensor(torch, getattr(case, name)) for name in TENSORS}
    expected, result = forward(case), forward(case, **tensors, cu_seqlens=torch.tensor(case.cu_seqlens))
    assert isinstance(result.out, torch.Tensor) and result.out.dtype == tensors["v"].dtype
    assert isinstance(result.final_state, torch.Tensor)
    assert array(result.out).tobytes() == expected.out.tobytes()
    assert array(result.final_state).tobytes() == expected.final_state.tobytes()
    grads = kda.backward(result, tensor(torch, case.d_out), tensor(torch, case.d_final_state))
    for name, x in vars(kda.backward(expected, case.d_out, case.d_final_state)).items():
        found = getattr(grads, name)
        assert isinstance(found, torch.Tensor) and array(found).tobytes() == x.tobytes(), name


def test_tensors_are_not_copied_on_the_way_in(torch):
    from kda_engine.arrays import as_array

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(4, 3, dtype=dtype)
        as_array("x", x)[0, 0] = 7
        assert x[0, 0] == 7, dtype


def test_parameters_of_a_model_and_strided_tensors(torch):
    case = cases.make("ordinary")
    expected = forward(case).out
    leaf = {name: torch.nn.Parameter(tensor(torch, getattr(case, name))) for name in ("A_log", "dt_bias", "q")}
    wide = torch.zeros(*case.k.shape[:2], 2 * case.k.shape[2])
    wide[..., ::2] = tensor(torch, case.k)
    transposed = tensor(torch, np.ascontiguousarray(case.v.swapaxes(0, 1))).transpose(0, 1)
    result = forward(case, **leaf, k=wide[..., ::2], v=transposed)
    assert array(result.out).tobytes() == expected.tobytes()


def test_strided_bfloat16_tensors(torch):
    case = cases.make("ordinary", dtype="bfloat16")
    wide = torch.zeros(*case.k.shape[:2], 2 * case.k.shape[2], dtype=torch.bfloat16)
    wide[..., ::2] = tensor(torch, case.k)
    result = forward(case, k=wide[..., ::2], v=tensor(torch, case.v))
    assert array(result.out).tobytes() == forward(case).out.tobytes()


def test_batches_and_states_of_tensors(torch):
    case = cases.make("tokens-16")
    batch = {name: tensor(torch, np.stack([getattr(case, name)] * 2)) for name in PER_TOKEN}
    states = tensor(torch, np.concatenate([case.initial_state] * 2))
    out, state = kda.step(**batch, state=states, A_log=tensor(torch, case.A_log),
                          dt_bias=tensor(torch, case.dt_bias), engine="numpy")
    expected = forward(case)
    assert tuple(out.shape) == (2, *expected.out.shape) and isinstance(state, torch.Tensor)
    assert all(kda.compare(part, expected.out) <= 1e-6 for part in out)


def test_what_the_engine_cannot_take_is_named(torch):
    case = cases.make("ordinary")
    with pytest.raises(InputError, match="^k: expected bfloat16, float16, float32 or float64, got int32"):
        forward(case, k=torch.ones(case.k.shape, dtype=torch.int32))
    with pytest.raises(InputError, match="^v: expected shape"):
        forward(case, v=tensor(torch, case.v)[:-1])


def test_the_package_imports_no_framework(torch):
    script = ("import sys, numpy as np, kda_engine as kda\nx = np.ones((3, 1, 2), 'f4')\n"
              "kda.backward(kda.forward(x, x, x, x, x[..., 0], engine='numpy'), x)\n"
              "assert not {'torch', 'jax'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).resolve().parent.parent, timeout=60)
    assert done.returncode == 0


class Exporter:
    """An array of a library that speaks one protocol only, and has no `from_dlpack` of its own."""

    def __init__(self, x, protocol):
        self.dtype, self._x = x.dtype, x
        if protocol == "dlpack":
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__
        else:
            self.__array_interface__ = x.__array_interface__


@pytest.mark.parametrize("protocol", ["dlpack", "array_interface"])
def test_any_library_that_speaks_a_protocol(protocol):
    case = cases.make("packed")
    wrapped = {name: Exporter(getattr(case, name), protocol) for name in TENSORS}
    expected, result = forward(case), forward(case, **wrapped)
    # Without a way to hand results back in its own kind, NumPy's is what the caller gets.
    assert isinstance(result.out, np.ndarray) and result.out.tobytes() == expected.out.tobytes()


class OnDevice:
    """What a tensor on a GPU shows of itself: its place, its bits, and an interface that raises, as with gradients."""

    dtype, requires_grad = "other.bfloat16", True

    def __init__(self, x):
        self.x = x

    def detach(self):
        detached = OnDevice(self.x)
        detached.requires_grad = False
        return detached

    def view(self, dtype):
        assert not self.requires_grad
        viewed = OnDevice(self.x.view(dtype))
        viewed.requires_grad, viewed.dtype = False, "other.int16"
        return viewed

    def __dlpack__(self):
        return self.x

    def __dlpack_device__(self):
        return 2, 0

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("not of a tensor that requires a gradient")


def test_device_tensors_travel_as_bits(monkeypatch):
    from kda_engine.arrays import as_array

    cupy = SimpleNamespace(ndarray=SimpleNamespace, from_dlpack=lambda x: x.__dlpack__())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(sys.modules[__name__], "int16", "i2", raising=False)
    x = cases.make("ordinary", dtype="bfloat16").q
    found = as_array("q", OnDevice(x))
    assert found.dtype == BFLOAT16 and found.tobytes() == x.tobytes()


def test_device_memory_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match="^q: expected CuPy.*pip install"):
        forward(cases.make("ordinary"), q=OnDevice(np.ones(1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_in_and_out(dtype):
    jax = pytest.importorskip("jax.numpy")
    case = cases.make("packed", dtype=dtype)
    expected = forward(case)
    result = forward(case, **{name: jax.asarray(getattr(case, name)) for name in TENSORS})
    assert isinstance(result.out, jax.ndarray) and result.out.dtype == case.v.dtype
    assert np.asarray(result.out).tobytes() == expected.out.tobytes()
    grads = kda.backward(result, jax.asarray(case.d_out))
    assert np.asarray(grads.dk).tobytes() == kda.backward(expected, case.d_out).dk.tobytes()
