"""The emulation's roundings against their definitions, and its constants against the kernels' sources."""

import numpy as np
import pytest
from emulation import constants, levels
from emulation.constants import constant
from emulation.formats import (ex2, exponent_of, fma, power_of_two, rcp, reciprocal_of_power, rounded_tf32, to_element,
                               to_float16, to_float16_saturated, truncated_tf32)
from emulation.state import by_warp, glanced_at, largest_given
from emulation.sums import sum_before_token, sum_from_token
from emulation.triangles import unit_lower_inverse

from kda_engine.arrays import BFLOAT16
from kda_engine.layout import CHUNK


def f4(*x):
    return np.array(x, "f4")


def same(a, b):
    return np.array_equal(np.asarray(a, "f4").view("u4"), np.asarray(b, "f4").view("u4"))


def test_float16_rounds_to_even_keeps_subnormals_and_overflows():
    last = 2.0**-10
    assert same(to_float16(f4(1 + last / 2, 1 + 3 * last / 2, 1 + last / 2 + 2.0**-20)), f4(1, 1 + 2 * last, 1 + last))
    assert same(to_float16(f4(65504, 65519, 65520, -1e6)), f4(65504, 65504, np.inf, -np.inf))
    least = 2.0**-24
    assert same(to_float16(f4(least, 1.5 * least, least / 2, 0.505 * least)), f4(least, 2 * least, 0, least))
    assert same(to_float16_saturated(f4(-1e6, np.inf, least)), f4(-65504, 65504, least))
    assert np.isnan(to_float16(f4(np.nan)))


def test_tf32_has_ten_bits():
    last = np.float32(2.0**-10)
    x = f4(1 + last / 2, 1 + last * np.float32(0.499), -1 - last / 2, np.inf, -np.inf)
    assert same(rounded_tf32(x), f4(1 + last, 1, -1 - last, np.inf, -np.inf))
    assert same(truncated_tf32(x), f4(1, 1, -1, np.inf, -np.inf))
    random = np.random.default_rng(0).standard_normal(1000, dtype="f4")
    for rounded, most in ((rounded_tf32(random), 2.0**-11), (truncated_tf32(random), 2.0**-10)):
        error = np.abs(rounded.astype("f8") / random - 1).max()
        assert 0.9 * most < error <= most


def test_elements_are_rounded_as_on_the_device():
    x = f4(1 + 2.0**-9, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38)
    assert same(to_element(x, BFLOAT16), f4(1, 1, 1 + 2 * 2.0**-7, np.inf))
    assert same(to_element(f4(70000.0), np.dtype("f2")), f4(np.inf))


def test_special_functions_flush_subnormal_numbers():
    assert same(ex2(f4(-126, -126.5, -1000, 128, -np.inf)), f4(2.0**-126, 0, 0, np.inf, 0))
    assert same(rcp(f4(2.0**126, 2.0**-126, 1e-39, np.inf, 2.0**127)), f4(2.0**-126, 2.0**126, np.inf, 0, 0))


def test_fma_rounds_once():
    a = np.float32(1 + 2.0**-12)
    assert fma(a, a, np.float32(-1 - 2.0**-11)) == np.float32(2.0**-24)
    assert same(fma(f4(np.inf), f4(2.0), f4(1.0)), f4(np.inf))


def test_powers_of_two():
    x = f4(1, 0.75, 2.0**100, 0, 1e-40, np.inf)
    assert exponent_of(x).tolist() == [0, -1, 100, -127, -127, 128]
    assert same(power_of_two(np.array([-100, 0, 126])), f4(2.0**-100, 1, 2.0**126))
    assert same(reciprocal_of_power(f4(2.0**-100, 4, 2.0**126)), f4(2.0**100, 0.25, 2.0**-126))


