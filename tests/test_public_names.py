"""The public names at a prompt: docstrings say shapes, types and errors."""

import inspect
import re

import numpy as np
import pytest
from mpi4py import MPI

import kda_engine as kda
from kda_engine import cases

FUNCTIONS = [name for name in kda.__all__ if inspect.isfunction(getattr(kda, name))]
CLASSES = [name for name in kda.__all__ if inspect.isclass(getattr(kda, name))]
ARRAYS = ("forward", "backward", "step", "summarize", "short_conv", "short_conv_backward")


def test_maps_and_cases_print_shapes_and_types():
    assert repr(cases.make("ordinary", tokens=9)) == (
        "Case('ordinary', q=numpy float32 (9, 2, 16), v=numpy float32 (9, 2, 16), options=Options())")
    assert repr(kda.Affine(None, np.zeros((2, 3), "f4"))) == "Affine(M=None, S=numpy float32 (2, 3))"


def test_a_rank_prints_its_tokens():
    case = cases.make("ordinary", tokens=9)
    fwd = kda.distributed.forward(MPI.COMM_SELF, case.q, case.k, case.v, case.g, case.beta, cu_seqlens=[0, 9],
                                  engine="numpy")
    assert repr(fwd).startswith("DistributedForward(out=numpy float32 (9, 2, 16), ")
    assert "tokens 0 to 9, scan='neighbour', bytes_sent=0" in repr(fwd)


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
