"""cukv.jax: the values of the nouns, jitted, looped and sharded; in place, planned and captured.

On JAX for the CPU results have the bits of the nouns on NumPy; on a GPU they are as near to them as
kernels are. Where there is no GPU, calls to one are made as far as they go: to what is launched.
"""

import copy
import functools
import os
import pickle
import struct
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
import pytest
from cases import MLACase, PagedCase, random_rows
from tolerances import ATTENTION, LSE, MERGE, assert_close, assert_same_bits, max_abs

import cukv
from cukv import (
    _arrays,
    _kernels,
    _latent_attention,
    _paged_attention,
    _recording,
    _sources,
    _tensor_maps,
    flashinfer,
)

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory too
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import jax
    except ImportError:  # the tests are collected all the same: their names are recorded
        jax = None
    else:
        import cukv.jax as cj
        from cukv.jax import _xla

        jnp, P = jax.numpy, jax.sharding.PartitionSpec
pytestmark = [
    pytest.mark.skipif(jax is None, reason="JAX is not installed (pip install -e '.[jax]')"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of JAX, from within
]

CASE = PagedCase((45, 0, 8, 25), page_size=16, num_kv_heads=8, head_dim=16)
QO_INDPTR = np.array([0, 3, 3, 4, 9], np.int32)

on_both = [pytest.param("cpu"), pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture
def place(request):
    """Devices of JAX: the first is where arrays go. CPUs unless a test says otherwise."""
    devices = jax.devices(getattr(request, "param", "cpu"))
    if request.node.get_closest_marker("two_gpus") is None and devices[0].platform != "cpu":
        devices = devices[:1]
    with jax.default_device(devices[0]):
        yield devices


def in_jax(tree):
    """Copy a noun, or arrays, of NumPy into JAX arrays."""
    return jax.tree.map(jnp.asarray, tree)


def made(case, rng):
    """Give cache and table, in NumPy without poison and in JAX."""
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays)
    return cache, table, *in_jax((cache, table))


def same(got, want):
    jax.tree.map(lambda g, w: assert_same_bits(np.asarray(g), np.asarray(w)), got, want)


def attended(place, got, want, scale, dtype="float16"):
    """Check an output, or it and its lse, against those of the nouns on NumPy."""
    if place[0].platform == "cpu":
        same(got, want)
        return
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert_close(np.asarray(got[0]), want[0], ATTENTION[dtype], scale=scale)
    if len(want) > 1:
        assert_close(np.asarray(got[1]), want[1], LSE)


def pickled(x):
    """Take a thing through pickle."""
    return pickle.loads(pickle.dumps(x))


# Nouns


def test_nouns_are_pytrees_and_come_back_as_they_were(place, rng):
    cache, table, there, _ = made(CASE, rng)
    assert isinstance(there, cukv.PagedKVCache)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(there))
    back = jax.tree.map(np.asarray, there)
    assert_same_bits(back.k, cache.k)  # a noun of NumPy arrays has its methods again
    mask = cukv.RaggedMask.from_list([np.ones((2, 3), bool)]).pack()
    for x in (mask, cukv.PackedMask(mask.data, mask.qo_indptr, mask.kv_indptr), table):
        assert jax.tree.structure(in_jax(x)) == jax.tree.structure(x)
    with pytest.raises(TypeError, match="PageTable takes"):
        cj.noun(cukv.PageTable, table.indptr)
    fields = table.indptr, table.indices, table.last_page_len, 16
    with pytest.raises(TypeError, match="PageTable is given page_size twice"):
        cj.noun(cukv.PageTable, *fields, page_size=8)
    with pytest.raises(TypeError, match="PageTable's indptr must be an array, got <class 'list'>"):
        cj.noun(cukv.PageTable, [0, 1], *fields[1:])
    for kind in (int, 3, table):
        with pytest.raises(TypeError, match=r"kind must be a noun, such as cukv.PageTable, got"):
            cj.noun(kind, *fields)


def test_an_argument_that_is_no_array_is_named(rng):
    _, _, cache, table = made(CASE, rng)
    q = jnp.zeros((table.last_page_len.shape[0], 8, 64), "float16")
    rows = cj.noun(cukv.RaggedTensor, q, jnp.arange(len(q) + 1))
    latent = cj.noun(cukv.MLAPagedCache, jnp.zeros((4, 16, 576), "float16"))
    nobody = cukv.PageTable.from_seq_lens([], 16, xp=np)
    levels = cukv.CascadeLevels(([0],), (nobody,))
    for name, call in (
        ("decode: q", lambda: cj.decode(q.tolist(), cache, table)),
        ("decode: q", lambda: cj.decode(rows, cache, table)),
        ("cascade: q", lambda: cj.cascade(None, cache, levels)),
        ("mla_decode: q_pe", lambda: cj.mla_decode(q, 1.0, latent, table, sm_scale=1.0)),
        ("append: v", lambda: cj.append(cache, q, [1.0], table)),
        ("mla_append: ckv", lambda: cj.mla_append(latent, None, q, table)),
        ("merge_states: lse", lambda: cj.merge_states(q, [0.0])),
        ("pmerge_states: o", lambda: cj.pmerge_states([0.0], q, "x")),
        ("packbits: x", lambda: cj.packbits([True])),
    ):
        with pytest.raises(TypeError, match=f"^cukv.jax.{name} must be an array, got <class"):
            call()


def test_offsets_and_sinks_may_be_python_numbers_with_a_plan_too():
    table = cukv.PageTable.from_seq_lens([4, 5], 16, xp=np)
    latent = cj.noun(cukv.MLAPagedCache, jnp.ones((4, 16, 576), "float16"))
    q = jnp.ones((2, 4, 512), "float16"), jnp.ones((2, 4, 64), "float16")
    plan = cj.plan(q[0], latent, table, qo_indptr=range(3))
    for options in ({}, {"plan": plan}):
        o = cj.mla_decode(*q, latent, table, sm_scale=0.1, qo_indptr=[0, 1, 2], **options)
        same(o, jnp.ones_like(q[0]))
    cache = cj.noun(cukv.PagedKVCache, jnp.ones((4, 2, 16, 2, 8), "float16"))
    rows = jnp.zeros((2, 2, 8), "float16")
    same(cj.append(cache, rows, rows, table, indptr=(0, 1, 2)).data[0, :, 3], rows * 0)
    sinks = [float("-inf")] * 2
    same(cj.decode(rows, cache, table, sinks=sinks), jnp.ones_like(rows))


