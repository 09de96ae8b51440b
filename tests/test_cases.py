"""Cases must poison what nobody may read, and nothing else."""

import numpy as np
import pytest
from cases import MLACase, PagedCase
from tolerances import assert_same_bits, bits

# One token, one full page, one over, FlashInfer's documented batch, an empty request; both layouts,
# both forms, every kind of NaN.
CASES = [
    PagedCase((1,)),
    PagedCase((16, 17), layout="HND"),
    PagedCase((45, 8, 25, 22), dtype="bfloat16", form="pair"),
    PagedCase((0, 5, 0), page_size=1, layout="HND", form="pair", index_dtype="int64"),
    PagedCase((7, 3), page_size=4, dtype="float8_e4m3fn"),
    PagedCase((7, 3), page_size=4, dtype="float8_e5m2", head_dim=24, head_dim_vo=8, form="pair"),
    PagedCase((9,), dtype="float32", num_kv_heads=3),
    PagedCase(()),
    MLACase((45, 0, 17)),
    MLACase((3, 1), page_size=1, dtype="bfloat16", form="pair", index_dtype="int64"),
]


def stores(case, arrays):
    """Give K and V, or ckv and kpe, as [pages, page_size, heads, dim] views."""
    data = arrays.data
    if isinstance(case, MLACase):
        split = case.head_dim_ckv
        pair = data if case.form == "pair" else (data[..., :split], data[..., split:])
        return [store[:, :, None] for store in pair]
    pair = data if case.form == "pair" else (data[:, 0], data[:, 1])
    return [store if case.layout == "NHD" else store.swapaxes(1, 2) for store in pair]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_owned_slots_hold_the_rows_and_every_other_slot_is_nan(case, rng):
    arrays = case.arrays(rng)
    for store, rows in zip(stores(case, arrays), (arrays.k, arrays.v), strict=True):
        free = np.ones(store.shape[:2], bool)
        row = 0
        for request, kv_len in enumerate(case.kv_lens):
            pages = arrays.indices[arrays.indptr[request] : arrays.indptr[request + 1]]
            for position in range(kv_len):
                page, entry = pages[position // case.page_size], position % case.page_size
                assert_same_bits(store[page, entry], rows[row])
                assert free[page, entry]
                free[page, entry] = False
                row += 1
        assert row == len(rows)
        assert np.isfinite(rows.astype(np.float32)).all()
        assert np.isnan(store[free].astype(np.float32)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_page_table_has_gaps_and_poisoned_padding(case, rng):
    arrays = case.arrays(rng)
    owned, padding = np.split(arrays.indices, [arrays.indptr[-1]])
    assert len(set(owned)) == len(owned) < case.max_num_pages
    assert len(padding) > 0
    assert not ((padding >= 0) & (padding < case.max_num_pages)).any()
    assert {a.dtype.name for a in (arrays.indptr, arrays.indices, arrays.last_page_len)} == {
        case.index_dtype
    }


def test_fp8_poison_is_the_nan_that_both_formats_share(rng):
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        data = PagedCase((1,), dtype=dtype).arrays(rng).data
        assert (bits(data)[np.isnan(data.astype(np.float32))] == 0x7F).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nouns_of_a_case_are_valid_and_share_its_memory(case, rng):
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays)
    table.validate(cache.max_num_pages)
    assert table.seq_lens.tolist() == list(case.kv_lens)
    assert cache.max_num_pages == case.max_num_pages
    first = cache.ckv if isinstance(case, MLACase) else cache.k
    whole = arrays.data if isinstance(arrays.data, np.ndarray) else arrays.data[0]
    assert np.shares_memory(first, whole)


def test_ids_of_cases_are_readable_and_different():
    assert str(CASES[2]) == "45,8,25,22-page16-heads2x64-bfloat16-NHD-pair"
    assert len({str(case) for case in CASES}) == len(CASES)
