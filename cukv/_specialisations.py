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


class DecodeTile(NamedTuple):
    """Geometry of one specialisation of ``decode``: a step of keys belongs to one warp."""

    dtype: Any  # of the cache
    head_dim: int  # at most so many elements of a key
    head_dim_vo: int
    rows: int  # packed query rows
    warps: int
    aligned: bool  # keys and values are moved 16 bytes at a time
    brief: bool = False  # for many short items: four CTAs on an SM, which begin and end in turn
    plain: bool = False  # for calls that have no options: PLAIN in kernels/decode.cu

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "decode"

    @property
    def round_steps(self) -> int:
        """Steps that a CTA takes side by side."""
        return self.warps

    @property
    def item_steps(self) -> int:
        """What an item costs beside its keys, in steps.

        On an H200, one request of 131072 tokens and 511 of 64 took 165 us at 3 rounds, where as
        many tokens spread evenly took 159; 195 us at 2 rounds, 222 at 4.
        """
        return 3 * self.round_steps

    @property
    def cut_cost(self) -> int:
        """Steps that tiles cut at both ends of a part cost it: states are left and merged.

        On an H200, 15 requests of 1024 tokens over 16 parts took 19.7 us cut, and 16 over 16, not
        cut, 17.4.
        """
        return 8

    @property
    def tokens(self) -> int:
        """Keys of a warp's step: a buffer of 8 KB, but for heads of 256 and many rows of 64."""
        if self.dtype in FP8:
            return 32
        return 32 if self.head_dim == 64 and self.rows <= 16 else 16

    @property
    def stages(self) -> int:
        """Buffers of a warp: 128 KB on their way on an SM keep the memory busy."""
        if self.brief:
            return 1
        return 4 if self.head_dim == 64 and self.rows > 16 else 2

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers and shared memory must leave room for."""
        if self.brief:
            return 4
        return 2 if self.warps == 4 and self.rows <= 16 and self.head_dim <= 128 else 1

    @property
    def smem_bytes(self) -> int:
        """Size of ``DecodeCta::Smem`` in kernels/decode.cu."""
        per_token = (self.head_dim + self.head_dim_vo) * self.dtype.itemsize
        ring = self.warps * self.stages * (self.tokens * per_token + 4)
        ring += self.warps * self.tokens * 16
        states = self.warps * self.rows * 4 * (self.head_dim_vo + 4 + 2)
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
            "PLAIN": str(self.plain).lower(),
        }


class PrefillTile(NamedTuple):
    """Geometry of one specialisation of ``prefill_sm80``: a step of keys is for all warps."""

    dtype: Any  # of the cache
    head_dim: int  # at most so many elements of a key
    head_dim_vo: int
    warp_rows: int  # packed query rows of a warp
    warps: int
    aligned: bool  # keys and values are moved 16 bytes at a time
    plain: bool = False  # for calls that have no options: PLAIN in kernels/prefill_sm80.cu
    paged: bool = True  # plain: keys and values are not packed

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
        if self.head_dim_vo > 128:
            return 16
        return 32 if self.dtype in FP8 else 64

    @property
    def round_steps(self) -> int:
        """Steps at whose multiples a tile is cut."""
        return 2

    @property
    def item_steps(self) -> int:
        """What an item costs beside its keys, in steps."""
        return 2

    @property
    def cut_cost(self) -> int:
        """Steps that tiles cut at both ends of a part cost it: little, of so much arithmetic."""
        return 0

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
        own = -(-(2 * 48 + 8 + 32) // 16) * 16  # items and what is seen of one
        if self.plain:  # RunRing
            ring += self.warps * (32 * 32 + 4)
            own += 64
        else:  # SharedRing
            ring += 2 * 32 + 4 * self.tokens
            own += 2 * (self.tokens // self.warps * (32 + 12) + 24)
        ring = -(-ring // 1024) * 1024
        queries = self.rows * (2 * (self.head_dim + 8) + 4)
        return int(-(-(ring + queries + self.warps * own + 16) // 1024) * 1024)

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
            "PLAIN": str(self.plain).lower(),
            "PAGED": str(self.paged).lower(),
        }


class Sm90Tile(NamedTuple):
    """Geometry of one specialisation of ``prefill_sm90``."""

    dtype: Any  # of queries and cache
    head_dim: int  # elements of a key
    head_dim_vo: int
    paged: bool  # a step is tokens of pages, not consecutive rows
    mapped: bool = True  # keys come by tensor maps; else token by token, 16 bytes at a time
    capped: bool = False  # logits are soft-capped
    masked: bool = False  # the work list has a custom mask

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "prefill_sm90"

    @property
    def tokens(self) -> int:
        """Keys of a step."""
        return 64 if self.head_dim > 192 else 128

    @property
    def slots(self) -> int:
        """Items whose queries or results are in shared memory."""
        if self.head_dim > 128:
            return 1
        return 3 if self.stages[0] == 2 or self.dtype in FP8 else 2

    @property
    def stages(self) -> tuple[int, int]:
        """Steps whose keys, and whose values, are in shared memory or on their way.

        Keys stay until a step's end, and those of pages are asked for later: page by page. Copies
        token by token take longest, and fp8 has half the bytes.
        """
        if not self.mapped and self.head_dim == 64:
            return 5, 5
        if self.dtype in FP8:
            return 3, 3
        return (3, 2) if self.paged and self.head_dim == 128 else (2, 2)

    @property
    def round_steps(self) -> int:
        """Steps at whose multiples a tile is cut."""
        return 2

    @property
    def item_steps(self) -> int:
        """What an item costs beside its keys, in steps."""
        return 1

    @property
    def cut_cost(self) -> int:
        """Steps that tiles cut at both ends of a part cost it: little, of so much arithmetic."""
        return 0

    @property
    def rows(self) -> int:
        """Packed query rows."""
        return 128

    @property
    def warps(self) -> int:
        """Two teams of four, and four that serve them; of fp8, four that lay values out."""
        return 16 if self.dtype in FP8 else 12

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers and shared memory must leave room for."""
        return 1

    @property
    def smem_bytes(self) -> int:
        """Size of ``PrefillSm90Cta::Smem`` in kernels/prefill_sm90.cu."""
        queries = self.slots * self.rows * self.head_dim * 2  # or results, which have 16 bits
        k_stages, v_stages = self.stages
        barriers = 1024  # and orders, up to a tile that may follow
        if self.dtype in FP8:
            v_stages += 2  # of values as they are copied
            barriers *= 2  # those of the copies are behind them
        features = k_stages * self.head_dim + v_stages * self.head_dim_vo
        return queries + self.tokens * features * int(self.dtype.itemsize) + barriers

    @property
    def template_args(self) -> dict[str, Any]:
        """Template arguments of ``prefill_sm90``."""
        return {
            "KV": self.dtype,
            "HEAD_DIM_QK": self.head_dim,
            "HEAD_DIM_VO": self.head_dim_vo,
            "TOKENS": self.tokens,
            "SLOTS": self.slots,
            "K_STAGES": self.stages[0],
            "V_STAGES": self.stages[1],
            "PAGED": str(self.paged).lower(),
            "SOFT_CAP": str(self.capped).lower(),
            "MASKED": str(self.masked).lower(),
            "MAPPED": str(self.mapped).lower(),
        }