def test_rows_to_gather_are_counted_by_an_integer():
    table = cukv.PageTable.from_seq_lens([4, 5], 16, xp=np)
    cache = cj.noun(cukv.PagedKVCache, jnp.ones((4, 2, 16, 2, 8), "float16"))
    for nnz, error in ((-1, ValueError), ("9", TypeError), (9.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^cukv.jax.gather: nnz must be"):
            cj.gather(cache, table, nnz=nnz)


def test_numbers_of_64_bits_that_jax_would_cut_to_zero_are_true():
    for x in ([2**32, 0, 1], [1e-300, 0.0, np.nan]):
        assert np.asarray(cj.packbits(np.array(x))).tolist() == [5]


def test_a_noun_over_arrays_of_jax_in_cpu_memory_names_what_makes_one():
    with pytest.raises(TypeError, match=r"or make the noun by cukv.jax.noun$"):
        cukv.PagedKVCache(jax.device_put(np.zeros((1, 2, 16, 2, 8)), jax.devices("cpu")[0]))


def test_a_noun_of_jax_arrays_is_an_array_for_numpy():
    rows = cj.noun(cukv.RaggedTensor, jnp.ones((2, 8, 64), "float16"), jnp.arange(3))
    assert np.asarray(rows).shape == (2, 8, 64)
    assert np.asarray(rows, "float32").dtype == np.float32


def test_nouns_of_jax_arrays_show_their_structure_and_name_the_functions(place, rng):
    cache, table, there, its_table = made(CASE, rng)
    assert repr(there) == repr(cache).replace(", device=numpy", "")
    assert repr(its_table) == repr(table).replace(", device=numpy", "")
    assert there._repr_html_() is None
    rows = in_jax(CASE.queries(rng, 4, 8))
    shown = []

    def inside(cache, rows):
        shown.append(repr(cache))
        with pytest.raises(TypeError, match=r"append: k .* cukv.jax"):
            cache.append(rows, rows, table)
        return cj.append(cache, rows, rows, table)

    for function in (inside, jax.jit(inside)):
        function(there, rows)
    assert shown == [repr(there)] * 2
    for name in ("batch_size", "seq_lens", "packed"):
        says = rf"PageTable.{name}: not for nouns over arrays of JAX, .* cukv.jax"
        with pytest.raises(AttributeError, match=says):
            getattr(its_table, name)
    its_table.validate(cache.max_num_pages, its_table.indptr)
    with pytest.raises(ValueError, match=r"PageTable.validate: page 0 of request 0 must be"):
        its_table.validate(0)
    with pytest.raises(AttributeError, match="'PageTable' object has no attribute 'no_such'"):
        table.no_such  # noqa: B018


@pytest.mark.parametrize("place", on_both, indirect=True)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_nouns_of_jax_arrays_are_copied_and_pickled(place, again, rng):
    *_, there, its_table = made(CASE, rng)
    mask = cukv.RaggedMask.from_list([np.ones((2, 3), bool)]).pack()
    levels = cukv.CascadeLevels((np.arange(5, dtype=np.int32),), (made(CASE, rng)[1],))
    for x in (there, its_table, in_jax(mask), in_jax(levels)):
        other = again(x)
        assert type(other) is type(x)
        assert other is not x
        assert jax.tree.structure(other) == jax.tree.structure(x)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(other))
        same(other, x)
    for name in ("to_host", "to_device", "show"):
        with pytest.raises(TypeError, match=r"PackedMask: not for nouns over arrays of JAX"):
            getattr(in_jax(mask), name)()


# Functions


@pytest.mark.parametrize("place", on_both, indirect=True)
@pytest.mark.parametrize("form", ["5d", "pair"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_gives_a_new_cache_and_gather_reads_it(place, layout, form, rng):
    case = PagedCase((45, 0, 8), page_size=16, layout=layout, form=form, dtype="bfloat16")
    cache, table, there, its_table = made(case, rng)
    k, v = (random_rows(rng, (3, 2, 64), "float16") for _ in range(2))
    indptr = np.array([0, 2, 2, 3], np.int32)
    got = jax.jit(cj.append)(there, in_jax(k), in_jax(v), its_table, indptr=in_jax(indptr))
    same(there.data, cache.data)  # the argument is as it was
    cache.append(k, v, table, indptr=indptr)
    same(got.data, cache.data)
    for mine, theirs in zip(jax.jit(cj.gather)(got, its_table), cache.gather(table), strict=True):
        size = int(theirs.indptr[-1])
        same(mine.data[:size], theirs.data[:size])
        assert mine.indptr.tolist() == theirs.indptr.tolist()


@pytest.mark.parametrize("place", on_both, indirect=True)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_caches_take_scales_that_are_numbers_or_arrays(place, dtype, rng):
    case = PagedCase((45, 8), page_size=16, num_kv_heads=2, head_dim=64, dtype=dtype)
    cache, table, there, its_table = made(case, rng)
    rows, q = random_rows(rng, (2, 2, 64), "bfloat16"), random_rows(rng, (2, 4, 64), "bfloat16")
    scale = jnp.full(1, 0.5, jnp.float32)
    there = jax.jit(functools.partial(cj.append, v_scale=2.0))(
        there, rows, rows, its_table, k_scale=scale
    )
    cache.append(rows, rows, table, k_scale=0.5, v_scale=2.0)
    same(there.data, cache.data)
    o = jax.jit(functools.partial(cj.decode, v_scale=2.0))(q, there, its_table, k_scale=scale)
    want = cache.decode(q, table, k_scale=0.5, v_scale=2.0)
    attended(place, o, want, 2 * max_abs(cache.v), "bfloat16")
    k, _ = jax.jit(functools.partial(cj.gather, dtype="float16"))(there, its_table, k_scale=scale)
    same(k.data[:53], cache.gather(table, dtype="float16", k_scale=0.5)[0].data[:53])


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_attention_is_that_of_the_nouns(place, rng):
    cache, table, *there = made(CASE, rng)
    scale = max_abs(CASE.arrays(rng).v)
    q, rows = CASE.queries(rng, 4, 16), CASE.queries(rng, 9, 16)
    sinks = rng.standard_normal(16).astype(np.float32)
    options = {"window_left": 7, "sm_scale": 0.25, "return_lse": True}
    decode = jax.jit(functools.partial(cj.decode, **options))
    want = cache.decode(q, table, sinks=sinks, **options)
    attended(place, decode(q, *there, sinks=sinks), want, scale)
    ragged = cukv.RaggedTensor(rows, QO_INDPTR)
    prefill = jax.jit(functools.partial(cj.prefill, causal=True, **options))
    want = cache.prefill(ragged, table, causal=True, **options)
    attended(place, prefill(in_jax(ragged), *there), want, scale)
    shapes = zip(np.diff(QO_INDPTR), CASE.kv_lens, strict=True)
    mask = cukv.RaggedMask.from_list([rng.random(shape) < 0.5 for shape in shapes])
    for each in (mask, mask.pack()):
        got = jax.jit(cj.prefill)(in_jax(ragged), *there, custom_mask=in_jax(each))
        attended(place, got, cache.prefill(ragged, table, custom_mask=each), scale)
    keys = cache.gather(table, nnz=78)
    got = jax.jit(cj.ragged_prefill)(*in_jax((ragged, *keys)))
    attended(place, got, ragged.prefill(*keys), scale)


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_mla_is_that_of_the_nouns(place, rng):
    cache, table, there, its_table = made(MLACase((9, 4), page_size=4), rng)
    ckv, kpe = random_rows(rng, (2, 512), "float16"), random_rows(rng, (2, 64), "float16")
    there = jax.jit(cj.mla_append)(there, ckv, kpe, its_table)
    cache.append(ckv, kpe, table)
    same(there.data, cache.data)
    q, q_pe = random_rows(rng, (2, 4, 512), "float16"), random_rows(rng, (2, 4, 64), "float16")

    def decode(q, q_pe, cache, table, plan=None):
        return cj.mla_decode(q, q_pe, cache, table, sm_scale=0.1, return_lse=True, plan=plan)

    want = cache.decode(q, q_pe, table, sm_scale=0.1, return_lse=True)
    scale = max_abs(cache.gather(table, nnz=13)[0].data)
    attended(place, jax.jit(decode)(q, q_pe, there, its_table), want, scale)
    plan = jax.jit(cj.plan)(q, there, its_table)
    attended(place, jax.jit(decode)(q, q_pe, there, its_table, plan), want, scale)


def cascade_of(rng, row_order=None):
    """Give rows, a cache and levels: 4 rows share 32 tokens, 1 and 3 of them have 5 and 9 more."""
    cache = cukv.PagedKVCache(random_rows(rng, (8, 2, 16, 2, 16), "float16"))
    tables = [
        cukv.PageTable([0, 2], [6, 1], [16], 16),
        cukv.PageTable([0, 1, 2], [3, 0], [5, 9], 16),
    ]
    levels = cukv.CascadeLevels(([0, 4], [0, 1, 4]), tuple(tables), row_order)
    return random_rows(rng, (6, 4, 16), "float16"), cache, levels


@pytest.mark.parametrize("place", on_both, indirect=True)
@pytest.mark.parametrize("window_left", [-1, 20])
@pytest.mark.parametrize("row_order", [None, [2, 0, 5, 1]])
def test_cascades_are_those_of_the_nouns(place, row_order, window_left, rng):
    q, cache, levels = cascade_of(rng, row_order)
    named = np.array(row_order or range(4))  # other rows are padding

    def attend(q, cache, levels):
        options = {"causal": True, "window_left": window_left}
        plan = cj.plan(q, cache, levels, **options)
        rows = (cj.cascade(q, cache, levels, plan=p, **options)[named] for p in (plan, None))
        return jnp.stack(list(rows))

    got = jax.jit(attend)(q, *in_jax((cache, levels)))
    want = levels.attend(q, cache, causal=True, window_left=window_left)[named]
    for o in got:
        attended(place, o, want, max_abs(cache.v))


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_states_and_bits_are_those_of_the_nouns(place, rng):
    o, lse = random_rows(rng, (5, 3, 2, 8), "float16"), random_rows(rng, (5, 3, 2), "float32")
    merged, want = jax.jit(cj.merge_states)(o, lse), cukv.merge_states(o, lse)
    if place[0].platform == "cpu":
        same(merged, want)
    assert_close(np.asarray(merged[0]), want[0], MERGE["float16"], scale=max_abs(o))
    assert_close(np.asarray(merged[1]), want[1], LSE)
    nothing = jax.jit(cj.merge_states)(o[:, :0], lse[:, :0])
    same(nothing, (np.zeros((5, 2, 8), "float16"), np.full((5, 2), -np.inf, "float32")))
    for bits in (rng.random(13) < 0.5, rng.random((3, 5)) < 0.5):
        same(jax.jit(cj.packbits)(bits), cukv.packbits(bits))
        same(cj.packbits(bits, "big"), np.packbits(bits))


# In place


@pytest.mark.parametrize("place", on_both, indirect=True)
@pytest.mark.parametrize("form", ["5d", "pair"])
def test_a_donated_cache_is_written_where_it_is(place, form, rng):
    case = PagedCase((5, 3), page_size=4, num_kv_heads=2, head_dim=16, form=form)
    cache, table, there, its_table = made(case, rng)
    there = jax.tree.map(jnp.copy, there)  # NumPy's memory is not JAX's to give
    rows = random_rows(rng, (2, 2, 16), "float16")
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(there)]
    append = jax.jit(cj.append, donate_argnums=0)
    after = append(there, rows, rows, its_table)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before
    assert all(x.is_deleted() for x in jax.tree.leaves(there))
    cache.append(rows, rows, table)
    same(after.data, cache.data)
    memory = append.lower(after, rows, rows, its_table).compile().memory_analysis()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(after))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_a_loop_appends_and_decodes_in_place(place, rng):
    case = PagedCase((5, 3), page_size=4, num_kv_heads=2, head_dim=16)
    cache, table, there, its_table = made(case, rng)
    there = jax.tree.map(jnp.copy, there)
    steps = random_rows(rng, (3, 2, 2, 16), "float16")
    q = case.queries(rng, 2, 4)

    def loop(cache, steps, table):
        plan = cj.plan(q, cache, table)

        def step(cache, rows):
            cache = cj.append(cache, rows, rows, table)
            return cache, cj.decode(q, cache, table, plan=plan)

        return jax.lax.scan(step, cache, steps)

    before = there.data.unsafe_buffer_pointer()
    final, got = jax.jit(loop, donate_argnums=0)(there, steps, its_table)
    assert final.data.unsafe_buffer_pointer() == before
    scale = max(max_abs(case.arrays(rng).v), max_abs(steps))
    for rows, o in zip(steps, got, strict=True):
        cache.append(rows, rows, table)
        attended(place, o, cache.decode(q, table), scale)


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_a_loop_makes_a_call_once_where_its_result_is_carried_and_stacked(place, rng):
    q = in_jax(random_rows(rng, (7, 4, 16, 16), "float16"))

    @jax.jit
    def loop(q, cache, table):
        def layer(x, rows):
            o = cj.decode(rows + x, cache, table)
            return o, o

        return jax.lax.scan(layer, q[0], q)[1]

    program = loop.lower(q, *made(CASE, rng)[2:]).compile().as_text()
    assert program.count('custom_call_target="xla_buffer_python') == 1


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_empty_batches_change_nothing(place, rng):
    case = PagedCase((), page_size=4, num_kv_heads=2, head_dim=16)
    cache = cukv.PagedKVCache(random_rows(rng, (3, 2, 4, 2, 16), "float16"))
    there, table = in_jax((cache, case.nouns(case.arrays(rng))[1]))
    q, rows = (jnp.zeros((0, heads, 16), "float16") for heads in (4, 2))

    @jax.jit
    def step(cache, q, rows, table):
        plan = cj.plan(q, cache, table)
        for _ in range(4):  # enough for a command buffer, were there anything to capture
            cache = cj.append(cache, rows, rows, table)
            q = cj.decode(q, cache, table, plan=plan)
        return cache, q, cj.gather(cache, table, nnz=0)

    got, o, gathered = step(there, q, rows, table)
    same(got.data, cache.data)
    assert o.shape == (0, 4, 16)
    assert [x.data.shape for x in gathered] == [(0, 2, 16)] * 2
    assert [x.indptr.tolist() for x in gathered] == [[0]] * 2


# Plans


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_a_plan_serves_all_layers_and_passes_between_jitted_functions(place, rng):
    case = PagedCase((45, 0, 300, 25), page_size=16, num_kv_heads=2, head_dim=64)
    cache, table, *there = made(case, rng)
    scale = max_abs(case.arrays(rng).v)
    q, ragged = case.queries(rng, 4, 8), cukv.RaggedTensor(case.queries(rng, 9, 8), QO_INDPTR)
    shapes = zip(np.diff(QO_INDPTR), case.kv_lens, strict=True)
    mask = cukv.RaggedMask.from_list([rng.random(shape) < 0.5 for shape in shapes])
    keys = cache.gather(table, nnz=370)
    rows = in_jax(ragged)
    for function, args, options, want in (
        (cj.decode, (q, *there), {}, cache.decode(q, table)),
        (cj.prefill, (rows, *there), {"causal": True}, cache.prefill(ragged, table, causal=True)),
        (cj.ragged_prefill, in_jax((ragged, *keys)), {}, ragged.prefill(*keys)),
    ):
        call = jax.jit(functools.partial(function, **options))
        for planned in (args, args[:2]) if function is cj.ragged_prefill else (args,):
            plan = jax.jit(functools.partial(cj.plan, **options))(*planned)
            for _ in range(2):
                attended(place, call(*args, plan=plan), want, scale)
    its_mask = in_jax(mask)
    plan = jax.jit(cj.plan)(rows, *there, custom_mask=its_mask)
    got = jax.jit(cj.prefill)(rows, *there, custom_mask=its_mask, plan=plan)
    attended(place, got, cache.prefill(ragged, table, custom_mask=mask), scale)


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_a_plan_for_another_call_raises_when_the_call_is_traced(place, rng):
    _, _, *there = made(CASE, rng)
    q = in_jax(CASE.queries(rng, 4, 16))
    plan = jax.jit(cj.plan)(q, *there)
    with pytest.raises(ValueError, match=r"cukv.jax.decode: .* window_left=-1, got 3"):
        jax.jit(functools.partial(cj.decode, window_left=3))(q, *there, plan=plan)
    ragged = cj.noun(cukv.RaggedTensor, q, jnp.arange(5))
    with pytest.raises(ValueError, match=r"cukv.jax.prefill: .* made for PagedKVCache.decode"):
        cj.prefill(ragged, *there, plan=plan)
    with pytest.raises(TypeError, match=r"plan must be a cukv.jax.Plan"):
        cj.decode(q, *there, plan=7)
    rows, cache, levels = in_jax(cascade_of(rng))
    for option in ({"batch_invariant": True}, {"custom_mask": there}):
        with pytest.raises(TypeError, match=next(iter(option))):
            cj.plan(rows, cache, levels, **option)


# FlashInfer's scripts


def test_flashinfer_scripts_may_plan_with_index_arrays_of_jax_on_the_cpu(place, rng):
    cache, table, _, there = made(CASE, rng)
    q = CASE.queries(rng, 4, 16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.empty(1, np.uint8))
    wrapper.plan(there.indptr, there.indices, there.last_page_len, 16, 8, 16, 16)
    same(wrapper.run(q, cache.data), cache.decode(q, table))
    with pytest.raises(TypeError, match=r"q is in CPU memory \(ArrayImpl\)"):
        wrapper.run(in_jax(q), cache.data)
    lens = flashinfer.get_seq_lens(there.indptr, there.last_page_len, 16)
    assert isinstance(lens, jax.Array)
    assert lens.tolist() == list(CASE.kv_lens)


# What has no meaning


@pytest.mark.parametrize("place", on_both, indirect=True)
def test_derivatives_and_vmap_are_refused_by_name(place, rng):
    _, _, cache, table = made(CASE, rng)
    q = in_jax(CASE.queries(rng, 4, 16))
    with pytest.raises(NotImplementedError, match=r"cukv.jax.decode: .* no derivative"):
        jax.grad(lambda q: cj.decode(q, cache, table).sum().astype("float32"))(q)
    with pytest.raises(NotImplementedError, match=r"cukv.jax.decode: has no vmap"):
        jax.vmap(lambda q: cj.decode(q, cache, table))(q[None])


def test_functions_name_what_is_no_noun_when_they_are_traced(place, rng):
    _, _, cache, table = made(CASE, rng)
    q = in_jax(CASE.queries(rng, 4, 16))
    rows = cj.noun(cukv.RaggedTensor, q, jnp.arange(5))
    latent = cj.noun(cukv.MLAPagedCache, jnp.zeros((4, 16, 576), "float16"))
    data, indptr = cache.data, table.indptr
    for call, message in (
        (lambda: cj.append(data, q, q, table), "append: cache must be a PagedKVCache"),
        (lambda: cj.append(cache, q, q, indptr), "append: table must be a PageTable"),
        (lambda: cj.mla_append(cache, q, q, table), "mla_append: cache must be an MLAPagedCache"),
        (lambda: cj.gather(data, table), "gather: cache must be a PagedKVCache"),
        (lambda: cj.gather(cache, indptr), "gather: table must be a PageTable"),
        (lambda: cj.decode(cache, q, table), "decode: cache must be a PagedKVCache"),
        (lambda: cj.decode(q, cache, indptr), "decode: table must be a PageTable"),
        (lambda: cj.prefill(cache, q, table), "prefill: cache must be a PagedKVCache"),
        (lambda: cj.prefill(q, cache, table), "prefill: q must be a RaggedTensor"),
        (lambda: cj.prefill(rows, cache, indptr), "prefill: table must be a PageTable"),
        (lambda: cj.ragged_prefill(rows, rows, q), "ragged_prefill: v must be a RaggedTensor"),
        (
            lambda: cj.mla_decode(q, q, cache, table, sm_scale=1.0),
            "mla_decode: cache must be an MLAPagedCache",
        ),
        (
            lambda: cj.mla_decode(q, q, latent, indptr, sm_scale=1.0),
            "mla_decode: table must be a PageTable",
        ),
        (lambda: cj.cascade(q, data, table), "cascade: cache must be a PagedKVCache"),
        (lambda: cj.cascade(q, cache, table), "cascade: levels must be a CascadeLevels"),
        (lambda: cj.plan(q, data, table), "plan: keys must be a PagedKVCache, MLAPagedCache or"),
    ):
        with pytest.raises(TypeError, match=f"^cukv.jax.{message}"):
            jax.eval_shape(call)


@pytest.mark.parametrize(
    ("op", "option", "value"),
    [
        ("decode", "sm_scale", 0.3),
        ("decode", "logits_soft_cap", 30.0),
        ("decode", "window_left", 3),
        ("decode", "return_lse", True),
        ("prefill", "causal", True),
        ("plan", "causal", True),
        ("plan", "window_left", 3),
        ("plan", "batch_invariant", True),
        ("gather", "nnz", 7),
    ],
)
def test_options_that_are_static_say_so_when_they_are_traced(place, op, option, value, rng):
    _, _, cache, table = made(CASE, rng)
    q = in_jax(CASE.queries(rng, 4, 16))
    rows = cj.noun(cukv.RaggedTensor, q, jnp.arange(5))
    args = {"prefill": (rows, cache, table), "gather": (cache, table)}.get(op, (q, cache, table))
    with pytest.raises(TypeError, match=rf"^cukv.jax.{op}: {option} is static"):
        jax.jit(lambda x: getattr(cj, op)(*args, **{option: x}))(value)


def test_bad_values_raise_on_the_cpu_when_the_function_runs(place, rng):
    _, _, cache, table = made(CASE, rng)
    bad = cj.noun(cukv.PageTable, table.indptr, table.indices, table.last_page_len + 99, 16)
    with pytest.raises(Exception, match="last_page_len of request 0"):
        jax.block_until_ready(jax.jit(cj.decode)(CASE.queries(rng, 4, 16), cache, bad))


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu"], indirect=True)
def test_what_a_gpu_cannot_do_raises_when_the_function_is_traced(place, rng):
    _, _, cache, table = made(CASE, rng)
    q = in_jax(CASE.queries(rng, 4, 16))
    with pytest.raises(ValueError, match=r"decode: q must be \[batch_size=4"):
        jax.jit(cj.decode)(q[1:], cache, table)
    cache = jax.tree.map(lambda x: x.astype("float32"), cache)
    with pytest.raises(NotImplementedError, match="got float32"):
        jax.jit(cj.decode)(q, cache, table)


# Several devices

on_all = [*on_both, pytest.param("gpu", marks=pytest.mark.two_gpus, id="gpus")]


def mesh_of(place):
    return jax.sharding.Mesh(np.array(place), ("x",))


def spread(place, specs, *args):
    """Put arguments of a sharded function where it wants them."""
    mesh = mesh_of(place)
    shardings = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.device_put(args, shardings)


@pytest.mark.parametrize("place", on_all, indirect=True)
def test_heads_are_sharded(place, rng):
    cache, table, there, its_table = made(CASE, rng)
    q = CASE.queries(rng, 4, 16)
    k = random_rows(rng, (4, 8, 16), "float16")
    where = {"batch_indices": np.array([0, 2, 3, -1], np.int32)}
    where["positions"] = np.array([3, 1, 0, 0], np.int32)

    def step(q, k, cache, table):
        cache = cj.append(cache, k, k, table, **where)
        return cj.decode(q, cache, table, plan=cj.plan(q, cache, table)), cache

    heads = cj.noun(cukv.PagedKVCache, P(None, None, None, "x"))
    specs = P(None, "x"), P(None, "x"), heads, P()
    sharded = jax.shard_map(
        step, mesh=mesh_of(place), in_specs=specs, out_specs=(P(None, "x"), heads)
    )
    args = spread(place, specs, q, k, there, its_table)
    assert "all-gather" not in jax.jit(sharded).lower(*args).compile().as_text()
    o, got = jax.jit(sharded)(*args)
    cache.append(k, k, table, **where)
    attended(place, o, cache.decode(q, table), max_abs(cache.gather(table)[1].data[:78]))
    same(got.data, cache.data)


@pytest.mark.parametrize("place", ["cpu"], indirect=True)
def test_a_loop_carries_a_cache_of_sharded_heads(place, rng):
    cache, table, there, its_table = made(CASE, rng)
    q = CASE.queries(rng, 4, 16)
    k = random_rows(rng, (4, 8, 16), "float16")

    def steps(q, k, cache, table):
        def step(cache, q):
            cache = cj.append(cache, k, k, table)
            return cache, cj.decode(q, cache, table)

        return jax.lax.scan(step, cache, jnp.stack([q, 2 * q]))

    heads = cj.noun(cukv.PagedKVCache, P(None, None, None, "x"))
    specs = P(None, "x"), P(None, "x"), heads, P()
    sharded = jax.shard_map(
        steps, mesh=mesh_of(place), in_specs=specs, out_specs=(heads, P(None, None, "x"))
    )
    got, o = jax.jit(sharded)(*spread(place, specs, q, k, there, its_table))
    cache.append(k, k, table)
    same(got.data, cache.data)
    for turn in range(2):
        want = cache.decode((1 + turn) * q, table)
        attended(place, o[turn], want, max_abs(cache.gather(table)[1].data[:78]))


@pytest.mark.parametrize("place", ["cpu"], indirect=True)
def test_what_differs_among_devices_is_not_given_as_if_it_did_not(place):
    bits = jnp.arange(64 * len(place)) % 3 == 0
    whole = jax.shard_map(cj.packbits, mesh=mesh_of(place), in_specs=P("x"), out_specs=P("x"))
    same(whole(bits), np.packbits(np.asarray(bits), bitorder="little"))
    first = jax.shard_map(cj.packbits, mesh=mesh_of(place), in_specs=P("x"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        first(bits)


def padded(x, size):
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def shared_keys(place, rng, axes):
    """Give q, cache and table of 3 requests whose keys devices share, their specs, and all keys."""
    lens = rng.integers(0, 20, (len(place), 3))  # of each request on each device; some have none
    parts = [PagedCase(tuple(n.tolist()), page_size=4, num_kv_heads=2, head_dim=16) for n in lens]
    nouns = [case.nouns(case.arrays(rng)) for case in parts]
    q = parts[0].queries(rng, 3, 4)
    pages = max(cache.max_num_pages for cache, _ in nouns)
    width = max(len(table.indices) for _, table in nouns)
    caches = np.concatenate([padded(cache.data, pages) for cache, _ in nouns])
    tables = [
        np.concatenate([get(table) for _, table in nouns])
        for get in (
            lambda t: t.indptr,
            lambda t: padded(t.indices, width),
            lambda t: t.last_page_len,
        )
    ]
    cache = cj.noun(cukv.PagedKVCache, jnp.asarray(caches))
    table = cj.noun(cukv.PageTable, *in_jax(tables), 4)
    by_keys = P(axes)
    specs = (
        P(),
        cj.noun(cukv.PagedKVCache, by_keys),
        cj.noun(cukv.PageTable, by_keys, by_keys, by_keys, 4),
    )
    rows, values = ([list(cache.gather(table)[side]) for cache, table in nouns] for side in (0, 1))
    k, v = (
        cukv.RaggedTensor.from_list([np.concatenate([x[b] for x in of]) for b in range(3)])
        for of in (rows, values)
    )
    return (q, cache, table), specs, (k, v)


@pytest.mark.parametrize("place", on_all, indirect=True)
def test_keys_are_sharded_and_states_merge_by_their_lse(place, rng):
    args, specs, (k, v) = shared_keys(place, rng, "x")

    def attend(q, cache, table):
        o, lse = cj.decode(q, cache, table, return_lse=True)
        o, lse = cj.pmerge_states(o, lse, "x")
        return o[None], lse[None]  # the same on every device

    sharded = jax.shard_map(attend, mesh=mesh_of(place), in_specs=specs, out_specs=(P("x"), P("x")))
    o, lse = map(np.asarray, jax.jit(sharded)(*spread(place, specs, *args)))
    want = cukv.RaggedTensor(args[0], [0, 1, 2, 3]).prefill(k, v, return_lse=True)
    for device in range(len(place)):
        assert_close(o[device], want[0], ATTENTION["float16"], scale=max_abs(v.data))
        assert_close(lse[device], want[1], LSE)


def test_a_loop_carries_merged_states_as_the_same_on_every_device(place, rng):
    axes = "x", "y"  # keys are shared out along both
    args, specs, (k, v) = shared_keys(place, rng, axes)

    def layers(q, cache, table):
        def layer(x, _):
            o, lse = cj.decode(x, cache, table, return_lse=True)
            o, lse = cj.pmerge_states(o, lse, axes)
            return x + o, lse

        return jax.lax.scan(layer, q, length=2)

    mesh = jax.sharding.Mesh(np.array(place).reshape(2, 4), axes)
    x, lse = jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=P()))(*args)
    want = args[0]
    for turn in range(2):
        o, its_lse = cukv.RaggedTensor(want, [0, 1, 2, 3]).prefill(k, v, return_lse=True)
        assert_close(np.asarray(lse)[turn], its_lse, LSE)
        want = want + o
    assert_close(np.asarray(x), want, ATTENTION["float16"], scale=2 * max_abs(v.data))


def test_sinks_that_one_device_has_count_once(place, rng):
    args, specs, (k, v) = shared_keys(place, rng, "x")
    sinks = rng.standard_normal(4).astype(np.float32)

    def attend(q, cache, table):
        mine = jnp.where(jax.lax.axis_index("x") == 3, sinks, -jnp.inf)
        o, lse = cj.decode(q, cache, table, sinks=mine, return_lse=True)
        return cj.pmerge_states(o, lse, "x")

    sharded = jax.shard_map(attend, mesh=mesh_of(place), in_specs=specs, out_specs=P())
    o, lse = map(np.asarray, jax.jit(sharded)(*args))
    want = cukv.RaggedTensor(args[0], [0, 1, 2, 3]).prefill(k, v, sinks=sinks, return_lse=True)
    assert_close(o, want[0], ATTENTION["float16"], scale=max_abs(v.data))
    assert_close(lse, want[1], LSE)


def test_a_plan_that_is_made_inside_shard_map_is_of_the_type_of_one_that_is_given(place, rng):
    args, specs, _ = shared_keys(place, rng, "x")
    mesh = mesh_of(place)
    plan = jax.shard_map(cj.plan, mesh=mesh, in_specs=specs, out_specs=P("x"))(*args)

    def attend(plan, is_old, q, cache, table):
        plan = jax.lax.cond(is_old, lambda: cj.plan(q, cache, table), lambda: plan)
        return cj.decode(q, cache, table, plan=plan)

    specs = P("x"), P(), *specs
    sharded = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("x")))
    same(*(sharded(plan, is_old, *args) for is_old in (False, True)))


