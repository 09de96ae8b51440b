"""Every method that launches: captured on a warm pool, and watched by compute-sanitizer.

``CALLS`` names them all. ``main`` and ``attend`` are what the sanitizer watches, in a process of
its own where each array is an allocation of its own, so that a read or write beside one is seen.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import MLACase, PagedCase, captured, indptr_of, on, random_rows
from fake_gpus import FakeGpus, fake
from tolerances import to_numpy

import cukv
from cukv import _kernels, _latent_attention, _tiles
from cukv._specialisations import runs_on

TESTS = Path(__file__).parent
BF16 = np.dtype(ml_dtypes.bfloat16)


class Arguments:
    """Arrays for every call, in one home; the same in every process."""

    def __init__(self, xp, head_dim=64, index_dtype="int32"):
        self.xp = xp
        rng = np.random.default_rng(7)
        case = PagedCase((45, 0, 8, 25), 16, 2, head_dim, index_dtype=index_dtype)
        fp8 = PagedCase((45, 0, 8, 25), 16, 2, head_dim, dtype="float8_e4m3fn", layout="HND")
        mla = MLACase((45, 0, 8, 25), 16, 64, 16, "bfloat16", index_dtype=index_dtype)
        self.cache, self.table = case.nouns(case.arrays(rng), xp)
        self.fp8_cache, self.fp8_table = fp8.nouns(fp8.arrays(rng), xp)
        self.mla, self.mla_table = mla.nouns(mla.arrays(rng), xp)
        shape = (30, 2, head_dim)
        self.k, self.v = (on(xp, random_rows(rng, shape, "float16")) for _ in range(2))
        self.ckv, self.kpe = (on(xp, random_rows(rng, (30, n), "bfloat16")) for n in (64, 16))
        self.indptr = on(xp, indptr_of((20, 0, 1, 5), index_dtype))
        rows = case.rows("positions", rng).arguments
        self.batch_indices, self.positions = (
            on(xp, rows[n][:30].astype(index_dtype)) for n in ("batch_indices", "positions")
        )
        self.scale = on(xp, np.array([0.5], np.float32))
        self.pages = on(xp, np.array([3, 0, 2, 7, 5, 6, 1, 4], index_dtype))
        self.swapped = on(xp, np.array([0, 3, 2, 7, 5, 6, 4, 1], index_dtype))
        self.lens = on(xp, np.array([45, 0, 8, 25], index_dtype))
        self.dense = on(xp, rng.integers(0, 9, (4, 5)).astype(index_dtype))
        self.o = on(xp, random_rows(rng, (9, 3, 4, head_dim), "bfloat16"))
        self.lse = on(xp, random_rows(rng, (9, 3, 4), "float32"))
        self.bits = on(xp, rng.random(20_003) < 0.5)
        self.segments = on(xp, np.array([0, 7, 7, 9_000, 20_003], index_dtype))
        indptrs = (on(xp, np.array(x, index_dtype)) for x in ([0, 3, 10], [0, 20, 40]))
        self.mask = cukv.RaggedMask(self.bits[:200], *indptrs)
        self.packed = cukv.PackedMask(on(xp, np.zeros(90, np.uint8)), *(
            on(xp, np.array(x, index_dtype)) for x in ([0, 3, 10], [0, 20, 40])))  # fmt: skip
        kv_dim = head_dim // 8 * 8  # attention takes whole eights
        kv = PagedCase((45, 0, 8, 700), 16, 2, kv_dim, dtype="bfloat16", index_dtype=index_dtype)
        self.kv, self.kv_table = kv.nouns(kv.arrays(rng), xp)
        self.num_tokens = kv.nnz
        self.q = on(xp, kv.queries(rng, 9, 8))
        latent = MLACase((45, 0, 8, 700), 16, 512, 64, "bfloat16", index_dtype=index_dtype)
        self.latent, self.latent_table = latent.nouns(latent.arrays(rng), xp)
        self.latent_q = [on(xp, random_rows(rng, (9, 40, n), "bfloat16")) for n in (512, 64)]
        self.qo_indptr = on(xp, np.array([0, 3, 4, 4, 9], index_dtype))
        kv_indptr = on(xp, np.array([0, 45, 45, 53, 753], index_dtype))
        seen = on(xp, rng.random(3 * 45 + 5 * 700) < 0.5)
        self.tree = cukv.RaggedMask(seen, self.qo_indptr, kv_indptr)
        fp8 = MLACase((45, 0, 8, 700), 16, 512, 64, "float8_e4m3fn", "pair", index_dtype)
        self.fp8_latent, _ = fp8.nouns(fp8.arrays(rng), xp)

    @property
    def rows(self):
        """Queries of prefill."""
        return cukv.RaggedTensor(self.q, self.qo_indptr)

    @functools.cached_property
    def decode_plan(self):
        """Plan that captured calls of decode are given."""
        return self.kv.plan(self.q[:4], self.kv_table)

    def latent_call(self, num_rows, num_heads):
        """Give queries and options of attention over latents, of a row or of rows per request."""
        q = [x[:num_rows, :num_heads] for x in self.latent_q]
        return q, {} if num_rows == 4 else {"qo_indptr": self.qo_indptr, "causal": True}

    @functools.cached_property
    def latent_plans(self):
        """Plans that captured calls of latent attention are given, by rows and heads."""
        plans = {}
        for shape in ((4, 8), (9, 40)):
            q, options = self.latent_call(*shape)
            plans[shape] = self.latent.plan(q[0], self.latent_table, **options)
        return plans

    @functools.cached_property
    def fp8_latent_plan(self):
        """Plan that captured calls of attention over latents of fp8 are given."""
        return self.fp8_latent.plan(self.latent_call(4, 8)[0][0], self.latent_table)

    def attend_fp8_latent(self):
        """Attend over latents of fp8."""
        q, _ = self.latent_call(4, 8)
        return self.fp8_latent.decode(
            *q, self.latent_table, sm_scale=0.07, plan=self.fp8_latent_plan, return_lse=True
        )

    def attend_latent(self, *shape):
        """Attend over latents."""
        q, options = self.latent_call(*shape)
        return self.latent.decode(
            *q, self.latent_table, sm_scale=0.07, plan=self.latent_plans[shape], return_lse=True,
            **options,
        )  # fmt: skip

    @functools.cached_property
    def prefill_plan(self):
        """Plan that captured calls of prefill are given."""
        return self.kv.plan(self.rows, self.kv_table, causal=True)

    @functools.cached_property
    def mask_plan(self):
        """Plan that captured calls of prefill under a mask are given."""
        return self.kv.plan(self.rows, self.kv_table, custom_mask=self.tree)

    @functools.cached_property
    def levels(self):
        """Levels of the rows of prefill: two pages for all, before those of each request."""
        table, dtype = self.kv_table, self.qo_indptr.dtype
        ends, last, order = (
            on(self.xp, np.array(x, dtype)) for x in ([0, 2], [16], np.arange(9)[::-1])
        )
        root = cukv.PageTable(ends, table.indices[:2], last, 16)
        return cukv.CascadeLevels((self.qo_indptr[::4], self.qo_indptr), (root, table), order)

    @functools.cached_property
    def cascade_plans(self):
        """Plans that captured calls over levels are given, by window."""
        return {
            window: self.levels.plan(self.q, self.kv, causal=True, window_left=window)
            for window in (-1, 30)
        }

    def attend_levels(self, window_left):
        """Attend over levels."""
        return self.levels.attend(
            self.q, self.kv, causal=True, window_left=window_left,
            plan=self.cascade_plans[window_left], return_lse=True,
        )  # fmt: skip

    @functools.cached_property
    def packed_kv(self):
        """Keys and values of the tokens of every request."""
        return self.kv.gather(self.kv_table, nnz=self.num_tokens)


def planned(make, attend):
    """Give a new plan, which must live as long as a graph that its call is captured in."""
    plan = make()
    return plan, attend(plan)


CALLS = {
    "append by indptr": lambda a: a.cache.append(a.k, a.v, a.table, indptr=a.indptr),
    "append by positions": lambda a: a.cache.append(
        a.k, a.v, a.table, batch_indices=a.batch_indices, positions=a.positions
    ),
    "append at the end": lambda a: a.cache.append(a.k, a.v, a.table),
    "append and convert": lambda a: a.fp8_cache.append(
        a.k, a.v, a.fp8_table, indptr=a.indptr, k_scale=a.scale, v_scale=2.0
    ),
    "gather": lambda a: a.cache.gather(a.table),
    "gather and convert": lambda a: a.fp8_cache.gather(
        a.fp8_table, nnz=80, dtype="float16", k_scale=a.scale
    ),
    "copy_pages": lambda a: a.cache.copy_pages(a.pages, a.swapped),
    "MLA append": lambda a: a.mla.append(a.ckv, a.kpe, a.mla_table, indptr=a.indptr),
    "MLA gather": lambda a: a.mla.gather(a.mla_table, nnz=80),
    "MLA copy_pages": lambda a: a.mla.copy_pages(a.pages, a.swapped),
    "seq_lens": lambda a: a.table.seq_lens,
    "token_indptr": lambda a: a.table.token_indptr,
    "block_table": lambda a: a.table.block_table(5),
    "slot_mapping": lambda a: a.table.slot_mapping(a.batch_indices, a.positions),
    "from_seq_lens": lambda a: cukv.PageTable.from_seq_lens(a.lens, 16, a.pages),
    "from_seq_lens of a capacity": lambda a: cukv.PageTable.from_seq_lens(a.lens, 16, num_pages=9),
    "from_block_table": lambda a: cukv.PageTable.from_block_table(a.dense, a.lens, 16),
    "batch_indices_positions": lambda a: cukv.batch_indices_positions(a.indptr, a.lens, 30),
    "merge_states": lambda a: cukv.merge_states(a.o, a.lse),
    "merge_state": lambda a: cukv.merge_state(a.o[:, 0], a.lse[:, 0], a.o[:, 1], a.lse[:, 1]),
    "packbits": lambda a: cukv.packbits(a.bits),
    "segment_packbits": lambda a: cukv.segment_packbits(a.bits, a.segments),
    "RaggedMask.pack": lambda a: a.mask.pack(),
    "RaggedMask.indptr": lambda a: a.mask.indptr,
    "PackedMask.indptr": lambda a: a.packed.indptr,
    "RaggedTensor.lens": lambda a: cukv.RaggedTensor(a.k, a.indptr).lens,
    "Plan.update": lambda a: a.decode_plan.update(),
    "decode": lambda a: a.kv.decode(a.q[:4], a.kv_table, plan=a.decode_plan, return_lse=True),
    "MLA decode": lambda a: a.attend_latent(4, 8),
    "MLA decode of fp8": lambda a: a.attend_fp8_latent(),
    "MLA decode of many rows": lambda a: a.attend_latent(9, 40),
    "prefill": lambda a: a.kv.prefill(
        a.rows, a.kv_table, causal=True, plan=a.prefill_plan, return_lse=True
    ),
    "prefill under a mask": lambda a: a.kv.prefill(
        a.rows, a.kv_table, custom_mask=a.tree, plan=a.mask_plan, return_lse=True
    ),
    "Plan.update under a mask": lambda a: a.mask_plan.update(),
    "CascadeLevels.attend": lambda a: a.attend_levels(-1),
    "CascadeLevels.attend in a window": lambda a: a.attend_levels(30),
    "Plan.update of levels": lambda a: a.cascade_plans[-1].update(),
    "PagedKVCache.plan": lambda a: planned(
        lambda: a.kv.plan(a.q[:4], a.kv_table),
        lambda plan: a.kv.decode(a.q[:4], a.kv_table, plan=plan),
    ),
    "MLAPagedCache.plan": lambda a: planned(
        lambda: a.latent.plan(a.latent_q[0][:4], a.latent_table),
        lambda plan: a.latent.decode(
            *(x[:4] for x in a.latent_q), a.latent_table, sm_scale=0.07, plan=plan
        ),
    ),
    "RaggedTensor.plan": lambda a: planned(
        lambda: a.rows.plan(a.packed_kv[0], causal=True),
        lambda plan: a.rows.prefill(*a.packed_kv, causal=True, plan=plan),
    ),
    "CascadeLevels.plan": lambda a: planned(
        lambda: a.levels.plan(a.q, a.kv, causal=True),
        lambda plan: a.levels.attend(a.q, a.kv, causal=True, plan=plan),
    ),
}


def everything(result):
    """Give the arrays of a result: of arrays, nouns, plans, which show none, and tuples of them."""
    if isinstance(result, (tuple, list)):
        return [array for part in result for array in everything(part)]
    if isinstance(result, cukv.PageTable):
        return [result.indptr, result.last_page_len, result.indices]
    if isinstance(result, cukv.RaggedTensor):
        return [result.rows, result.indptr]
    if isinstance(result, cukv.PackedMask):
        return [result.data, result.indptr]
    return [] if result is None or isinstance(result, cukv.Plan) else [result]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_works_on_numpy(name):
    arguments = Arguments(np)
    assert all(isinstance(x, np.ndarray) for x in everything(CALLS[name](arguments)))


def stored(a):
    """Give what calls write in place."""
    return [to_numpy(c.data).view(np.uint8) for c in (a.cache, a.fp8_cache, a.mla)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_every_call_can_be_captured_where_nothing_is_left_to_allocate(name):
    a, eager = Arguments(cp), Arguments(cp)
    pool = cp.get_default_memory_pool()
    grown = []

    def call():
        held = pool.total_bytes()
        result = CALLS[name](a)
        grown.append(pool.total_bytes() - held)
        return result

    def as_before():
        """Give what the calls so far have written its first contents."""
        fresh = Arguments(cp)
        for mine, first in ((a.cache, fresh.cache), (a.fp8_cache, fresh.fp8_cache),
                            (a.mla, fresh.mla)):  # fmt: skip
            mine.data.view(np.uint8)[...] = first.data.view(np.uint8)

    with captured(call, as_before) as (stream, graph, result):
        assert grown[-1] == 0
        graph.launch(stream)
        wanted = CALLS[name](eager)
        stream.synchronize()
    for got, want in zip(stored(a), stored(eager), strict=True):
        np.testing.assert_array_equal(got, want)
    written = int(to_numpy(a.table.token_indptr)[-1])  # gathered rows behind it are padding
    for got, want in zip(everything(result), everything(wanted), strict=True):
        rows = written if name.endswith(("gather", "convert")) and got.ndim == 3 else None
        got, want = (np.ascontiguousarray(to_numpy(x)[:rows]) for x in (got, want))
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def kernels_of(device):
    """Name every kernel that a device can run."""
    arch = _kernels.arch_of(device)
    return {name for name in _kernels.specialisations() if runs_on(name, arch)}


@pytest.mark.parametrize("compute_capability", ["80", "90", "100"])
def test_the_calls_launch_every_kernel_of_a_gpu_that_is_not_there(compute_capability, monkeypatch):
    a = Arguments(np)
    assert a.levels and a.packed_kv  # made here, where their arrays have values
    for name in set(vars(a)) - {"xp", "num_tokens"}:
        setattr(a, name, fake(0, getattr(a, name)))
    with FakeGpus(monkeypatch, compute_capability) as gpus:
        for call in CALLS.values():
            with contextlib.suppress(cp.cuda.runtime.CUDARuntimeError):  # CuPy's own work
                call(a)
        assert set(gpus.names()) == kernels_of(0)


@pytest.mark.gpu
def test_the_calls_launch_every_kernel():
    arguments = Arguments(cp)
    for call in CALLS.values():
        call(arguments)
    assert {key[0] for key in _kernels._loaded} >= kernels_of(cp.cuda.Device().id)


# What the sanitizer watches


def misaligned(array):
    """Copy rows to one element past the start of an allocation."""
    host = to_numpy(array)
    flat = on(cp, np.concatenate([host.reshape(-1)[:1], host.reshape(-1)]))
    return flat[1:].reshape(host.shape)


def garbage(rng, n, dtype, kind):
    info = np.iinfo(dtype)
    if kind == "any bits":
        values = rng.integers(info.min, info.max, n, dtype, endpoint=True)
    elif kind == "near":
        values = rng.integers(-5, 40, n).astype(dtype)
    else:
        values = rng.choice(np.array([info.min, -1, 0, 1, info.max - 1, info.max], dtype), n)
    return cp.asarray(values)


def call_with_garbage(a, rng, dtype, kind):
    def index(n):
        return garbage(rng, n, dtype, kind)

    table = cukv.PageTable(index(22), index(17), index(21), 16)
    where = {"batch_indices": index(30), "positions": index(30)}
    a.cache.append(a.k, a.v, table, indptr=index(22))
    a.cache.append(a.k, a.v, table, **where)
    a.cache.append(a.k, a.v, table)
    a.cache.gather(table)
    a.cache.gather(table, nnz=7)
    a.cache.copy_pages(index(5), index(5))
    a.mla.append(a.ckv, a.kpe, table, **where)
    results = [table.seq_lens, table.token_indptr, table.block_table(3)]
    results += [table.slot_mapping(index(40), index(40)), table.slot_mapping(**where)]
    results += cukv.batch_indices_positions(index(22), index(21), 30)
    cukv.PageTable.from_seq_lens(index(21), 16, index(9)).block_table(2)
    cukv.PageTable.from_block_table(index(63).reshape(21, 3), index(21), 16)
    cukv.segment_packbits(a.bits, index(22))
    mask = cukv.RaggedMask(a.bits, index(22), index(22))
    mask.pack()
    cukv.PackedMask(mask.data.view(np.uint8), mask.qo_indptr, mask.kv_indptr).indptr  # noqa: B018
    return results


def main():
    """Call everything, with every array in an allocation of its own."""
    cp.cuda.set_allocator(None)
    for head_dim, index_dtype in ((64, "int32"), (23, "int64")):
        a = Arguments(cp, head_dim, index_dtype)
        for call in CALLS.values():
            call(a)
        for name in ("k", "v", "ckv", "kpe", "o", "lse", "q"):
            setattr(a, name, misaligned(getattr(a, name)))
        a.bits = misaligned(a.bits)
        for call in CALLS.values():
            call(a)
        cp.cuda.Device().synchronize()
    for heads, dims in ((1, (1, 8)), (3, (46, 99)), (1, (576, 512)), (128, (80, 80))):
        case = PagedCase((9, 0, 4), 4, heads, *dims, layout="HND", form="pair")
        rng = np.random.default_rng(heads)
        cache, table = case.nouns(case.arrays(rng), cp)
        rows = [on(cp, random_rows(rng, (13, heads, dim), "float16")) for dim in dims]
        cache.append(*rows, table, indptr=[0, 9, 9, 13])
        cache.append(*(x[::-1] for x in rows), table, indptr=[0, 9, 9, 13])
        cache.gather(table, nnz=13)
        cache.copy_pages([0, 1], [1, 0])
    a, rng = Arguments(cp), np.random.default_rng(3)
    for dtype in (np.int32, np.int64):
        for kind in ("any bits", "near", "extremes"):
            for _ in range(3):
                call_with_garbage(a, rng, dtype, kind)
    cp.cuda.Device().synchronize()
    print("called everything")


# Each dtype and head dim of the attention kernel, with 8, 16 and 32 packed rows.
ATTENDED = [
    ((64, 64), "bfloat16", 4),
    ((128, 128), "float16", 12),
    ((64, 64), "float16", 24),
    ((192, 128), "bfloat16", 8),
    ((256, 256), "bfloat16", 5),
    ((128, 128), "float8_e4m3fn", 8),
    ((40, 40), "float8_e5m2", 3),
]


def attend_with_garbage(cache, q, rng, dtype, kind):
    """Attend with tables of garbage, also under plans made before and after it came."""
    lens = (45, 0, 8, 2000, 1)
    pages = rng.integers(0, cache.max_num_pages, sum(-(-n // 16) for n in lens))

    def index(n):
        return garbage(rng, n, dtype, kind)

    for batch_invariant in (False, True):
        right = cukv.PageTable.from_seq_lens(lens, 16, on(cp, pages.astype(dtype)))
        parts = right.indptr, right.indices, right.last_page_len
        table = cukv.PageTable(*(x.astype(dtype) for x in parts), 16)  # copies, to be overwritten
        rows = cukv.RaggedTensor(q, on(cp, indptr_of((3, 0, 1, 0, 1), dtype)))
        levels = cukv.CascadeLevels((rows.indptr, rows.indptr), (table, table))
        plans = [cache.plan(x, table, batch_invariant=batch_invariant) for x in (q, rows)]
        plans.append(levels.plan(q, cache, window_left=3))
        for _ in range(2):
            for x in (table.indptr, table.indices, table.last_page_len, rows.indptr):
                x[...] = index(len(x))
            for _ in range(2):  # not told, then told
                cache.decode(q, table, plan=plans[0], return_lse=True)
                cache.prefill(rows, table, plan=plans[1], return_lse=True)
                levels.attend(q, cache, window_left=3, plan=plans[2])
                for plan in plans:
                    plan.update()
        table.indices[...] = on(cp, pages.astype(dtype))
        for plan in plans:
            plan.update()
        cache.decode(q, table, plan=plans[0], window_left=-1)
        cache.prefill(rows, table, causal=True, window_left=3)


def attend_under_masks(cache, table, num_qo_heads, rng):
    """Attend from few rows and from many under masks of both kinds, too short, and of garbage."""
    kv_lens = np.array([45, 0, 8, 900, 1])
    head_dim, dtype = cache.head_dim, "float16" if cache.dtype == np.float16 else "bfloat16"
    packed = cache.gather(table, dtype=dtype)
    for qo_lens in ((1, 2, 0, 3, 1), (90, 0, 7, 130, 3)):
        q = random_rows(rng, (sum(qo_lens), num_qo_heads, head_dim), dtype)
        rows = cukv.RaggedTensor(on(cp, q), indptr_of(qo_lens).tolist())
        size = int((np.array(qo_lens) * kv_lens).sum())
        for make, data in (
            (cukv.RaggedMask, rng.random(size - 1) < 0.5),
            (cukv.PackedMask, rng.integers(0, 256, size // 8, np.uint8)),
        ):
            indptrs = [on(cp, indptr_of(lens)) for lens in (qo_lens, kv_lens)]
            own = [on(cp, indptr_of([9] * 5))] if make is cukv.PackedMask else []
            mask = make(on(cp, data), *indptrs, *own)
            plan = cache.plan(rows, table, custom_mask=mask, window_left=300)
            for kind in ("as it is", "any bits", "near", "extremes"):
                for x in (*indptrs, *own) if kind != "as it is" else ():
                    x[...] = garbage(rng, len(x), x.dtype, kind)
                plan.update()
                cache.prefill(rows, table, custom_mask=mask, plan=plan, window_left=300)
            rows.prefill(*packed, custom_mask=mask)


def attend(first):
    """Attend in every way, with every array in an allocation of its own, to every third cache."""
    cp.cuda.set_allocator(None)
    for i in range(first, len(ATTENDED), 3):
        dims, dtype, group_size = ATTENDED[i]
        rng = np.random.default_rng(i)
        layout, index_dtype = (("NHD", "int32"), ("HND", "int64"))[i % 2]
        case = PagedCase((45, 0, 8, 900, 1), 16, 2, *dims, dtype=dtype, layout=layout, form="pair",
                         index_dtype=index_dtype)  # fmt: skip
        arrays = case.arrays(rng)
        last = case.max_num_pages - 1  # full of one request's tokens, at the end of the storage
        indices = np.append(arrays.indices[: arrays.indptr[-1] - 1], last).astype(
            arrays.indices.dtype
        )
        last_page_len = np.array([*arrays.last_page_len[:-1], 16], arrays.last_page_len.dtype)
        arrays = arrays._replace(indices=indices, last_page_len=last_page_len)
        cache, table = case.nouns(arrays, cp)
        q = on(cp, case.queries(rng, 5, 2 * group_size))
        rows = cukv.RaggedTensor(q, [0, 1, 1, 2, 5, 5])
        sinks = on(cp, random_rows(rng, (2 * group_size,), "float32"))
        cache.decode(q, table, return_lse=True)
        cache.decode(q, table, window_left=20, sinks=sinks, logits_soft_cap=3.0)
        cache.prefill(rows, table, causal=True, return_lse=True)
        off = cukv.PagedKVCache(tuple(misaligned(x) for x in cache.data), cache.layout)
        out = misaligned(on(cp, np.zeros((5, 2 * group_size, dims[1]), np.float16)))
        off.decode(misaligned(q), table, out=out)
        cache.decode(q, table, plan=cache.plan(q, table, batch_invariant=True), return_lse=True)
        attend_under_masks(cache, table, 2 * group_size, rng)
        many = case.queries(rng, 230, 2 * group_size)
        rows = cukv.RaggedTensor(on(cp, many), [0, 90, 90, 97, 227, 230])
        cache.prefill(rows, table, causal=True)
        rows.prefill(*cache.gather(table, dtype=rows.dtype), causal=True)
        if i < 2:
            for kind in ("any bits", "near", "extremes"):
                for index_type in (np.int32, np.int64):
                    attend_with_garbage(cache, q, rng, index_type, kind)
        cp.cuda.Device().synchronize()
    print("called everything")


# Few and many heads, pages that tensor maps take and others, fp8.
LATENTS = [
    (16, 17, "bfloat16"),
    (128, 16, "float16"),
    (128, 17, "bfloat16"),
    (5, 64, "float8_e4m3fn"),
    (128, 64, "float8_e4m3fn"),
    (40, 17, "float8_e4m3fn"),
]


def attend_latents_with_garbage(cache, q, rng, dtype, kind):
    """Attend over latents with a table of garbage, under a plan that was not told and then told."""
    lens = (45, 0, 8, 2000, 1)
    pages = rng.integers(0, cache.max_num_pages, sum(-(-n // cache.page_size) for n in lens))
    right = cukv.PageTable.from_seq_lens(lens, cache.page_size, on(cp, pages.astype(dtype)))
    parts = right.indptr, right.indices, right.last_page_len
    table = cukv.PageTable(*(x.astype(dtype) for x in parts), cache.page_size)
    options = {"qo_indptr": on(cp, indptr_of((3, 0, 1, 0, 1), dtype)), "causal": True}
    plan = cache.plan(q[0], table, **options)
    for _ in range(2):
        for x in (table.indptr, table.indices, table.last_page_len, options["qo_indptr"]):
            x[...] = garbage(rng, len(x), dtype, kind)
        for _ in range(2):
            cache.decode(*q, table, sm_scale=0.1, plan=plan, return_lse=True, **options)
            plan.update()


def attend_latents():
    """Attend over latents in every way, with every array in an allocation of its own."""
    cp.cuda.set_allocator(None)
    _latent_attention._FP8_STEPS["mla_decode_sm90"] = 0.0, 0  # however few keys
    for heads, page_size, dtype in LATENTS:
        rng = np.random.default_rng(heads)
        case = MLACase((45, 0, 8, 900, 1), page_size, dtype=dtype, form="pair")
        cache, table = case.nouns(case.arrays(rng), cp)
        kind = "bfloat16" if dtype.startswith("float8") else dtype
        q = [on(cp, random_rows(rng, (5, heads, n), kind)) for n in (512, 64)]
        cache.decode(*q, table, sm_scale=0.1, return_lse=True)
        rows = {"qo_indptr": [0, 1, 1, 2, 5, 5], "causal": True}
        cache.decode(*q, table, sm_scale=0.1, return_lse=True, **rows)
        off = cukv.MLAPagedCache(tuple(misaligned(x) for x in cache.data))
        out = misaligned(on(cp, np.zeros((5, heads, 512), np.float16)))
        off.decode(*map(misaligned, q), table, sm_scale=0.1, out=out)
        for kind in ("any bits", "near", "extremes"):
            attend_latents_with_garbage(cache, q, rng, np.int32, kind)
        cp.cuda.Device().synchronize()
    print("called everything")


def attend_portably():
    """Attend in every way without Hopper's prefill, whose barriers racecheck does not follow.

    From its reports it seems to take a lane's arrival behind __syncwarp for that lane's alone, and
    what mbarrier.test_wait has let through for unordered.
    """
    _tiles._on_hopper = lambda tile, *rest: tile
    for first in range(3):
        attend(first)


ATTEND = ["attend(0)", "attend(1)", "attend(2)"]  # side by side where pytest has processes


def watch(call, tool, *options, timeout):
    """Make a call of this file under a tool of compute-sanitizer and give what it said."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    assert Path(found).exists(), "compute-sanitizer, of the CUDA toolkit, is needed and not in PATH"
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    run = subprocess.run(
        [found, "--tool", tool, "--error-exitcode", "9", *options,
         sys.executable, "-c", f"import test_sanitizer; test_sanitizer.{call}"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )  # fmt: skip
    said = run.stdout + run.stderr
    assert run.returncode == 0, f"{said[:2000]}\n[...]\n{said[-4000:]}"
    assert "called everything" in said
    return said


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["main()", *ATTEND, "attend_latents()"])
def test_no_kernel_touches_memory_beside_its_arrays(call):
    said = watch(call, "memcheck", "--report-api-errors", "no", timeout=120)
    assert "ERROR SUMMARY: 0 errors" in said


# Not of attend_latents, for the same reasons as Hopper's prefill.
@pytest.mark.gpu
def test_attention_has_no_races_in_shared_memory():
    said = watch("attend_portably()", "racecheck", timeout=240)
    assert "0 hazards displayed" in said
