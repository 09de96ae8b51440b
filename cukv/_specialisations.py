"""The one table of kernel specialisations: what may be launched and is compiled as a check."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from cukv._arrays import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPELLING = {
    FLOAT16: "half",
    BFLOAT16: "cukv::bfloat16",
    FLOAT32: "float",
    FLOAT8_E4M3: "cukv::fp8_e4m3",
    FLOAT8_E5M2: "cukv::fp8_e5m2",
}
ROW_DTYPES = tuple(SPELLING)  # what append and gather convert between
STATE_DTYPES = (FLOAT16, BFLOAT16, FLOAT32)  # attention outputs


def vector_size(*dtypes: Any) -> int:
    """Elements that one thread moves at a time: 16 bytes of the widest dtype."""
    return int(16 // max(d.itemsize for d in dtypes))


def _with_vectors(*names: str, dtypes: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for combination in itertools.product(dtypes, repeat=len(names)):
        for vec in (vector_size(*combination), 1):
            yield {**dict(zip(names, combination, strict=True)), "VEC": vec}


@functools.cache
def specialisations() -> dict[str, list[dict[str, Any]]]:
    """Every specialisation that may be launched: kernel name -> its sets of template arguments."""
    return {
        "append": list(_with_vectors("FROM", "K_TO", "V_TO", dtypes=ROW_DTYPES)),
        "batch_indices_positions": [{}],
        "block_table": [{}],
        "byte_indptr": [{}],
        "copy_pages": [{"BYTES": size} for size in (16, 4, 2, 1)],
        "gather": list(_with_vectors("FROM", "TO", dtypes=ROW_DTYPES)),
        "mask_indptr": [{}],
        "merge_states": list(_with_vectors("FROM", "TO", dtypes=STATE_DTYPES)),
        "packbits": [{"BYTES": size} for size in (1, 2, 4, 8)],
        "page_indices": [{}],
        "page_indptr": [{}],
        "segment_packbits": [{"BYTES": size} for size in (1, 2, 4, 8)],
        "seq_lens": [{}],
        "slot_mapping": [{}],
        "token_indptr": [{}],
    }