@pytest.mark.parametrize("num_devices", [1, 8])
def test_what_is_bad_on_one_of_several_devices_is_logged(place, num_devices, caplog, monkeypatch):
    """Where others wait for that device, JAX does not come to raise it."""
    monkeypatch.setattr(jax, "local_device_count", lambda backend: num_devices)

    def work(memory, results):
        raise ValueError("page 3 of request 0 must be below 3")

    with pytest.raises(ValueError, match="page 3 of request 0"):
        _xla._Callback(work, (), (), {})._on_host(())
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    message = "on one of JAX's devices: page 3 of request 0 must be below 3"
    assert found == ([("ERROR", message)] if num_devices > 1 else [])


@pytest.mark.parametrize("place", on_all, indirect=True)
def test_states_of_devices_merge_as_those_of_one_array_do(place, rng):
    o = random_rows(rng, (5, len(place), 3, 8), "float16")
    lse = (40 * random_rows(rng, (5, len(place), 3), "float32")).astype(np.float32)
    lse[0] = lse[1, 0] = -np.inf  # no keys anywhere, none on the first
    o[lse == -np.inf] = np.nan

    def merge(o, lse):
        return jax.tree.map(lambda x: x[None], cj.pmerge_states(o[:, 0], lse[:, 0], "x"))

    specs = P(None, "x"), P(None, "x")
    sharded = jax.shard_map(merge, mesh=mesh_of(place), in_specs=specs, out_specs=P("x"))
    merged, merged_lse = map(np.asarray, jax.jit(sharded)(*spread(place, specs, o, lse)))
    want, want_lse = cukv.merge_states(o, lse)
    for device in range(len(place)):
        assert_close(merged[device], want, MERGE["float16"], scale=max_abs(o[lse > -np.inf]))
        assert_close(merged_lse[device], want_lse, LSE)


