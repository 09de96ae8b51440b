"""Merging of attention states; tests with the ``xp`` fixture run on both homes."""

import copy
import math

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import captured, on
from tolerances import LSE, MERGE, assert_close
from tolerances import to_numpy as host

from cukv import merge_state, merge_states, reference

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BF16, np.dtype(np.float32)]
INF = math.inf


def states(rng, n, k, heads, head_dim, dtype=BF16, empty=0.3):
    """Random states, about `empty` of them without keys and with NaN as o."""
    o = rng.standard_normal((n, k, heads, head_dim)).astype(dtype)
    lse = (8 * rng.standard_normal((n, k, heads))).astype(np.float32)
    lse[rng.random(lse.shape) < empty] = -INF
    o[lse == -INF] = np.nan
    return o, lse


def merged(o, lse):
    """Give the definition's result; NaN of states without keys is none of its business."""
    return reference.merge_states(o, lse)


def close(got, want, o, lse):
    """Compare (o, lse) with the definition's: rows without keys exactly, others within bounds."""
    (got_o, got_lse), (want_o, want_lse) = got, want
    assert got_lse.dtype == np.float32
    assert not host(got_o)[want_lse == -INF].astype(np.float32).any()
    live = np.where(lse[..., None] > -INF, np.abs(o.astype(np.float64)), 0.0)
    assert_close(got_o, want_o, MERGE[got_o.dtype.name], scale=live.max(initial=0.0))
    assert_close(got_lse, want_lse, LSE)


def check(xp, o, lse):
    close(merge_states(on(xp, o), on(xp, lse)), merged(o, lse), o, lse)


# Values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 8, 33])
def test_any_number_of_states_merges(xp, k, dtype, rng):
    check(xp, *states(rng, 19, k, 4, 128, dtype))


# Teams of 1 to 32 lanes, heads longer than a team, odd ones, one element.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 2, 7, 8, 64, 80, 99, 128, 192, 256, 264, 512, 1000])
def test_any_head_dim_merges(xp, head_dim, dtype, rng):
    check(xp, *states(rng, 5, 3, 3, head_dim, dtype))


@pytest.mark.parametrize("heads", [1, 3, 28, 128])
def test_any_number_of_heads_merges(xp, heads, rng):
    check(xp, *states(rng, 33, 2, heads, 64))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "heads", "head_dim"), [(70000, 1, 64), (70001, 3, 8), (300000, 1, 1)]
)
def test_many_rows_merge(n, heads, head_dim, rng):
    check(cp, *states(rng, n, 2, heads, head_dim))


# Partition sums 2 and 8, outputs 0 and 1; natural weights would give 0.8808, base mixed 0.7233.
def test_lse_is_base_2(xp):
    o = on(xp, np.array([0.0, 1.0], np.float32).reshape(1, 2, 1, 1))
    lse = on(xp, np.log2(np.array([2.0, 8.0], np.float32)).reshape(1, 2, 1))
    o, lse = (host(a) for a in merge_states(o, lse))
    np.testing.assert_allclose(o, 0.8, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log2(10), rtol=1e-6)


def test_logits_of_any_size_merge(xp, rng):
    o, lse = states(rng, 40, 6, 2, 64, np.float32)
    for shift in (-1e5, -5e4, 3e4):
        check(xp, o, (lse + shift).astype(np.float32))
    check(xp, o, lse * 200)


# States without keys


def test_states_without_keys_merge_to_such_a_state(xp):
    for k in (0, 1, 2, 5):
        o = on(xp, np.full((3, k, 2, 24), np.nan, np.float16))
        lse = on(xp, np.full((3, k, 2), -INF, np.float32))
        out = on(xp, np.full((3, 2, 24), 7, np.float16)), on(xp, np.full((3, 2), 7, np.float32))
        for got_o, got_lse in (merge_states(o, lse), merge_states(o, lse, out=out)):
            assert not host(got_o).view(np.uint16).any()
            assert (host(got_lse) == -INF).all()