Tile = DecodeTile | PrefillTile | Sm90Tile


class MlaDecodeTile(NamedTuple):
    """Geometry of one specialisation of ``mla_decode``: a step of keys is for all warps."""

    ckv: Any  # dtypes of the two parts of the cache
    kpe: Any
    warps: int
    aligned: bool  # latent rows are moved 16 bytes at a time

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "mla_decode"

    @property
    def rows(self) -> int:
        """Packed query rows."""
        return 16

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def tokens(self) -> int:
        """Keys of a step: 8 for each warp to score."""
        return 8 * self.warps

    @property
    def round_steps(self) -> int:
        """Steps at whose multiples a tile is cut."""
        return 2

    @property
    def stages(self) -> int:
        """Buffers of a step. About 150 KB on their way keep the memory of an H200 busy."""
        if self.warps == 4:
            return 2
        return 5 if self.ckv in FP8 else 3

    @property
    def held(self) -> int:
        """Steps of 16 columns of q_nope that registers hold beside sums and conversions."""
        if self.warps == 8:
            return 28 if self.kpe in FP8 else 31 if self.ckv in FP8 else 30
        if self.kpe in FP8:
            return 4
        return 8 if self.ckv in FP8 else 16

    @property
    def cut_cost(self) -> int:
        """Steps that tiles cut at both ends of a part cost it: states are left and merged."""
        return 4

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers and shared memory must leave room for."""
        return 2 if self.warps == 4 else 1

    @property
    def smem_bytes(self) -> int:
        """Size of ``MlaDecodeCta::Smem`` in kernels/mla_decode.cu."""
        ring = self.stages * self.tokens * (512 * self.ckv.itemsize + 128)
        weights, maxima = 2 * 16 * 128, 16 * self.warps * 4
        queries = 512 * (max(32 - self.held, 1) + (4 if self.held < 32 else 1))
        keys, scales, item, gates = self.stages * self.warps, 16 * 8, 48 + 8, 2 * 56
        used = ring + weights + queries + maxima + keys + scales + item + gates + 64  # and padding
        return int(-(-used // 1024) * 1024)

    @property
    def template_args(self) -> dict[str, Any]:
        """Template arguments of ``mla_decode``."""
        return {
            "CKV": self.ckv,
            "KPE": self.kpe,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "HELD": self.held,
            "MIN_CTAS": self.ctas_per_sm,
            "ALIGNED": str(self.aligned).lower(),
        }


class MlaDecodeSm90Tile(NamedTuple):
    """Geometry of one specialisation of ``mla_decode_sm90``: two warpgroups share a tile."""

    ckv: Any  # dtype of both parts of the cache
    mapped: bool = True  # keys come by tensor maps
    aligned: bool = True  # latent rows are moved 16 bytes at a time

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "mla_decode_sm90"

    @property
    def kpe(self) -> Any:
        """Dtype of kpe."""
        return self.ckv

    @property
    def rows(self) -> int:
        """Packed query rows."""
        return 64

    @property
    def threads(self) -> int:
        """Threads of a CTA: two warpgroups that compute, and four warps that load."""
        return 384

    @property
    def tokens(self) -> int:
        """Keys of a step."""
        return 64

    @property
    def round_steps(self) -> int:
        """Steps at whose multiples a tile is cut: one of each warpgroup."""
        return 2

    @property
    def cut_cost(self) -> int:
        """Steps that tiles cut at both ends of a part cost it: states are left and merged."""
        return 6

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers and shared memory must leave room for."""
        return 1

    @property
    def smem_bytes(self) -> int:
        """Size of ``LatentSmem`` in kernels/common/latent_sm90.cuh."""
        tiles, states, barriers, items = 3 * 9 * 8192, 6 * 64 * 4, 23 * 8, 2 * 48 + 2 * 56
        return int(-(-(tiles + states + barriers + items) // 1024) * 1024)

    @property
    def template_args(self) -> dict[str, Any]:
        """Template arguments of ``mla_decode_sm90``."""
        return {"KV": self.ckv, "MAPPED": str(self.mapped).lower()}


LatentTile = MlaDecodeTile | MlaDecodeSm90Tile

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
    return (*tiles, *plain, *(t._replace(paged=False) for t in plain))


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
    for dtype in (BFLOAT16, FLOAT16):
        tiles += [MlaDecodeSm90Tile(dtype, mapped) for mapped in (True, False)]
    return tuple(tiles)


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