def test_states_of_devices_whose_sum_would_be_infinite_merge(place):
    largest = float(jnp.finfo("bfloat16").max)
    o = jnp.full((len(place), 2, 3, 8), largest, "bfloat16")

    def merge(o):
        return cj.pmerge_states(o[0], jnp.zeros((2, 3)), "x")

    sharded = jax.shard_map(merge, mesh=mesh_of(place), in_specs=P("x"), out_specs=P())
    with jax.numpy_rank_promotion("raise"):  # as strict users have it
        merged, lse = jax.jit(sharded)(o)
    same(merged, o[0])
    same(lse, np.full((2, 3), np.log2(len(place)), np.float32))


def test_states_of_devices_are_checked(place):
    o, lse = jnp.zeros((2, 3, 8), "float16"), jnp.zeros((2, 3))
    with pytest.raises(TypeError, match="pmerge_states: lse must be float32, got float16"):
        cj.pmerge_states(o, lse.astype("float16"), "x")
    with pytest.raises(ValueError, match=r"pmerge_states: lse must be \[n=2, num_heads=3\], got"):
        cj.pmerge_states(o, lse[:1], "x")
    with pytest.raises(TypeError, match=r"pmerge_states: o must be .*, got int32"):
        cj.pmerge_states(o.astype("int32"), lse, "x")
    with pytest.raises(ValueError, match=r"pmerge_states: o must be \[n, num_heads, head_dim\]"):
        cj.pmerge_states(o[0], lse[0], "x")