def test_a_state_without_keys_adds_nothing_whatever_it_holds(xp):
    for junk in (np.nan, INF, -INF, 3.0):
        o = on(xp, np.array([junk, 1.0], BF16).reshape(1, 2, 1, 1))
        got_o, got_lse = merge_states(o, on(xp, np.array([[[-INF], [0.0]]], np.float32)))
        assert host(got_o).item() == 1.0
        assert host(got_lse).item() == 0.0


@pytest.mark.parametrize("live", range(6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_live_state_comes_out_bit_for_bit(xp, dtype, live, rng):
    if xp is np and dtype.name == "float32":
        bits = rng.integers(0, 2**32, 65536, dtype=np.uint32)
    else:
        bits = np.arange(65536).astype(np.uint16 if dtype.itemsize == 2 else np.uint32)
        bits = bits * np.array(1 if dtype.itemsize == 2 else 65537, bits.dtype)
    values = bits.view(dtype)
    values = np.where(np.isfinite(values.astype(np.float32)), values, -values[:1])  # -0.0
    o = np.full((64, 6, 8, 128), np.nan, dtype)
    o[:, live] = values.reshape(64, 8, 128)
    lse = np.full((64, 6, 8), -INF, np.float32)
    lse[:, live] = 20 * rng.standard_normal((64, 8))
    got_o, got_lse = (host(a) for a in merge_states(on(xp, o), on(xp, lse)))
    unsigned = bits.dtype
    got, want = got_o.view(unsigned), np.ascontiguousarray(o[:, live]).view(unsigned)
    if xp is np:  # the definition may lose the sign of zero
        got, want = got[want << 1 != 0], want[want << 1 != 0]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_lse, lse[:, live])


def test_an_infinite_lse_of_the_wrong_sign_raises_on_numpy():
    o, lse = np.zeros((1, 2, 1, 8), np.float16), np.zeros((1, 2, 1), np.float32)
    for bad in (INF, np.nan):
        lse[0, 1, 0] = bad
        with pytest.raises(ValueError, match="merge_states: lse must be below"):
            merge_states(o, lse)


# Layouts


@pytest.mark.parametrize("axes", [(1, 0, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3)], ids=str)
def test_states_of_any_axis_order_merge(xp, axes, rng):
    o, lse = states(rng, 6, 3, 5, 64)
    back = np.argsort(axes)
    o_view = on(xp, np.ascontiguousarray(o.transpose(axes))).transpose(back)
    lse_axes = [a for a in axes if a != 3]
    lse_view = on(xp, np.ascontiguousarray(lse.transpose(lse_axes))).transpose(np.argsort(lse_axes))
    close(merge_states(o_view, lse_view), merged(o, lse), o, lse)


def test_states_backwards_and_repeated_merge(xp, rng):
    o, lse = states(rng, 6, 3, 4, 64, empty=0)
    there = on(xp, o), on(xp, lse)
    close(merge_states(there[0][::-1, ::-1, ::-2], there[1][::-1, ::-1, ::-2]),
          merged(o[::-1, ::-1, ::-2], lse[::-1, ::-1, ::-2]),
          o[::-1, ::-1, ::-2], lse[::-1, ::-1, ::-2])  # fmt: skip
    one = there[0][:, :1], there[1][:, :1]
    got = merge_states(*(xp.broadcast_to(a, (6, 5, *a.shape[2:])) for a in one))
    want = o[:, 0].astype(np.float64), lse[:, 0] + np.log2(5)
    close(got, want, o[:, :1], lse[:, :1])


# Starts and strides that are no multiple of 16 bytes.
@pytest.mark.parametrize("start", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_any_alignment_merge(xp, dtype, start, rng):
    o, lse = states(rng, 6, 3, 5, 72 + start, dtype)
    view = on(xp, o)[..., start:]
    close(merge_states(view, on(xp, lse)), merged(o[..., start:], lse), o[..., start:], lse)
    flat = on(xp, np.concatenate([np.zeros(start, dtype), o[..., :64].reshape(-1)]))
    view = flat[start:].reshape(6, 3, 5, 64)
    close(merge_states(view, on(xp, lse)), merged(o[..., :64], lse), o[..., :64], lse)


def test_empty_shapes_give_empty_results(xp):
    for n, k, heads in ((0, 2, 4), (3, 2, 0), (0, 0, 0)):
        o, lse = xp.zeros((n, k, heads, 64), np.float16), xp.zeros((n, k, heads), np.float32)
        got_o, got_lse = merge_states(o, lse)
        assert got_o.shape == (n, heads, 64)
        assert got_lse.shape == (n, heads)
        assert (got_o.dtype, got_lse.dtype) == (np.float16, np.float32)


# Outputs


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 33])
def test_out_may_have_another_dtype(xp, head_dim, dtype, to, rng):
    o, lse = states(rng, 7, 3, 4, head_dim, dtype)
    out = on(xp, np.full((7, 4, head_dim), np.nan, to)), on(xp, np.full((7, 4), np.nan, np.float32))
    got = merge_states(on(xp, o), on(xp, lse), out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    close(got, merged(o, lse), o, lse)


def test_out_may_be_a_view_and_nothing_beside_it_is_written(xp, rng):
    o, lse = states(rng, 7, 3, 4, 64)
    big = on(xp, np.full((9, 6, 80), 7, BF16)), on(xp, np.full((9, 6), 7, np.float32))
    views = big[0][8:1:-1, 1:5, 8:72], big[1][8:1:-1, 1:5]
    close(merge_states(on(xp, o), on(xp, lse), out=views), merged(o, lse), o, lse)
    rest = [host(a).astype(np.float32).copy() for a in big]
    rest[0][2:9, 1:5, 8:72] = 7
    rest[1][2:9, 1:5] = 7
    assert all((a == 7).all() for a in rest)


@pytest.mark.parametrize("head_dim", [64, 128, 600, 33])
def test_out_may_be_a_state(xp, head_dim, rng):
    o, lse = states(rng, 50, 3, 8, head_dim)
    for state in range(3):
        there = on(xp, o.copy()), on(xp, lse.copy())
        got = merge_states(*there, out=(there[0][:, state], there[1][:, state]))
        close(got, merged(o, lse), o, lse)


def test_bad_outputs_raise_and_nothing_is_written(xp):
    o, lse = xp.ones((2, 3, 4, 8), np.float16), xp.ones((2, 3, 4), np.float32)
    good = xp.full((2, 4, 8), 7, np.float16), xp.full((2, 4), 7, np.float32)
    bad = [
        (good[0][:1], good[1], ValueError, r"out\[0\] must be \[n=2, heads=4, head_dim=8\], got"),
        (good[0], good[1][:, :3], ValueError, r"out\[1\] must be \[n=2, heads=4\], got \[2, 3\]"),
        (good[0], good[1].astype(np.float16), TypeError, r"out\[1\] must be float32"),
        (good[0].astype(np.int32), good[1], TypeError, r"out\[0\] must be float16 or bfloat16"),
        (xp.broadcast_to(good[0][:1], (2, 4, 8)), good[1], (TypeError, ValueError), r"out\[0\]"),
        (good[0][..., ::-1], good[1], ValueError, r"out\[0\] must have a contiguous last axis"),
    ]
    for o_out, lse_out, error, message in bad:
        with pytest.raises(error, match=message):
            merge_states(o, lse, out=(o_out, lse_out))
    assert (host(good[0]) == 7).all()
    assert (host(good[1]) == 7).all()


def test_a_read_only_output_raises():
    o, lse = np.ones((2, 3, 4, 8), np.float16), np.ones((2, 3, 4), np.float32)
    out = np.ones((2, 4, 8), np.float16), np.ones((2, 4), np.float32)
    out[1].flags.writeable = False
    with pytest.raises(TypeError, match=r"^merge_states: out\[1\] is a read-only NumPy array"):
        merge_states(o, lse, out=out)


# Two states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_state_is_merge_states_of_two(xp, dtype, rng):
    o, lse = states(rng, 21, 2, 5, 64, dtype)
    want = [host(a) for a in merge_states(on(xp, o), on(xp, lse))]
    # The two states in arrays of different strides.
    a = on(xp, np.ascontiguousarray(o[:, 0])), on(xp, np.asfortranarray(lse[:, 0]))
    b = on(xp, o)[:, 1], on(xp, lse)[:, 1]
    got = [host(x) for x in merge_state(*a, *b)]
    np.testing.assert_array_equal(got[0].view(np.uint8), want[0].view(np.uint8))
    np.testing.assert_array_equal(got[1], want[1])


def test_merge_state_works_in_place(xp, rng):
    o, lse = states(rng, 300, 2, 5, 128)
    a, b = ((on(xp, o[:, i].copy()), on(xp, lse[:, i].copy())) for i in range(2))
    got = merge_state(*a, *b, out=a)
    assert got[0] is a[0]
    close(got, merged(o, lse), o, lse)


def test_merging_is_neutral_to_a_state_without_keys(xp, rng):
    o, lse = states(rng, 9, 1, 4, 64, empty=0)
    live = on(xp, o[:, 0].copy()), on(xp, lse[:, 0].copy())
    nothing = on(xp, np.full((9, 4, 64), np.nan, BF16)), on(xp, np.full((9, 4), -INF, np.float32))
    for got in (merge_state(*live, *nothing), merge_state(*nothing, *live)):
        np.testing.assert_array_equal(host(got[0]), o[:, 0])
        np.testing.assert_array_equal(host(got[1]), lse[:, 0])


# Messages


def test_merging_names_what_it_refuses(xp):
    o, lse = xp.ones((2, 3, 4, 8), np.float16), xp.ones((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"lse must be \[n=2, k=3, heads=4\], got \[2, 3, 5\]"):
        merge_states(o, xp.ones((2, 3, 5), np.float32))
    with pytest.raises(ValueError, match=r"^merge_states: o must be \[n, k, heads, head_dim\]"):
        merge_states(o[0], lse)
    with pytest.raises(TypeError, match=r"lse must be float32.*got float16"):
        merge_states(o, lse.astype(np.float16))
    with pytest.raises(
        TypeError, match=r"o must be float16 or bfloat16 or float32.*got uint16.*view"
    ):
        merge_states(o.view(np.uint16), lse)
    with pytest.raises(ValueError, match=r"o must have a contiguous last axis"):
        merge_states(o[..., ::2], lse)
    with pytest.raises(ValueError, match=r"o must have a head_dim of 1 or more"):
        merge_states(o[..., :0], lse)
    with pytest.raises(ValueError, match=r"^merge_state: o_b must be \[n=2, heads=3, head_dim=8\]"):
        merge_state(o[:, :, 0], lse[:, :, 0], o[:, 0], lse[:, 0])
    with pytest.raises(TypeError, match=r"^merge_state: o_b must be float16, got float32"):
        merge_state(o[:, 0], lse[:, 0], o[:, 0].astype(np.float32), lse[:, 0])
    with pytest.raises(TypeError, match=r"^merge_states: o must be a CuPy, NumPy or DLPack array"):
        merge_states([1.0], lse)


@pytest.mark.gpu
def test_homes_do_not_mix():
    o, lse = cp.ones((2, 3, 4, 8), np.float16), np.ones((2, 3, 4), np.float32)
    with pytest.raises(TypeError, match=r"^merge_states: o is on the GPU but lse is in NumPy"):
        merge_states(o, lse)


def test_inputs_are_left_alone(xp, rng):
    o, lse = states(rng, 9, 3, 4, 64)
    there = on(xp, o.copy()), on(xp, lse.copy())
    before = copy.deepcopy(there)
    merge_states(*there)
    for now, then in zip(there, before, strict=True):
        np.testing.assert_array_equal(host(now).view(np.uint8), host(then).view(np.uint8))


# On the device only


@pytest.mark.gpu
def test_merging_can_be_captured_and_replayed(rng):
    o, lse = states(rng, 40, 5, 8, 128)
    there = cp.zeros(o.shape, BF16), cp.zeros(lse.shape, np.float32)
    with captured(lambda: merge_states(*there)) as (stream, graph, got):
        there[0].set(o, stream)
        there[1].set(lse, stream)
        graph.launch(stream)
        stream.synchronize()
    close(got, merged(o, lse), o, lse)


@pytest.mark.gpu
def test_merging_twice_gives_the_same_bits(rng):
    o, lse = (cp.asarray(a) for a in states(rng, 1000, 7, 8, 128))
    first, second = merge_states(o, lse), merge_states(o, lse)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(host(a).view(np.uint8), host(b).view(np.uint8))
