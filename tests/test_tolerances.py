"""The comparisons must notice what they are for, and say where."""

import ml_dtypes
import numpy as np
import pytest
from tolerances import ATTENTION, MERGE, Bound, assert_close, assert_same_bits, bits, max_abs

INF, NAN = np.inf, np.nan
BOUND = Bound(absolute=0.5, relative=0.25)


@pytest.mark.parametrize(
    ("got", "want", "word"),
    [
        ([1, INF, 3], [1, 2, 3], r"infinity .* worst at \[1\]: got .*inf.*, wanted .*2\.0"),
        ([1, 2, 3], [1, -INF, 3], "infinity"),
        ([1, INF, 3], [1, -INF, 3], "infinity"),
        ([1, NAN, 3], [1, 2, 3], "NaN"),
        ([1, 2, 3], [1, NAN, 3], "NaN"),
        ([1, INF, 3], [1, NAN, 3], "NaN"),
        ([1, 2.6, 4.5], [1, 2, 3], r"2 of 3 elements; worst at \[2\]: got .*4\.5.*, wanted .*3\.0"),
        ([[1, 2]], [1, 2], "shape"),
    ],
)
def test_a_difference_raises_and_says_where(got, want, word):
    with pytest.raises(AssertionError, match=word):
        assert_close(np.array(got), np.array(want), BOUND)


def test_the_larger_of_both_bounds_counts_and_the_absolute_one_scales():
    want = np.array([0, 100, -INF, NAN])
    assert_close(np.array([0.5, 125, -INF, NAN]), want, BOUND)
    assert_close(np.array([5.0, 125, -INF, NAN]), want, BOUND, scale=10)
    for far in ([0.51, 100, -INF, NAN], [0, 126, -INF, NAN]):
        with pytest.raises(AssertionError):
            assert_close(np.array(far), want, BOUND)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, np.float32])
def test_rounding_once_is_within_the_bounds_of_a_dtype_and_a_few_steps_are_not(dtype):
    name = np.dtype(dtype).name
    exact = np.linspace(0.5, 4, 1001)
    rounded = exact.astype(dtype)
    assert_close(rounded, exact, MERGE[name])
    assert_close(rounded, exact, ATTENTION[name])
    ones = np.ones(8, dtype)
    far = (bits(ones) + (3 if name != "float32" else 40)).astype(bits(ones).dtype).view(dtype)
    with pytest.raises(AssertionError):
        assert_close(far, ones, MERGE[name])


def test_bits_tell_zeros_and_nans_apart():
    assert_same_bits(np.array([NAN, 0.0], np.float16), np.array([NAN, 0.0], np.float16))
    with pytest.raises(AssertionError, match=r"different bits: 1 of 2 .* worst at \[1\]"):
        assert_same_bits(np.array([1, -0.0], np.float16), np.array([1, 0.0], np.float16))
    with pytest.raises(AssertionError, match="float32, wanted float16"):
        assert_same_bits(np.zeros(2, np.float32), np.zeros(2, np.float16))


def test_the_largest_magnitude_ignores_poison():
    assert max_abs(np.array([1, -3, NAN, -INF], ml_dtypes.bfloat16)) == 3
    assert max_abs(np.zeros((0, 4))) == 0
