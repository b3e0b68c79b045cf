"""The public names at a prompt: results print in a line, docstrings say shapes, types and errors."""

import inspect
import re

import numpy as np
import pytest
from oracle import arguments

import kda_engine as kda
from kda_engine import Options, cases

FUNCTIONS = [name for name in kda.__all__ if inspect.isfunction(getattr(kda, name))]
CLASSES = [name for name in kda.__all__ if inspect.isclass(getattr(kda, name))]
ARRAYS = ("forward", "backward", "step", "summarize", "short_conv", "short_conv_backward")


def test_results_print_shapes_and_types():
    case = cases.make("ordinary", dtype="f8", tokens=96)
    given, options = arguments(case)
    fwd = kda.forward(*given, **options, engine="numpy")
    gradients = kda.backward(fwd, case.d_out)
    T, HV, V = case.v.shape
    assert repr(fwd).startswith(f"ForwardResult(out=float64[{T}, {HV}, {V}], final_state=float64[1, {HV}, ")
    assert f"dv=float64[{T}, {HV}, {V}]" in repr(gradients)
    for shown in (fwd, gradients, case, fwd.chunk_states(64)):
        assert len(repr(shown)) < 1000 and "\n" not in repr(shown) and "array" not in repr(shown)
    assert repr(kda.Affine(None, np.zeros((2, 3), "f4"))) == "Affine(M=None, S=float32[2, 3])"


@pytest.mark.parametrize("options", [Options(), Options(gate="softplus", tolerance=1e-3, qk_l2norm=False, scale=0)])
def test_options_print_what_differs(options):
    assert eval(repr(options)) == options
    assert repr(Options()) == "Options()" and repr(Options(gate="log")) == "Options(gate='log')"


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_every_public_name_is_documented(name):
    assert len(getattr(kda, name).__doc__ or "") > 40 and not getattr(kda, name).__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", ARRAYS)
def test_functions_of_arrays_say_shapes_types_and_errors(name):
    text = " ".join(inspect.getdoc(getattr(kda, name)).split())
    assert re.search(r"\[[A-Z.][^\]]*,", text), "a shape, as [T,H,K]"
    assert re.search(r"float32|typed as|types as", text), "a type"
    assert "Raises InputError" in text


def test_type_checkers_see_what_the_calls_return():
    assert inspect.signature(kda.forward).return_annotation is kda.ForwardResult
    assert inspect.signature(kda.backward).return_annotation is kda.Gradients
    assert inspect.signature(kda.summarize).return_annotation is kda.Affine
