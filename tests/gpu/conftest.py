"""Everything in this folder needs a CUDA device: marked `gpu`, and skipped where there is none."""

import sys
from pathlib import Path

import pytest

from kda_engine.engines import cuda_usable

HERE = Path(__file__).parent

# Helpers that tests without a device use too.
sys.path.insert(0, str(HERE.parent))


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if HERE in Path(item.path).parents]
    usable = bool(here) and cuda_usable()
    if usable and _devices() < 2:
        # The record of a machine with one device is of all tests that it has.
        beyond = [item for item in here if item.get_closest_marker("two_devices")]
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if item not in beyond]
        here = [item for item in here if item not in beyond]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not usable:
            item.add_marker(pytest.mark.skip(reason="no usable CUDA device"))


def _devices():
    from cupy.cuda import runtime

    return runtime.getDeviceCount()


@pytest.fixture
def parts_of_one_chunk(monkeypatch):
    """Every sequence cut into spans as short as they can be."""
    from kda_engine.device import device
    from kda_engine.device.plans import portable as plan

    monkeypatch.setattr(plan, "span_length", lambda *given: 1)
    device.current().forget()
    yield
    device.current().forget()


@pytest.fixture
def needs_hopper():
    from kda_engine.device.target import current

    if not current().hopper:
        pytest.skip("kernels of sm_90a")


@pytest.fixture
def dealt(monkeypatch):
    """Fixes the chain's plan: chunks of a piece and value columns of a block."""
    from kda_engine.device import device
    from kda_engine.device.plans import fused as chain_plan

    def fix(length, columns):
        monkeypatch.setattr(chain_plan, "choose", lambda *given: (length, columns))
        device.current().forget()

    yield fix
    device.current().forget()


@pytest.fixture
def warmups(monkeypatch):
    """What the certified rule decides from here on: {False: forward's, True: backward's}, each a list of arrays
    [cuts, heads] of chunks to be run from zero, -1 where the rule does not allow it.
    """
    import cupy

    from kda_engine.engines.cuda import carry

    found = {False: [], True: []}

    def certify(problem, cuts, reversed):
        scratch = decide(problem, cuts, reversed)
        memory = cupy.cuda.UnownedMemory(scratch.warmup, 4 * cuts.count * problem.value_heads, scratch)
        chunks = cupy.ndarray((cuts.count, problem.value_heads), "i4", memptr=cupy.cuda.MemoryPointer(memory, 0))
        found[reversed].append(chunks.get())
        return scratch

    decide = carry._certify
    monkeypatch.setattr(carry, "_certify", certify)
    return found
