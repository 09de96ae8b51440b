"""What is worked out of a page table: small launches, whose time hardly depends on sizes."""

import numpy as np
import pytest
from inputs import HOME, Shape, growth, offsets, page_table, to_host
from timing import Work

from cukv import PageTable, batch_indices_positions, reference

pytestmark = pytest.mark.gpu

BATCHES = {"batch_size": (1, 64, 4096)}


def csr(table):
    """Give a table's arrays on the host."""
    host = table.to_host()
    return host.indptr, host.indices, host.last_page_len


def equals(want):
    """Check a result, or results, against the definition's."""

    def check(result):
        found = result if isinstance(result, tuple) else (result,)
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_array_equal(to_host(got), wanted)

    return check


def tables(shape):
    """Give a table of even lengths, and one row of each request: its index and last position."""
    xp, lens = HOME.xp, [shape.kv_len] * shape.batch_size
    requests = np.arange(shape.batch_size, dtype=np.int32)
    return page_table(lens, shape.page_size), xp.asarray(requests), xp.asarray(lens, np.int32)


@growth(Shape(kv_len=100), **BATCHES)
def test_seq_lens(measure, shape):
    table, *_ = tables(shape)
    want = reference.seq_lens(csr(table)[0], csr(table)[2], shape.page_size)
    measure(Work([lambda: table.seq_lens] * 2, check=equals([want])), shape)


@growth(Shape(kv_len=100), **BATCHES)
def test_token_indptr(measure, shape):
    table, *_ = tables(shape)
    want = reference.token_indptr(csr(table)[0], csr(table)[2], shape.page_size)
    measure(Work([lambda: table.token_indptr] * 2, check=equals([want])), shape)


@growth(Shape(kv_len=100), **BATCHES)
def test_block_table(measure, shape):
    table, *_ = tables(shape)
    want = reference.block_table(*csr(table)[:2], 8)
    measure(Work([lambda: table.block_table(8)] * 2, check=equals([want])), shape)


@growth(Shape(kv_len=100), **BATCHES)
def test_slot_mapping(measure, shape):
    table, requests, lens = tables(shape)
    rows = requests, lens - 1
    want = reference.slot_mapping(*csr(table)[:2], shape.page_size, *map(to_host, rows))
    measure(Work([lambda: table.slot_mapping(*rows)] * 2, check=equals([want])), shape)


@growth(Shape(kv_len=100), **BATCHES)
def test_batch_indices_positions(measure, shape):
    _, _, lens = tables(shape)
    indptr, nnz = offsets([4] * shape.batch_size), 4 * shape.batch_size
    want = reference.batch_indices_positions(to_host(indptr), to_host(lens), nnz)
    call = lambda: batch_indices_positions(indptr, lens, nnz)  # noqa: E731
    measure(Work([call] * 2, check=equals(want)), shape)


@growth(Shape(kv_len=100), **BATCHES)
def test_from_seq_lens(measure, shape):
    table, _, lens = tables(shape)
    indptr, last = reference.page_indptr(to_host(lens), shape.page_size)

    def call():
        made = PageTable.from_seq_lens(lens, shape.page_size, table.indices)
        return made.indptr, made.last_page_len

    measure(Work([call] * 2, check=equals([indptr, last])), shape)


@growth(Shape(kv_len=100), **BATCHES)
def test_from_block_table(measure, shape):
    table, _, lens = tables(shape)
    block_table = table.block_table(8)
    want, count = csr(table)[1], len(table.indices)

    def call():
        return PageTable.from_block_table(block_table, lens, shape.page_size).indices

    measure(Work([call] * 2, check=lambda found: equals([want])(found[:count])), shape)
