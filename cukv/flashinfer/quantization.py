"""FlashInfer's ``quantization``: booleans as bits. Attention takes ``bitorder="little"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cukv import bits as _bits
from cukv.flashinfer._caller import data, give_back, index, working_for

if TYPE_CHECKING:
    from cukv.bits import BitOrder

__all__ = ["packbits", "segment_packbits"]


def packbits(x: Any, bitorder: BitOrder = "big") -> Any:
    """Pack truth values into bits, eight to a byte: uint8 ``[ceil(n / 8)]``."""
    with working_for(x):
        return give_back(x, _bits.packbits(data("packbits", "x", x), bitorder))


def segment_packbits(x: Any, indptr: Any, bitorder: BitOrder = "big") -> tuple[Any, Any]:
    """Pack each segment ``x[indptr[i]:indptr[i + 1]]`` into bits, on bytes of its own.

    Returns uint8 ``[new_indptr[-1]]`` and int32 ``new_indptr``. Synchronises: the size of the
    result is read. ``cukv.segment_packbits`` does not.
    """
    op = "segment_packbits"
    with working_for(x):
        values = data(op, "x", x)
        offsets = index(op, "indptr", indptr, values)
        packed, byte_indptr = _bits.segment_packbits(values, offsets, bitorder)
        size = int(byte_indptr[-1])
        packed, byte_indptr = give_back(x, packed[:size], byte_indptr.astype("int32"))
        return packed, byte_indptr