def test_constants_are_those_of_the_sources():
    """Written out once more, so that a change of the kernels that changes the emulation is seen."""
    assert constant("kChunk") == CHUNK and constant("kSize") == 128
    assert constant("kGateScale", True) == 1024 and constant("kGateScale", False) == 512
    assert constant("kMostFromMiddle", False) == 2 * constant("kMostFromStart", False)
    assert constant("kMostFromMiddle", False) == pytest.approx(160 * np.log2(np.e) * 512)
    assert constant("kSmallestBound") == 2.0**-6 and constant("kLargestBound") == 2.0**14
    # log2(1 + s) at s = 1, and the slope at 0.
    powers = constants.constants("kSoftplus")
    assert sum(powers) == pytest.approx(1, rel=1e-4) and powers[0] == pytest.approx(np.log2(np.e), rel=1e-4)
    assert constant("kGrowth") == CHUNK and constants.sampled_state_step() == 9


def test_constants_of_sources(tmp_path):
    (tmp_path / "a.cuh").write_text("constexpr bool kOne = KDA_BOUNDED != 0;  // constexpr int kTwo = 5;\n"
                                    "static constexpr float kTwo = kOne ? 1.0f / 4.0f : 1e-6f;\n"
                                    "constexpr int kThree =\n    7 / 2;\nconstexpr int kFour = 1;\n")
    (tmp_path / "b.cu").write_text("constexpr int kThree = 3;\nconstexpr int kFour = kThree - 1;\n")
    assert constants.find(tmp_path, "kOne", False) is False and constants.find(tmp_path, "kThree", True) == 3
    assert [constants.find(tmp_path, "kTwo", bounded) for bounded in (True, False)] == [0.25, float(np.float32(1e-6))]
    with pytest.raises(ValueError, match="kFour"):
        constants.find(tmp_path, "kFour", True)
    with pytest.raises(KeyError):
        constants.find(tmp_path, "kFive", True)


def test_every_pair_of_tokens_meets_on_one_level():
    for tokens in (16, 32):
        sizes = [0] + [2**i for i in range(10) if 2**i < tokens]
        count = sum(levels.meets(size, tokens).astype(int) for size in sizes)
        assert np.array_equal(count, np.tril(np.ones((tokens, tokens), int)))


@pytest.mark.parametrize("size", (1, 2, 4, 8))
def test_ranges_of_a_level_add_up_to_what_lies_between(size):
    decay = np.arange(1, 17)
    met = levels.meets(size, 16)
    to_meeting = levels.ranges(size, 16) @ decay
    between = np.cumsum(decay)[:, None] - np.cumsum(decay)[None]
    assert np.array_equal((to_meeting[:, None] + to_meeting[None])[met], between[met])


def test_sums_over_tokens():
    x = np.arange(8, dtype="f4")[None, :, None]
    assert sum_from_token(x, 4)[0, :, 0].tolist() == [6, 6, 5, 3, 22, 18, 13, 7]
    assert sum_before_token(x, 4)[0, :, 0].tolist() == [0, 0, 1, 3, 0, 4, 9, 15]
    assert sum_before_token(x, 1).any() == 0 and np.array_equal(sum_from_token(x, 1), x)


def test_inverse():
    lower = np.tril(np.random.default_rng(1).standard_normal((3, 16, 16)), -1)
    noise = np.triu(np.full((16, 16), np.nan))
    found = unit_lower_inverse((lower + noise).astype("f4"))
    assert np.abs(found @ (np.eye(16) + lower) - np.eye(16)).max() < 1e-3


def test_maxima_by_warp():
    x = np.zeros((1, 2, 32), "f4")
    x[0, 1, 5], x[0, 0, 20] = -3, np.nan
    assert by_warp(x).tolist() == [[3, 0]]
    assert largest_given(x)[0, 0] == 3 and np.isnan(largest_given(x)[0, 1])


def test_a_glance_sees_every_column():
    seen = glanced_at(128)
    assert seen.any(axis=0).all() and seen.sum() == 8 * 32
