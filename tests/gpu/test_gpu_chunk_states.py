"""`chunk_states` on a device against the NumPy engine, and where its arrays lie."""

import cupy
import numpy as np
import pytest
from oracle import arguments

import kda_engine as kda
from kda_engine import cases
from kda_engine.compare import DEVICE_TOLERANCES


@pytest.mark.parametrize("name, every", [("ragged", 16), ("VK", 32), ("no-states", 10), ("strong", 64)])
def test_states_are_those_of_the_host(name, every):
    case = cases.make(name)
    given, options = arguments(case)
    on_device = lambda x: cupy.asarray(x) if isinstance(x, np.ndarray) else x
    bounds = options.pop("cu_seqlens")
    options = {key: on_device(x) for key, x in options.items()}
    found = kda.forward(*map(on_device, given), **options, cu_seqlens=bounds, engine="cuda").chunk_states(every)
    given, options = arguments(case)
    expected = kda.forward(*given, **options, engine="numpy").chunk_states(every)
    assert isinstance(found.states, cupy.ndarray)
    assert np.array_equal(found.sequence, expected.sequence) and np.array_equal(found.token, expected.token)
    assert kda.compare(found.states.get(), expected.states) <= DEVICE_TOLERANCES["float32"]
