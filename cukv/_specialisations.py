"""The one table of kernel specialisations: what may be launched and is compiled as a check."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from cukv._arrays import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, FP8

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


class DecodeTile(NamedTuple):
    """Geometry of one specialisation of ``decode``: a step of keys belongs to one warp."""

    dtype: Any  # of the cache
    head_dim: int  # at most so many elements of a key
    head_dim_vo: int
    rows: int  # packed query rows
    warps: int
    aligned: bool  # keys and values are moved 16 bytes at a time

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "decode"

    @property
    def round_steps(self) -> int:
        """Steps that a CTA takes side by side."""
        return self.warps

    @property
    def tokens(self) -> int:
        """Keys of a warp's step: a buffer of 8 KB where that is 32 keys or fewer."""
        if self.dtype in FP8:
            return 32
        return 32 if self.head_dim == 64 and self.rows <= 16 else 16

    @property
    def stages(self) -> int:
        """Buffers of a warp. 64 KB on their way per CTA of 4 warps keep the memory busy."""
        return 4 if self.head_dim == 64 and self.rows > 16 else 2

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers and shared memory must leave room for."""
        return 2 if self.warps == 4 and self.rows <= 16 and self.head_dim <= 128 else 1

    @property
    def smem_bytes(self) -> int:
        """Size of ``DecodeCta::Smem`` in kernels/decode.cu."""
        per_token = (self.head_dim + self.head_dim_vo) * self.dtype.itemsize
        ring = self.warps * self.stages * (self.tokens * per_token + 4)
        states = self.warps * self.rows * 4 * (self.head_dim_vo + 8 + 2)
        queries = 2 * self.rows * (2 * (self.head_dim + 8) + 4)
        return int(-(-(ring + states + queries + 4) // 1024) * 1024)

    @property
    def template_args(self) -> dict[str, Any]:
        """Template arguments of ``decode``."""
        return {
            "KV": self.dtype,
            "HEAD_DIM_QK": self.head_dim,
            "HEAD_DIM_VO": self.head_dim_vo,
            "ROWS": self.rows,
            "WARPS": self.warps,
            "TOKENS": self.tokens,
            "STAGES": self.stages,
            "MIN_CTAS": self.ctas_per_sm,
            "ALIGNED": str(self.aligned).lower(),
        }


class PrefillTile(NamedTuple):
    """Geometry of one specialisation of ``prefill_sm80``: a step of keys is for all warps."""

    dtype: Any  # of the cache
    head_dim: int  # at most so many elements of a key
    head_dim_vo: int
    warp_rows: int  # packed query rows of a warp
    warps: int
    aligned: bool  # keys and values are moved 16 bytes at a time

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "prefill_sm80"

    @property
    def tokens(self) -> int:
        """Keys of a step."""
        return 64

    @property
    def scores(self) -> int:
        """Keys that a warp scores at a time: as many as there are registers for."""
        return 16 if self.head_dim_vo > 128 else 32

    @property
    def round_steps(self) -> int:
        """Steps at whose multiples a tile is cut."""
        return 2

    @property
    def rows(self) -> int:
        """Packed query rows."""
        return self.warp_rows * self.warps

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers and shared memory must leave room for."""
        return 2 if self.warps == 4 else 1

    @property
    def smem_bytes(self) -> int:
        """Size of ``PrefillCta::Smem`` in kernels/prefill_sm80.cu."""
        ring = 2 * self.tokens * (self.head_dim + self.head_dim_vo) * self.dtype.itemsize
        queries = self.rows * (2 * (self.head_dim + 8) + 4)
        item = 48 + 20 * self.warps + 8
        return int(-(-(ring + queries + 2 * 8 + item) // 1024) * 1024)

    @property
    def template_args(self) -> dict[str, Any]:
        """Template arguments of ``prefill_sm80``."""
        return {
            "KV": self.dtype,
            "HEAD_DIM_QK": self.head_dim,
            "HEAD_DIM_VO": self.head_dim_vo,
            "WARP_ROWS": self.warp_rows,
            "WARPS": self.warps,
            "TOKENS": self.tokens,
            "SCORES": self.scores,
            "MIN_CTAS": self.ctas_per_sm,
            "ALIGNED": str(self.aligned).lower(),
        }


Tile = DecodeTile | PrefillTile

# Largest sizes of a key and of a value that a tile holds; the first that fits serves a call.
_HEAD_DIMS = ((64, 64), (128, 128), (256, 128), (256, 256))


def _attention_dims() -> Iterator[tuple[Any, tuple[int, int]]]:
    for dtype in (BFLOAT16, FLOAT16, *FP8):
        for dims in _HEAD_DIMS:
            if dtype not in FP8 or dims != (64, 64):  # 64 bytes are swizzled as 128
                yield dtype, dims


@functools.cache
def prefill_tiles() -> tuple[PrefillTile, ...]:
    """Every tile of ``prefill_sm80``."""
    tiles = []
    for dtype, dims in _attention_dims():
        if dtype in FP8 and max(dims) > 128:
            continue  # no registers: such caches keep to the tiles of decode
        # 32 rows of a warp use keys twice as often as 16, if there are registers for their sums.
        wide = max(dims) <= 128
        tiles += [
            PrefillTile(dtype, *dims, *((32, 4) if wide and aligned else (16, 8)), aligned)
            for aligned in (True, False)
        ]
    return tuple(tiles)


@functools.cache
def decode_tiles() -> tuple[DecodeTile, ...]:
    """Every tile of ``decode``, those that suit a call better before the others."""
    tiles = []
    for dtype, dims in _attention_dims():
        # More rows and wider heads than these do not fit into registers.
        rows = (16,) if max(dims) > 128 else (8, 16) if dtype in FP8 else (8, 16, 32)
        for n in rows:
            warps = (8, 4) if max(dims) <= 128 and n <= 16 else (4,)
            tiles += [DecodeTile(dtype, *dims, n, w, True) for w in warps]
        tiles.append(DecodeTile(dtype, *dims, 16, 4, False))
    return tuple(tiles)


@functools.cache
def specialisations() -> dict[str, list[dict[str, Any]]]:
    """Every specialisation that may be launched: kernel name -> its sets of template arguments."""
    return {
        "append": list(_with_vectors("FROM", "K_TO", "V_TO", dtypes=ROW_DTYPES)),
        "batch_indices_positions": [{}],
        "block_table": [{}],
        "byte_indptr": [{}],
        "copy_pages": [{"BYTES": size} for size in (16, 4, 2, 1)],
        "decode": [tile.template_args for tile in decode_tiles()],
        "gather": list(_with_vectors("FROM", "TO", dtypes=ROW_DTYPES)),
        "mask_indptr": [{}],
        "merge_states": list(_with_vectors("FROM", "TO", dtypes=STATE_DTYPES)),
        "packbits": [{"BYTES": size} for size in (1, 2, 4, 8)],
        "page_indices": [{}],
        "page_indptr": [{}],
        "plan": [
            {"ONE_TILE": one_tile, "FIXED": fixed}
            for one_tile in ("true", "false")
            for fixed in ("true", "false")
        ],
        "prefill_sm80": [tile.template_args for tile in prefill_tiles()],
        "segment_packbits": [{"BYTES": size} for size in (1, 2, 4, 8)],
        "seq_lens": [{}],
        "slot_mapping": [{}],
        "token_indptr": [{}],
    }
