"""Geometry of tiles: what a CTA of each specialisation of an attention kernel holds and takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukv import _smem
from cukv._arrays import FP8


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
        """Shared memory of a CTA."""
        return _smem.decode(self)

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
    masked: bool = False  # plain: the work list has a custom mask

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
        """Shared memory of a CTA."""
        return _smem.prefill_sm80(self)

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
            "MASKED": str(self.masked).lower(),
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
        """Shared memory of a CTA."""
        return _smem.prefill_sm90(self)

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
        """Shared memory of a CTA."""
        return _smem.mla_decode(self)

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

    ckv: Any  # dtypes of the two parts of the cache
    kpe: Any
    mapped: bool = True  # keys come by tensor maps
    aligned: bool = True  # latent rows are moved 16 bytes at a time

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "mla_decode_sm90"

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
        """Shared memory of a CTA."""
        return _smem.mla_decode_sm90(self)

    @property
    def template_args(self) -> dict[str, Any]:
        """Template arguments of ``mla_decode_sm90``."""
        return {"CKV": self.ckv, "KPE": self.kpe, "MAPPED": str(self.mapped).lower()}


LatentTile = MlaDecodeTile | MlaDecodeSm90Tile


class MlaStreamSm90Tile(NamedTuple):
    """Geometry of one specialisation of ``mla_stream_sm90``, of the work lists of ``mla_decode``.

    A warp has keys copied for eight that compute.
    """

    ckv: Any  # dtypes of the two parts of the cache
    kpe: Any

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "mla_stream_sm90"

    @property
    def rows(self) -> int:
        """Packed query rows."""
        return 16

    @property
    def warps(self) -> int:
        """Warps that compute."""
        return 8

    @property
    def threads(self) -> int:
        """Threads of a CTA: registers are dealt out to four warps at a time."""
        return 32 * (self.warps + 4)

    @property
    def tokens(self) -> int:
        """Keys of a step: 8 for each warp to score."""
        return 8 * self.warps

    @property
    def stages(self) -> int:
        """Buffers of a step: as many as shared memory has room for."""
        return 5

    @property
    def held(self) -> int:
        """Steps of 16 columns of q_nope that registers hold."""
        return 31

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that registers and shared memory must leave room for."""
        return 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return _smem.mla_stream_sm90(self)

    @property
    def template_args(self) -> dict[str, Any]:
        """Template arguments of ``mla_stream_sm90``."""
        return {
            "CKV": self.ckv,
            "KPE": self.kpe,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "HELD": self.held,
        }