def test_benchmarks_over_devices_are_rehearsed_on_cpus():
    folder = Path(__file__).parent / "bench"
    options = "-q", "--rehearse", "-p", "no:cacheprovider", folder / "test_jax_devices.py"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    hidden["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, options)],
        env=hidden, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


# On a GPU: captured, and in the order of streams


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu"], indirect=True)
def test_command_buffers_replay_steps_under_changing_lengths(place, rng, monkeypatch):
    case = PagedCase((45, 7, 300, 25), page_size=16, num_kv_heads=2, head_dim=64)
    cache, table, there, _ = made(case, rng)
    layers, steps = 4, 24
    caches = [jax.tree.map(jnp.copy, there) for _ in range(layers)]
    q = case.queries(rng, 4, 8)
    calls = []
    callback = _xla._Callback.__call__
    monkeypatch.setattr(
        _xla._Callback, "__call__", lambda *args: (calls.append(1), callback(*args))[0] and None
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches, q, rows, table):
        plan, x = cj.plan(q, caches[0], table), q
        for layer in range(layers):
            caches[layer] = cj.append(caches[layer], rows, rows, table)
            x = cj.decode(x, caches[layer], table, plan=plan)  # x is q of the next layer
        return caches, x

    given = []  # all of it is kept, so that what is new lies elsewhere
    for i in range(steps):
        last = (table.last_page_len - i) % 16 + 1
        now = cukv.PageTable(table.indptr, table.indices, last.astype(np.int32), 16)
        rows = random_rows(rng, (4, 2, 64), "float16")
        given.append(in_jax((q, rows, now)))
        caches, got = step(caches, *given[-1])
        cache.append(rows, rows, now)
        want = q
        for _ in range(layers):
            want = cache.decode(want, now)
        assert_close(np.asarray(got), want, ATTENTION["float16"], scale=layers * 5.0)
    calls.clear()
    for _ in range(steps):  # the last one again, where all lies as it lay
        caches, got = step(caches, *given[-1])
        assert_close(np.asarray(got), want, ATTENTION["float16"], scale=layers * 5.0)
    for each in caches:
        same(each.data, cache.data)
    # Without capture Python would be called for each operation of each step.
    assert len(calls) < steps * (1 + 2 * layers) / 2


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu"], indirect=True)
def test_rows_from_streams_of_cupy_are_waited_for_and_so_are_ours(place):
    ours, readers = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    table = in_jax(cukv.PageTable.from_seq_lens([1], 16, xp=np))
    cache = cj.noun(cukv.PagedKVCache, jnp.zeros((1, 2, 16, 2, 8), "float16"))
    append = jax.jit(cj.append, donate_argnums=0)
    slow = cp.empty(1 << 30, np.uint8)  # bytes: to set them takes longer than to queue the rest
    rows, stale = cp.zeros((1, 2, 8), np.float16), cp.zeros((), np.int64)
    cp.cuda.Device().synchronize()
    for i in range(1, 1001):
        with ours:
            slow.data.memset_async(i % 256, slow.nbytes)
            rows.fill(i)
            its_rows = jax.dlpack.from_dlpack(rows)
        cache = append(cache, its_rows, its_rows, table)
        with readers as stream:
            written = cp.from_dlpack(cache.data)
            stale += (written[0, :, 0] != np.float16(i)).any()
            del written, its_rows  # of the cache too: a view would turn donation into a copy
            done = stream.record()
        ours.wait_event(done)
    assert int(stale.get(stream=readers)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu"], indirect=True)
def test_rows_that_jax_has_not_finished_are_waited_for(place):
    stream = cp.cuda.Stream(non_blocking=True)
    table = cukv.PageTable.from_seq_lens([1], 16)
    cache = cukv.PagedKVCache(cp.zeros((1, 2, 16, 2, 8), np.float16))
    slow, stale = jnp.ones((4096, 4096), "float16"), cp.zeros((), np.int64)
    cp.cuda.Device().synchronize()

    @jax.jit
    def produce(i, slow):
        slow = slow @ slow @ slow  # infinite, and takes longer than to queue the rest
        return jnp.where(slow[0, 0] > 0, jnp.full((1, 2, 8), i, "float16"), 0)

    for i in range(1, 1001):
        rows = produce(i, slow)
        with stream:
            cache.append(rows, rows, table)
            stale += (cache.data[0, :, 0] != np.float16(i)).any()
    assert int(stale.get(stream=stream)) == 0


# Where there is no GPU: what would be launched on one


class Launched(NamedTuple):
    """A launch, and what a graph's node of it is but for the parameters."""

    name: str
    packed: bytes
    node: tuple[Any, ...]


class Launch:
    """A kernel that only says when it is launched."""

    def __init__(self, key, name, launched):
        self._key, self._name, self._launched = key, name, launched
        self._layout = _sources.struct_layout(_sources.params_struct(name), name)

    def __call__(self, grid, cta, smem_bytes=0, /, **params):
        packed = struct.pack(self._layout.format, *(params[n] for n in self._layout.names))
        assert grid > 0
        assert len(packed) == self._layout.size
        assert _recording.recorder.work is not None, "launched where nothing is recorded"
        found = Launched(self._name, packed, (self._key, grid, cta, smem_bytes))
        _recording.recorder.work.append(lambda stream: self._launched.append(found))

    def bind(self, grid, cta, smem_bytes=0, /, *, per_call, **fixed):
        def launch(*values):
            self(grid, cta, smem_bytes, **fixed, **dict(zip(per_call, values, strict=True)))

        return launch


class Device:
    """A GPU as far as tracing asks: its properties."""

    compute_capability = None  # "80" or "90"
    attributes = types.MappingProxyType(
        {
            "MultiProcessorCount": 108,
            "MaxSharedMemoryPerBlockOptin": 166912,
            "MaxSharedMemoryPerMultiprocessor": 167936,
        }
    )

    def __init__(self, number=0):
        self.id = number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(params=["80", "90"], ids="sm_{}".format)
def launched(place, monkeypatch, request):
    """Have calls on JAX for the CPU take it for a GPU: give the list of what they launch."""
    found = []
    kinds = (
        *(_kernels.arch_of, _kernels.num_sms, _kernels.smem_limits),
        *(module._kinds_of for module in (_paged_attention, _latent_attention)),
    )
    for known in kinds:
        known.cache_clear()
    monkeypatch.setattr(_kernels, "_loaded", {})
    monkeypatch.setattr(_kernels, "_load", lambda key, name, *_: Launch(key, name, found))
    monkeypatch.setattr(_arrays, "_device_count", lambda: 1)
    monkeypatch.setattr(
        _recording,
        "_memset",
        lambda pointer, size, stream: found.append(Launched("memset", b"", (size,))),
    )
    monkeypatch.setattr(Device, "compute_capability", request.param)
    monkeypatch.setattr(cp.cuda, "Device", Device)
    monkeypatch.setattr(_tensor_maps, "_cu_tensor_map_encode_tiled", lambda: lambda *_: 0)
    monkeypatch.setattr(_arrays, "getDevice", lambda: 0)
    monkeypatch.setattr(_xla, "getDevice", lambda: 0)
    monkeypatch.setattr(_xla, "gpus", lambda: {0: place[0]})
    monkeypatch.setattr(_xla, "_DEVICE_TYPES", {1: True})
    monkeypatch.setattr(_xla, "_repeat", lambda recorded, _: [work(0) for work in recorded])
    yield found
    for known in kinds:
        known.cache_clear()


def names(launched):
    found = [launch.name for launch in launched]
    launched.clear()
    return found


def test_a_step_on_a_gpu_plans_once_and_launches_what_the_nouns_launch(launched, rng):
    case = PagedCase((45, 7, 300, 25), page_size=16, num_kv_heads=2, head_dim=64)
    _, _, there, its_table = made(case, rng)
    q, rows = in_jax(case.queries(rng, 4, 8)), in_jax(random_rows(rng, (4, 2, 64), "float16"))

    @jax.jit
    def step(caches, q, rows, table):
        plan, x = cj.plan(q, caches[0], table), q
        for layer, cache in enumerate(caches):
            caches[layer] = cj.append(cache, rows, rows, table)
            x = cj.decode(x, caches[layer], table, plan=plan)
        return caches, x

    jax.block_until_ready(step([there] * 2, q, rows, its_table))
    found = names(launched)
    assert sorted(found) == sorted(["plan", *["append", "decode"] * 2])
    assert found.index("plan") < found.index("decode")
    jax.block_until_ready(jax.jit(cj.decode)(q, there, its_table))
    assert names(launched) == ["plan", "decode"]
    jax.block_until_ready(jax.jit(cj.gather)(there, its_table))
    assert names(launched) == ["token_indptr", "gather", "gather"]
    empty, indptr = jnp.zeros((0, 2, 64), "float16"), jnp.zeros(5, "int32")
    jax.block_until_ready(jax.jit(cj.append)(there, empty, empty, its_table, indptr=indptr))
    assert names(launched) == []


def test_other_operations_on_a_gpu_launch_what_the_nouns_launch(launched, rng):
    case = PagedCase((45, 7, 25), page_size=16, num_kv_heads=2, head_dim=64)
    cache, table, *there = made(case, rng)
    qo_indptr = np.array([0, 40, 43, 47], np.int32)
    ragged = cukv.RaggedTensor(case.queries(rng, 47, 8), qo_indptr)
    shapes = zip(np.diff(qo_indptr), case.kv_lens, strict=True)
    mask = cukv.RaggedMask.from_list([rng.random(shape) < 0.5 for shape in shapes])
    attention = {"decode", f"prefill_sm{cp.cuda.Device.compute_capability}"}
    for each in (None, mask, mask.pack()):
        jax.block_until_ready(jax.jit(cj.prefill)(in_jax(ragged), *there, custom_mask=in_jax(each)))
        planned = ["plan"] if each is None else ["mask_tiles", "plan"]
        found = names(launched)
        assert found[: len(planned)] == planned
        assert set(found[len(planned) :]) <= attention
    keys = cache.gather(table, nnz=77)
    jax.block_until_ready(jax.jit(cj.ragged_prefill)(*in_jax((ragged, *keys))))
    assert names(launched)[0] == "plan"
    q, there, levels = in_jax(cascade_of(rng, [2, 0, 5, 1]))
    jax.block_until_ready(jax.jit(functools.partial(cj.cascade, window_left=20))(q, there, levels))
    found = names(launched)
    assert (found[:2], found[-1]) == (["concat_levels", "plan"], "decode")
    latent, its_table = in_jax(
        MLACase((9, 4), page_size=8).nouns(MLACase((9, 4), page_size=8).arrays(rng))
    )
    q, q_pe = (jnp.zeros((2, 4, n), "float16") for n in (512, 64))
    jax.block_until_ready(cj.mla_decode(q, q_pe, latent, its_table, sm_scale=0.1))
    assert names(launched) == ["plan", "mla_decode"]
    latent = jax.jit(cj.mla_append)(latent, q[:, 0], q_pe[:, :1], its_table)
    options = {"qo_indptr": jnp.asarray([0, 1, 2]), "causal": True}
    plan = cj.plan(q, latent, its_table, **options)
    jax.block_until_ready(
        cj.mla_decode(q, q_pe, latent, its_table, sm_scale=0.1, plan=plan, **options)
    )
    assert names(launched) == ["append", "plan", "mla_decode"]
    jax.block_until_ready(cj.merge_states(q[None], jnp.zeros((1, 2, 4))))
    jax.block_until_ready(cj.packbits(q > 0))
    assert names(launched) == ["merge_states", "packbits"]


def test_fp8_caches_on_a_gpu_launch_what_the_nouns_launch(launched, rng):
    case = PagedCase(
        (45, 7), page_size=16, num_kv_heads=2, head_dim=64, dtype="float8_e4m3fn", form="pair",
        layout="HND",
    )  # fmt: skip
    _, _, there, its_table = made(case, rng)
    q, rows = (jnp.zeros((2, heads, 64), "bfloat16") for heads in (4, 2))
    scale, sinks = jnp.full(1, 0.5), jnp.zeros(4)
    there = jax.jit(cj.append)(there, rows, rows, its_table, k_scale=scale, v_scale=scale)
    decode = jax.jit(functools.partial(cj.decode, v_scale=2.0, logits_soft_cap=30.0))
    o = decode(q, there, its_table, k_scale=scale, sinks=sinks)
    assert o.dtype == q.dtype
    k, _ = jax.jit(functools.partial(cj.gather, dtype="float16"))(there, its_table, v_scale=scale)
    jax.block_until_ready(k.data)
    assert names(launched) == ["append", "plan", "decode", "token_indptr", "gather", "gather"]


def test_calls_with_the_same_buffers_prepare_nothing_again(launched, rng, monkeypatch):
    case = PagedCase((45, 7), page_size=16, num_kv_heads=2, head_dim=64)
    _, _, there, its_table = made(case, rng)
    there = jax.tree.map(jnp.copy, there)
    rows = in_jax(random_rows(rng, (2, 2, 64), "float16"))
    append = jax.jit(cj.append, donate_argnums=0)
    there = append(there, rows, rows, its_table)
    monkeypatch.setattr(_xla._Callback, "_record", None)
    for _ in range(3):
        there = append(there, rows, rows, its_table)
    jax.block_until_ready(there)
    assert len({launch.packed for launch in launched}) == 1
    assert len(launched) == 4


def test_buffers_of_one_device_are_remembered_whatever_others_bring(launched, rng, monkeypatch):
    callbacks = []
    init = _xla._Callback.__init__
    monkeypatch.setattr(
        _xla._Callback, "__init__", lambda self, *args: callbacks.append(self) or init(self, *args)
    )
    rows = in_jax(random_rows(rng, (4, 8, 16), "float16"))
    jax.block_until_ready(cj.append(made(CASE, rng)[2], rows, rows, made(CASE, rng)[3]))
    (callback,) = callbacks
    callback._recorded.clear()
    count = len(callback._specs)
    for device in (0, *[1] * 2 * _xla._MAX_REMEMBERED):
        buffers = _xla._NOWHERE + 128 * rng.integers(1 << 24, size=count)
        callback._record(device, tuple(buffers.tolist()))
    assert len(callback._recorded[0]) == 1
    assert len(callback._recorded[1]) == _xla._MAX_REMEMBERED


def test_a_call_launches_the_same_kernels_whatever_its_buffers_are(launched, rng, monkeypatch):
    callbacks = []
    init = _xla._Callback.__init__
    monkeypatch.setattr(
        _xla._Callback, "__init__", lambda self, *args: callbacks.append(self) or init(self, *args)
    )
    case = PagedCase((45, 7, 300), page_size=16, num_kv_heads=2, head_dim=64)
    cache, table, *there = made(case, rng)
    qo_indptr = np.array([0, 40, 43, 47], np.int32)
    shapes = zip(np.diff(qo_indptr), case.kv_lens, strict=True)
    mask = cukv.RaggedMask.from_list([rng.random(shape) < 0.5 for shape in shapes])
    rows = cukv.RaggedTensor(case.queries(rng, 47, 8), qo_indptr)
    rows, keys, masks = in_jax((rows, cache.gather(table, nnz=352), (mask, mask.pack())))
    latent = MLACase((9, 4), page_size=8)
    latent = in_jax(latent.nouns(latent.arrays(rng)))
    q, new = (jnp.zeros((3, heads, 64), "float16") for heads in (8, 2))
    q_nope, q_pe = (jnp.zeros((2, 4, n), "float16") for n in (512, 64))
    mla_decode = functools.partial(cj.mla_decode, sm_scale=0.1)
    for function, options, *args in (
        (cj.decode, {}, q, *there),
        (cj.prefill, {"causal": True}, rows, *there),
        *((cj.prefill, {"custom_mask": mask}, rows, *there) for mask in masks),
        (cj.ragged_prefill, {}, rows, *keys),
        (cj.cascade, {"window_left": 20}, *in_jax(cascade_of(rng, [2, 0, 5, 1]))),
        (mla_decode, {}, q_nope, q_pe, *latent),
    ):
        plan = cj.plan(args[0], *args[-2:], **options)
        for each in (None, plan):
            jax.block_until_ready(function(*args, plan=each, **options))
    others = (
        cj.append(there[0], new, new, there[1]),
        cj.gather(*there),
        cj.mla_append(latent[0], q_nope[:, 0], q_pe[:, 0], latent[1]),
        cj.merge_states(q[None], jnp.zeros((1, 3, 8))),
        cj.packbits(q > 0),
    )
    jax.block_until_ready(others)  # else they would launch below
    for callback in callbacks:
        found = set()
        count = len(callback._specs) + 1  # scratch is the last
        for _ in range(20):  # XLA keeps 16 captures
            buffers = _xla._NOWHERE + 128 * rng.integers(1 << 24, size=count)  # aligned as XLA's
            launched.clear()
            for work in callback._record(0, tuple(buffers.tolist())):
                work(0)
            found.add(tuple(launch.node for launch in launched))
        assert len(found) == 1


def test_shapes_that_a_gpu_cannot_take_raise_when_the_function_is_traced(launched, rng):
    _, _, cache, table = made(CASE, rng)
    q = in_jax(CASE.queries(rng, 4, 16))
    with pytest.raises(ValueError, match=r"decode: q must be \[batch_size=4"):
        jax.jit(cj.decode).lower(q[1:], cache, table)
    cache = jax.tree.map(lambda x: x.astype("float32"), cache)
    with pytest.raises(NotImplementedError, match="got float32"):
        jax.jit(cj.decode).lower(q, cache, table)
