"""FlashInfer scripts, one for each wrapper, run on FlashInfer and on cukv: only the import differs.

Each is a function of the module that a script would import, and of torch. All use kernels that
FlashInfer has for bfloat16, pages of 16 tokens and heads of 128 elements, so that it compiles few.
Decode asks for tensor cores, which is what users of grouped queries do.
"""

import warnings

import numpy as np
import pytest
from tolerances import (
    ATTENTION,
    LSE,
    LSE_OF_ROUNDED,
    MERGE,
    ROW_NORM,
    Bound,
    assert_close,
    assert_rows_close,
)

from cukv import flashinfer as ours

pytestmark = [pytest.mark.beside, pytest.mark.filterwarnings("ignore")]

PAGE_SIZE, HEAD_DIM, NUM_QO_HEADS, NUM_KV_HEADS = 16, 128, 32, 8
HEADS = NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM
# Tokens of each request; the first four are those of FlashInfer's page documentation.
LENS = [45, 8, 25, 22, 1000, 1, 333]


@pytest.fixture(scope="module")
def modules():
    """Import torch and FlashInfer; what they warn about is their own business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("flashinfer"), pytest.importorskip("torch")


def ints(torch, values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def offsets(torch, lens):
    return ints(torch, [0, *np.cumsum(lens)])


def random(torch, *shape, dtype="bfloat16"):
    return torch.randn(shape, device="cuda").to(getattr(torch, dtype))


def workspace(torch):
    return torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")


def pages(torch, lens, page_size=PAGE_SIZE):
    """Put requests in shuffled pages: indptr, indices and last_page_len of their table."""
    counts = [-(-n // page_size) for n in lens]
    indices = torch.randperm(sum(counts), device="cuda").int()
    last = ints(torch, [(n - 1) % page_size + 1 for n in lens])
    return offsets(torch, counts), indices, last


def filled(flashinfer, torch, lens, layout="NHD"):
    """Append all tokens of all requests to a cache: it and its page table."""
    indptr, indices, last = table = pages(torch, lens)
    inner = (PAGE_SIZE, NUM_KV_HEADS) if layout == "NHD" else (NUM_KV_HEADS, PAGE_SIZE)
    cache = random(torch, len(indices), 2, *inner, HEAD_DIM)
    k, v = (random(torch, sum(lens), NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
    seq_lens = flashinfer.get_seq_lens(indptr, last, PAGE_SIZE)
    where = flashinfer.get_batch_indices_positions(offsets(torch, lens), seq_lens, sum(lens))
    flashinfer.append_paged_kv_cache(k, v, *where, cache, indices, indptr, last, layout)
    return cache, table


def masks(torch, qo_lens, kv_lens):
    """Draw a mask for each request, flattened, in which every row sees a key; and its segments."""
    each = [torch.rand(q, k, device="cuda") < 0.5 for q, k in zip(qo_lens, kv_lens, strict=True)]
    for mask in each:
        mask[:, 0] = True
    sizes = [mask.numel() for mask in each]
    return torch.cat([mask.flatten() for mask in each]), offsets(torch, sizes)


# The scripts


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append(beside, layout):
    def script(flashinfer, torch):
        cache, table = filled(flashinfer, torch, LENS, layout)
        return {"bits": [cache, *table]}

    beside(script)


def test_append_to_a_latent_cache(beside):
    def script(flashinfer, torch):
        indptr, indices, last = pages(torch, LENS)
        ckv, kpe = (
            torch.zeros(len(indices), PAGE_SIZE, n, device="cuda").half() for n in (512, 64)
        )
        rows = (random(torch, sum(LENS), n, dtype="float16") for n in (512, 64))
        seq_lens = flashinfer.get_seq_lens(indptr, last, PAGE_SIZE)
        where = flashinfer.get_batch_indices_positions(offsets(torch, LENS), seq_lens, sum(LENS))
        flashinfer.append_paged_mla_kv_cache(*rows, *where, ckv, kpe, indices, indptr, last)
        return {"bits": [seq_lens, *where, ckv, kpe]}

    beside(script)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode(beside, layout):
    def script(flashinfer, torch):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(torch), layout, use_tensor_cores=True
        )
        found = []
        for lens in (LENS, LENS[:3]):
            cache, table = filled(flashinfer, torch, lens, layout)
            wrapper.plan(*table, *HEADS, PAGE_SIZE, q_data_type=torch.bfloat16)
            for scale in ({}, {"k_scale": 0.5, "v_scale": 2.0}):
                q = random(torch, len(lens), NUM_QO_HEADS, HEAD_DIM)
                found.append(wrapper.run(q, cache, return_lse=True, **scale))
        return {"attention": found}

    beside(script)


def test_decode_in_a_graph_that_is_planned_anew(beside):
    def script(flashinfer, torch):
        cache, (indptr, indices, last) = filled(flashinfer, torch, LENS)
        buffers = torch.zeros_like(indptr), torch.zeros_like(indices), torch.zeros_like(last)
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(torch), *buffers, use_tensor_cores=True
        )
        q = random(torch, len(LENS), NUM_QO_HEADS, HEAD_DIM)

        def plan(last):
            wrapper.plan(indptr, indices, last, *HEADS, PAGE_SIZE, q_data_type=torch.bfloat16)

        plan(last)
        o = wrapper.run(q, cache)  # compiled from here on
        torch.cuda.synchronize()
        graph, found = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            o = wrapper.run(q, cache)
        for lens in (last, torch.ones_like(last), last):
            plan(lens)
            graph.replay()
            found.append(o.clone())
        return {"attention": found}

    beside(script)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_prefill(beside, layout):
    def script(flashinfer, torch):
        qo_lens = [45, 3, 1, 22, 200, 1, 64]
        cache, table = filled(flashinfer, torch, LENS, layout)
        q = random(torch, sum(qo_lens), NUM_QO_HEADS, HEAD_DIM)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch), layout)
        found = []
        for causal in (True, False):
            wrapper.plan(
                offsets(torch, qo_lens),
                *table,
                *HEADS,
                PAGE_SIZE,
                causal=causal,
                sm_scale=0.1,
                q_data_type=torch.bfloat16,
            )
            found.append(wrapper.run(q, cache, return_lse=True))
        return {"attention": found}

    beside(script)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_prefill(beside, causal):
    def script(flashinfer, torch):
        qo_lens = [45, 3, 1, 22, 200, 1, 64]
        q = random(torch, sum(qo_lens), NUM_QO_HEADS, HEAD_DIM)
        k, v = (random(torch, sum(LENS), NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch), "NHD")
        wrapper.plan(
            offsets(torch, qo_lens),
            offsets(torch, LENS),
            *HEADS,
            causal=causal,
            q_data_type=torch.bfloat16,
        )
        return {"attention": [wrapper.run(q, k, v, return_lse=True)]}

    beside(script)


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_paged_prefill(beside, packed):
    def script(flashinfer, torch):
        # FlashInfer takes bits for one request only: it counts the offsets of others in elements.
        qo_lens, lens = ([65], [1000]) if packed else ([7, 3, 1, 22, 65, 1, 64], LENS)
        cache, table = filled(flashinfer, torch, lens)
        q = random(torch, sum(qo_lens), NUM_QO_HEADS, HEAD_DIM)
        flat, segments = masks(torch, qo_lens, lens)
        bits, byte_indptr = flashinfer.segment_packbits(flat, segments, bitorder="little")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch), "NHD")
        wrapper.plan(
            offsets(torch, qo_lens),
            *table,
            *HEADS,
            PAGE_SIZE,
            **({"packed_custom_mask": bits} if packed else {"custom_mask": flat}),
            q_data_type=torch.bfloat16,
        )
        attention = [wrapper.run(q, cache, return_lse=True)]
        return {"attention": attention, "bits": [bits[: int(byte_indptr[-1])], byte_indptr]}

    beside(script)


def test_masks_of_ragged_prefill(beside):
    def script(flashinfer, torch):
        qo_lens = [7, 3, 1, 22, 65, 1, 64]
        q = random(torch, sum(qo_lens), NUM_QO_HEADS, HEAD_DIM)
        k, v = (random(torch, sum(LENS), NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(torch), "NHD")
        wrapper.begin_forward(
            offsets(torch, qo_lens),
            offsets(torch, LENS),
            *HEADS,
            custom_mask=masks(torch, qo_lens, LENS)[0],
            q_data_type=torch.bfloat16,
        )
        return {"attention": [wrapper.forward_return_lse(q, k, v)]}

    beside(script)


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_bits(beside, bitorder):
    def script(flashinfer, torch):
        x = torch.rand(10_001, device="cuda") < 0.5
        packed, indptr = flashinfer.segment_packbits(
            x, ints(torch, [0, 3, 3, 4096, 10_001]), bitorder
        )
        return {"bits": [flashinfer.packbits(x, bitorder), packed[: int(indptr[-1])], indptr]}

    beside(script)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_mla(beside, num_heads, short):
    def script(flashinfer, torch):
        page_size = 64
        indptr, indices, _ = pages(torch, LENS, page_size)
        data = random(torch, len(indices), page_size, 576)
        lens = ints(torch, [max(1, n - 70) for n in LENS] if short else LENS)
        q = (random(torch, len(LENS), num_heads, n) for n in (512, 64))
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(torch))
        wrapper.plan(
            torch.arange(len(LENS) + 1, device="cuda").int(),
            indptr,
            indices,
            lens,
            num_heads,
            512,
            64,
            page_size,
            False,
            192**-0.5,
            torch.bfloat16,
            torch.bfloat16,
        )
        return {"attention": [wrapper.run(*q, *data.split([512, 64], -1), return_lse=True)]}

    beside(script)


@pytest.mark.parametrize("num_levels", [2, 3])
def test_cascade(beside, num_levels):
    def script(flashinfer, torch):
        # A prefix of all, with three levels one of each half of the requests, and own tokens.
        qo_indptr = [
            ints(torch, [0, 8]),
            ints(torch, [0, 4, 8]),
            torch.arange(9, device="cuda").int(),
        ]
        lens = [[512], [64, 160], [45, 8, 25, 22, 100, 1, 33, 16]]
        if num_levels == 2:
            del qo_indptr[1], lens[1]
        tables = [pages(torch, level) for level in lens]
        first = 0
        for _, indices, _ in tables:  # levels own pages of one cache
            indices += first
            first += len(indices)
        cache = random(torch, first, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(num_levels, workspace(torch), "NHD")
        columns = map(list, zip(*tables, strict=True))
        wrapper.plan(qo_indptr, *columns, *HEADS, PAGE_SIZE, q_data_type=torch.bfloat16)
        q = random(torch, 8, NUM_QO_HEADS, HEAD_DIM)
        return {"attention": [wrapper.run(q, cache)]}

    beside(script)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merging(beside, dtype):
    def script(flashinfer, torch):
        o = random(torch, 300, 4, NUM_QO_HEADS, HEAD_DIM, dtype=dtype)
        lse = torch.randn(300, 4, NUM_QO_HEADS, device="cuda") * 5
        pairs = [x[:, i].contiguous() for i in (0, 1) for x in (o, lse)]
        found = [flashinfer.merge_states(o, lse), flashinfer.merge_state(*pairs)]
        flashinfer.merge_state_in_place(*pairs)
        chosen = torch.rand(300, device="cuda") < 0.5
        pairs_of_some = [x[:, i].contiguous() for i in (2, 3) for x in (o, lse)]
        flashinfer.merge_state_in_place(*pairs_of_some, mask=chosen)
        return {"merged": [*found, pairs[:2], pairs_of_some[:2]]}

    beside(script)


# Comparing


@pytest.fixture
def beside(modules):
    """Give a function that runs a script on both modules and compares what they found."""
    theirs, torch = modules

    def run(script):
        found = []
        for module in (theirs, ours):
            torch.manual_seed(8)
            found.append(script(module, torch))
            torch.cuda.synchronize()
        want, got = found
        for what, values in want.items():
            for here, there in zip(got[what], values, strict=True):
                COMPARE[what](here, there)

    return run


def assert_same(got, want):
    assert got.dtype == want.dtype
    assert got.equal(want)


def assert_states_close(got, want, bound, row_bound=None, their_lse_bound=LSE):
    """Compare o, or (o, lse): each side is as near to the definition as a kernel must be."""
    lse_bound = Bound(*map(sum, zip(LSE, their_lse_bound, strict=True)))
    got, want = (x if isinstance(x, (tuple, list)) else [x] for x in (got, want))
    (o, *lse), (their_o, *their_lse) = ([x.float().cpu().numpy() for x in xs] for xs in (got, want))
    assert got[0].dtype == want[0].dtype
    assert_close(o, their_o, bound, scale=2 * 2 * 5.5)  # two sides, v_scale, and normal values
    if row_bound is not None:
        rows = (x.reshape(-1, x.shape[-1]) for x in (o, their_o))
        assert_rows_close(*rows, 2 * row_bound)
    for here, there in zip(lse, their_lse, strict=True):
        assert_close(here, there, lse_bound)


def assert_attention_close(got, want):
    """FlashInfer's portable kernels add up weights that are rounded for the product."""
    rounded = LSE_OF_ROUNDED["bfloat16"]
    assert_states_close(got, want, ATTENTION["bfloat16"], ROW_NORM["bfloat16"], rounded)


def assert_merged_close(got, want):
    assert_states_close(
        got, want, MERGE["bfloat16" if "bfloat16" in str(got[0].dtype) else "float16"]
    )


COMPARE = {
    "bits": assert_same,
    "attention": assert_attention_close,
    "merged": assert_merged_close,
}
