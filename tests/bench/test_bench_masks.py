"""Packing truth values into bits; attention under custom masks is with prefill."""

import numpy as np
import pytest
from inputs import Shape, growth, num_sets, offsets, shapes, to_host, truth_values
from timing import Work

from cukv import RaggedMask, packbits, reference, segment_packbits

pytestmark = pytest.mark.gpu

# Elements are batch_size segments of kv_len: 64 Mi of them fill the card.
MANY = 1 << 26


def sizes(shape):
    """Name a shape by segments and elements of each."""
    return f"{shape.batch_size}x{shape.kv_len}"


def inputs(shape):
    """Make rotated truth values, and count the bytes of packing them."""
    size = shape.batch_size * shape.kv_len
    nbytes = size + size // 8
    return [truth_values(size, seed) for seed in range(num_sets(nbytes))], nbytes


def first_bytes(result, x, lens):
    """Compare what the first and the last segment became with the definition, and their size."""
    starts = np.cumsum([0, *(-(-n // 8) for n in lens)])
    for i, n in ((0, lens[0]), (len(lens) - 1, lens[-1])):
        begin = sum(lens[:i])
        want = reference.packbits(to_host(x[begin : begin + n]))
        np.testing.assert_array_equal(to_host(result[starts[i] : starts[i + 1]]), want)


@shapes(Shape(1, kv_len=MANY), name=sizes)
def test_packbits(measure, shape):
    xs, nbytes = inputs(shape)

    def check(result):
        first_bytes(result, xs[-1], [shape.kv_len])

    measure(Work([lambda x=x: packbits(x) for x in xs], nbytes, check=check), shape)


@growth(Shape(1), kv_len=(1 << 10, 1 << 16, 1 << 20, 1 << 24))
def test_packbits_grows(measure, shape):
    xs, nbytes = inputs(shape)

    def check(result):
        first_bytes(result, xs[-1], [shape.kv_len])

    measure(Work([lambda x=x: packbits(x) for x in xs], nbytes, check=check), shape)


def segments(shape):
    """Pack each segment on bytes of its own."""
    xs, nbytes = inputs(shape)
    lens = [shape.kv_len] * shape.batch_size
    indptr = offsets(lens)

    def check(result):
        first_bytes(result[0], xs[-1], lens)

    return Work([lambda x=x: segment_packbits(x, indptr) for x in xs], nbytes, check=check)


@shapes(Shape(4, kv_len=MANY // 4), Shape(4096, kv_len=MANY // 4096 - 3), name=sizes)
def test_segment_packbits(measure, shape):
    measure(segments(shape), shape)


@growth(Shape(64, kv_len=1 << 16), batch_size=(1, 16, 1024), kv_len=(100, 1 << 12, 1 << 20))
def test_segment_packbits_grows(measure, shape):
    measure(segments(shape), shape)


@shapes(Shape(4, kv_len=4096), Shape(64, kv_len=512))
def test_pack_a_mask(measure, shape):
    size = shape.batch_size * shape.kv_len**2
    indptr = offsets([shape.kv_len] * shape.batch_size)
    nbytes = size * 9 // 8
    masks = [
        RaggedMask(truth_values(size, seed), indptr, indptr) for seed in range(num_sets(nbytes))
    ]

    def check(packed):
        lens = [shape.kv_len**2] * shape.batch_size
        first_bytes(packed.data, masks[-1].data, lens)

    work = Work(
        [lambda m=m: m.pack() for m in masks],
        nbytes,
        check=check,
        written=lambda packed: (packed.data,),
    )
    measure(work, shape)
