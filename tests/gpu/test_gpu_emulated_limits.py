"""The limits that the emulation of the fused kernels holds, on the device: as far as results are right, and what a token
that is not finite spoils. Where results are wrong beyond the limits is left to the emulation.
"""

import pytest
import test_emulation_limits as limits

from kda_engine.engines.cuda import CudaEngine

pytestmark = pytest.mark.usefixtures("needs_hopper")


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    monkeypatch.setattr(limits, "EmulatedEngine", CudaEngine)


@pytest.mark.parametrize("logit", (-8, -30, -60))
def test_a_nearly_closed_head(logit):
    limits.test_a_nearly_closed_head(logit, True)


def test_small_values_after_large_ones():
    limits.test_small_values_after_large_ones(13, True)


@pytest.mark.parametrize("gate, exponent", ((-6, 90), (0, 70), (60, 64)))
def test_the_product_of_values_and_output_gradients(gate, exponent):
    limits.test_the_product_of_values_and_output_gradients(gate, exponent, None)


def test_a_gradient_of_the_initial_state_that_has_faded():
    limits.test_a_gradient_of_the_initial_state_that_has_faded(8, True)


@pytest.mark.parametrize("raw", (2.0, 6.0, 15.0))
def test_a_lone_strong_decay_under_a_bound(raw):
    limits.test_a_lone_strong_decay_under_a_bound(raw)


@pytest.mark.parametrize("exponent", (10, 17))
def test_large_values_later_in_a_chunk(exponent):
    limits.test_large_values_later_in_a_chunk(exponent, True)


@pytest.mark.parametrize("name", limits.SPOILT)
def test_what_a_token_that_is_not_finite_spoils(name):
    limits.test_what_a_token_that_is_not_finite_spoils(name)
