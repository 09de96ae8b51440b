"""cukv.jax on JAX for the CPU: the values of the nouns on NumPy, jitted, looped and sharded."""

import functools
import os
import warnings

import numpy as np
import pytest
from cases import MLACase, PagedCase, random_rows
from tolerances import ATTENTION, LSE, assert_close, assert_same_bits, max_abs

import cukv
from cukv import flashinfer

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="JAX is not installed (pip install -e '.[jax]')")
    if jax.default_backend() != "cpu":
        pytest.skip("cukv.jax runs on JAX for the CPU", allow_module_level=True)
    import cukv.jax as cj
jnp, P = jax.numpy, jax.sharding.PartitionSpec

CASE = PagedCase((45, 0, 8, 25), page_size=16, num_kv_heads=8, head_dim=16)
QO_INDPTR = np.array([0, 3, 3, 4, 9], np.int32)


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


# Nouns


def test_nouns_are_pytrees_and_come_back_as_they_were(rng):
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


# Functions


@pytest.mark.parametrize("form", ["5d", "pair"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_gives_a_new_cache_and_gather_reads_it(layout, form, rng):
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


def test_attention_gives_the_bits_of_the_nouns(rng):
    cache, table, *there = made(CASE, rng)
    q, rows = CASE.queries(rng, 4, 16), CASE.queries(rng, 9, 16)
    sinks = rng.standard_normal(16).astype(np.float32)
    options = {"window_left": 7, "sm_scale": 0.25, "logits_soft_cap": 4.0, "return_lse": True}
    decode = jax.jit(functools.partial(cj.decode, **options))
    same(decode(q, *there, sinks=sinks), cache.decode(q, table, sinks=sinks, **options))
    ragged = cukv.RaggedTensor(rows, QO_INDPTR)
    prefill = jax.jit(functools.partial(cj.prefill, causal=True, **options))
    same(prefill(in_jax(ragged), *there), cache.prefill(ragged, table, causal=True, **options))
    shapes = zip(np.diff(QO_INDPTR), CASE.kv_lens, strict=True)
    mask = cukv.RaggedMask.from_list([rng.random(shape) < 0.5 for shape in shapes])
    for each in (mask, mask.pack()):
        got = jax.jit(cj.prefill)(in_jax(ragged), *there, custom_mask=in_jax(each))
        same(got, cache.prefill(ragged, table, custom_mask=each))
    keys = cache.gather(table, nnz=78)
    got = jax.jit(cj.ragged_prefill)(*in_jax((ragged, *keys)))
    same(got, ragged.prefill(*keys))


def test_mla_gives_the_bits_of_the_nouns(rng):
    cache, table, there, its_table = made(MLACase((9, 4), page_size=4), rng)
    ckv, kpe = random_rows(rng, (2, 512), "float16"), random_rows(rng, (2, 64), "float16")
    there = jax.jit(cj.mla_append)(there, ckv, kpe, its_table)
    cache.append(ckv, kpe, table)
    same(there.data, cache.data)
    q, q_pe = random_rows(rng, (2, 4, 512), "float16"), random_rows(rng, (2, 4, 64), "float16")
    decode = jax.jit(functools.partial(cj.mla_decode, sm_scale=0.1, return_lse=True))
    want = cache.decode(q, q_pe, table, sm_scale=0.1, return_lse=True)
    same(decode(q, q_pe, there, its_table), want)


def test_cascades_states_and_bits_are_those_of_the_nouns(rng):
    cache = cukv.PagedKVCache(random_rows(rng, (8, 2, 16, 2, 16), "float16"))
    tables = [
        cukv.PageTable([0, 2], [6, 1], [16], 16),
        cukv.PageTable([0, 1, 2], [3, 0], [5, 9], 16),
    ]
    levels = cukv.CascadeLevels(([0, 4], [0, 1, 4]), tuple(tables))
    q = random_rows(rng, (4, 4, 16), "float16")
    got = jax.jit(functools.partial(cj.cascade, causal=True))(q, *in_jax((cache, levels)))
    same(got, levels.attend(q, cache, causal=True))
    o, lse = random_rows(rng, (5, 3, 2, 8), "float16"), random_rows(rng, (5, 3, 2), "float32")
    same(jax.jit(cj.merge_states)(o, lse), cukv.merge_states(o, lse))
    bits = rng.random(13) < 0.5
    same(jax.jit(cj.packbits)(bits), cukv.packbits(bits))


def test_a_loop_appends_and_decodes(rng):
    case = PagedCase((5, 3), page_size=4, num_kv_heads=2, head_dim=16)
    cache, table, there, its_table = made(case, rng)
    steps = random_rows(rng, (3, 2, 2, 16), "float16")
    q = case.queries(rng, 2, 4)

    def step(cache, rows):
        cache = cj.append(cache, rows, rows, its_table)
        return cache, cj.decode(q, cache, its_table)

    final, got = jax.jit(lambda c, rows: jax.lax.scan(step, c, rows))(there, steps)
    for rows, o in zip(steps, got, strict=True):
        cache.append(rows, rows, table)
        same(o, cache.decode(q, table))
    same(final.data, cache.data)


def test_flashinfer_scripts_may_plan_with_index_arrays_of_jax_on_the_cpu(rng):
    cache, table, _, there = made(CASE, rng)
    q = CASE.queries(rng, 4, 16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.empty(1, np.uint8))
    wrapper.plan(there.indptr, there.indices, there.last_page_len, 16, 8, 16, 16)
    same(wrapper.run(q, cache.data), cache.decode(q, table))
    with pytest.raises(TypeError, match="q is a ArrayImpl in CPU memory"):
        wrapper.run(in_jax(q), cache.data)
    lens = flashinfer.get_seq_lens(there.indptr, there.last_page_len, 16)
    assert isinstance(lens, jax.Array)
    assert lens.tolist() == list(CASE.kv_lens)


# What has no meaning


def test_derivatives_and_vmap_are_refused_by_name(rng):
    _, _, cache, table = made(CASE, rng)
    q = in_jax(CASE.queries(rng, 4, 16)).astype("float32")
    cache = jax.tree.map(lambda x: x.astype("float32"), cache)
    with pytest.raises(NotImplementedError, match=r"cukv.jax.decode: .* no derivative"):
        jax.grad(lambda q: cj.decode(q, cache, table).sum())(q)
    with pytest.raises(NotImplementedError, match=r"cukv.jax.decode: has no vmap"):
        jax.vmap(lambda q: cj.decode(q, cache, table))(q[None])


# Several devices


def mesh():
    assert jax.device_count() == 8
    return jax.sharding.Mesh(np.array(jax.devices()), ("x",))


def test_heads_are_sharded(rng):
    cache, table, there, its_table = made(CASE, rng)
    q = CASE.queries(rng, 4, 16)
    k = random_rows(rng, (4, 8, 16), "float16")
    where = {"batch_indices": np.array([0, 2, 3, -1], np.int32)}
    where["positions"] = np.array([3, 1, 0, 0], np.int32)

    def step(q, k, cache, table):
        cache = cj.append(cache, k, k, table, **where)
        return cj.decode(q, cache, table), cache

    heads = cj.noun(cukv.PagedKVCache, P(None, None, None, "x"))
    sharded = jax.shard_map(
        step,
        mesh=mesh(),
        in_specs=(P(None, "x"), P(None, "x"), heads, P()),
        out_specs=(P(None, "x"), heads),
    )
    o, got = jax.jit(sharded)(q, k, there, its_table)
    cache.append(k, k, table, **where)
    same(o, cache.decode(q, table))
    same(got.data, cache.data)


def test_keys_are_sharded_and_states_merge_by_their_lse(rng):
    lens = rng.integers(0, 20, (8, 3))  # tokens of each request on each device; some have none
    parts = [PagedCase(tuple(n.tolist()), page_size=4, num_kv_heads=2, head_dim=16) for n in lens]
    nouns = [case.nouns(case.arrays(rng)) for case in parts]
    q = parts[0].queries(rng, 3, 4)
    pages = max(cache.max_num_pages for cache, _ in nouns)
    width = max(len(table.indices) for _, table in nouns)

    def padded(x, size):
        return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])

    caches = np.concatenate([padded(cache.data, pages) for cache, _ in nouns])
    tables = [
        np.concatenate([get(table) for _, table in nouns])
        for get in (
            lambda t: t.indptr,
            lambda t: padded(t.indices, width),
            lambda t: t.last_page_len,
        )
    ]

    def attend(q, cache, table):
        o, lse = cj.decode(q, cache, table, return_lse=True)
        states = (jax.lax.all_gather(x, "x", axis=1) for x in (o, lse))
        o, lse = cj.merge_states(*states)
        return o[None], lse[None]  # the same on every device

    over_keys = (
        cj.noun(cukv.PagedKVCache, P("x")),
        cj.noun(cukv.PageTable, P("x"), P("x"), P("x"), 4),
    )
    sharded = jax.shard_map(
        attend, mesh=mesh(), in_specs=(P(), *over_keys), out_specs=(P("x"), P("x"))
    )
    cache = cj.noun(cukv.PagedKVCache, jnp.asarray(caches))
    table = cj.noun(cukv.PageTable, *in_jax(tables), 4)
    o, lse = map(np.asarray, jax.jit(sharded)(q, cache, table))
    rows, values = ([list(cache.gather(table)[side]) for cache, table in nouns] for side in (0, 1))
    k, v = (
        cukv.RaggedTensor.from_list([np.concatenate([x[d][b] for d in range(8)]) for b in range(3)])
        for x in (rows, values)
    )
    want = cukv.RaggedTensor(q, [0, 1, 2, 3]).prefill(k, v, return_lse=True)
    for device in range(8):
        assert_close(o[device], want[0], ATTENTION["float16"], scale=max_abs(v.data))
        assert_close(lse[device], want[1], LSE)
