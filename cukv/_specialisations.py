"""The one table of kernel specialisations: what may be launched and is compiled as a check."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from cukv._arrays import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, FP8
from cukv._geometry import (
    DecodeTile,
    LatentTile,
    MlaDecodeSm90Tile,
    MlaDecodeTile,
    MlaStreamSm90Tile,
    PrefillTile,
    Sm90Tile,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPELLING = {
    FLOAT16: "half",
    BFLOAT16: "cukv::bfloat16",
    FLOAT32: "float",
    FLOAT8_E4M3: "cukv::fp8_e4m3",
    FLOAT8_E5M2: "cukv::fp8_e5m2",
}
# Of dtypes that a kernel learns at run time: kernels/common/queries.cuh KIND_*.
KINDS = {FLOAT16: 0, BFLOAT16: 1, FLOAT32: 2, FLOAT8_E4M3: 3, FLOAT8_E5M2: 4}
ROW_DTYPES = tuple(SPELLING)  # what append and gather convert between
STATE_DTYPES = (FLOAT16, BFLOAT16, FLOAT32)  # attention outputs


def vector_size(*dtypes: Any) -> int:
    """Elements that one thread moves at a time: 16 bytes of the widest dtype."""
    return int(16 // max(d.itemsize for d in dtypes))


def _with_vectors(*names: str, dtypes: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for combination in itertools.product(dtypes, repeat=len(names)):
        for vec in (vector_size(*combination), 1):
            yield {**dict(zip(names, combination, strict=True)), "VEC": vec}


# Largest sizes of a key and of a value that a tile holds; the first that fits serves a call.
_HEAD_DIMS = ((64, 64), (128, 128), (256, 128), (256, 256))
# Sizes that prefill_sm90 has tiles for, each exactly; of (192, 128) not for pieces of pages under a
# mask, which take registers that are not there. None has both a cap and a mask, which are rare
# together.
_SM90_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


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
    plain = [t._replace(plain=True) for t in tiles if t.warp_rows == 32 and t.dtype not in FP8]
    packed = [t._replace(paged=False) for t in plain]
    return (*tiles, *plain, *packed, *(t._replace(masked=True) for t in packed))


@functools.cache
def sm90_tiles() -> tuple[Sm90Tile, ...]:
    """Every tile of ``prefill_sm90``."""
    return tuple(
        Sm90Tile(dtype, *dims, paged, mapped, capped, masked)
        for dtype in (BFLOAT16, FLOAT16)
        for dims in _SM90_HEAD_DIMS
        for paged, mapped in ((False, True), (True, True), (True, False))
        for capped, masked in ((False, False), (True, False), (False, True))
        if dims != (192, 128) or not (paged and mapped and masked)
    ) + tuple(Sm90Tile(FLOAT8_E4M3, 128, 128, paged) for paged in (False, True))


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
    # What is small enough to be held up by anything but the memory: no fp8, which does not fit into
    # 128 registers.
    small = [t for t in tiles if t.rows == 8 and t.dtype not in FP8]
    small += [t._replace(brief=True) for t in small if t.warps == 4]
    plain = [t._replace(plain=True) for t in small]
    return (*tiles, *(t for t in small if t.brief), *plain)


# Dtypes of ckv and kpe that attention takes; kpe may stay in 16 bits, where it says more.
_LATENT_DTYPES: tuple[tuple[Any, Any], ...] = (
    (BFLOAT16, BFLOAT16),
    (FLOAT16, FLOAT16),
    (FLOAT8_E4M3, BFLOAT16),
    (FLOAT8_E4M3, FLOAT16),
    (FLOAT8_E4M3, FLOAT8_E4M3),
)


@functools.cache
def latent_tiles() -> tuple[LatentTile, ...]:
    """Every tile of attention over latent rows, those that suit a call better before the others."""
    tiles: list[LatentTile] = []
    for ckv, kpe in _LATENT_DTYPES:
        # Eight warps need the shared memory of a data-centre GPU from Hopper on.
        tiles += [MlaDecodeTile(ckv, kpe, 8, True), MlaDecodeTile(ckv, kpe, 4, True)]
        tiles.append(MlaDecodeTile(ckv, kpe, 4, False))
        tiles += [MlaDecodeSm90Tile(ckv, kpe, mapped) for mapped in (True, False)]
    return tuple(tiles)


@functools.cache
def stream_tiles() -> tuple[MlaStreamSm90Tile, ...]:
    """Every tile of ``mla_stream_sm90``: of e4m3, whose rows leave the least time beside copies."""
    return tuple(MlaStreamSm90Tile(*dtypes) for dtypes in _LATENT_DTYPES if dtypes[0] in FP8)


@functools.cache
def specialisations() -> dict[str, list[dict[str, Any]]]:
    """Every specialisation that may be launched: kernel name -> its sets of template arguments."""
    return {
        "append": list(_with_vectors("FROM", "K_TO", "V_TO", dtypes=ROW_DTYPES)),
        "batch_indices_positions": [{}],
        "block_table": [{}],
        "byte_indptr": [{}],
        "concat_levels": [{}],
        "copy_pages": [{"BYTES": size} for size in (16, 4, 2, 1)],
        "decode": [tile.template_args for tile in decode_tiles()],
        "gather": list(_with_vectors("FROM", "TO", dtypes=ROW_DTYPES)),
        "mask_indptr": [{}],
        "mask_tiles": [{"BITS": is_bits} for is_bits in ("true", "false")],
        "merge_states": list(_with_vectors("FROM", "TO", dtypes=STATE_DTYPES)),
        "mla_decode": [t.template_args for t in latent_tiles() if t.kernel == "mla_decode"],
        "mla_decode_sm90": [t.template_args for t in latent_tiles() if t.kernel != "mla_decode"],
        "mla_stream_sm90": [tile.template_args for tile in stream_tiles()],
        "packbits": [{"BYTES": size} for size in (1, 2, 4, 8)],
        "page_indices": [{}],
        "page_indptr": [{}],
        "plan": [
            {"ONE_TILE": one_tile, "FIXED": fixed}
            for one_tile in ("true", "false")
            for fixed in ("true", "false")
        ],
        "prefill_sm80": [tile.template_args for tile in prefill_tiles()],
        "prefill_sm90": [tile.template_args for tile in sm90_tiles()],
        "segment_packbits": [{"BYTES": size} for size in (1, 2, 4, 8)],
        "seq_lens": [{}],
        "slot_mapping": [{}],
        "token_indptr": [{}],
    }


def runs_on(name: str, arch: str) -> bool:
    """Tell whether an architecture has a kernel's instructions; its name says if only one has."""
    return "_sm90" not in name or arch == "sm_90a"
