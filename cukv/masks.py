"""Ragged boolean masks, one ``[qo_len, kv_len]`` per request, as booleans or as bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import (
    INDEX_DTYPES,
    Array,
    as_array,
    concatenate,
    empty,
    flattened,
    home,
    set_to_zero,
)
from cukv._check import (
    check_indptr,
    match,
    match_index,
    match_indptr,
    request_number,
    values,
)
from cukv._index import as_index, pack_index
from cukv._kernels import ONE_SCAN, kernel
from cukv._noun import ArrayNoun
from cukv._scratch import allocate_scratch
from cukv.bits import offsets_in_bytes, segment_packbits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BOOL, _UINT8, _INT64 = np.dtype(np.bool_), np.dtype(np.uint8), INDEX_DTYPES[1]
_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, repr=False)
class RaggedMask(ArrayNoun):
    """Masks of a batch, flattened one after another; True = attend.

    Request ``b`` has a mask ``[qo_len, kv_len]`` in C order at
    ``data[indptr[b]:indptr[b + 1]]``, where:

        mask indptr[1:] == cumsum(qo_len * kv_len)             elements, this noun
        byte indptr[1:] == cumsum(ceil(qo_len * kv_len / 8))   bytes, PackedMask

    Parameters
    ----------
    data : [sum(qo_len * kv_len)] bool
        Any stride. May be longer: what lies past the last mask is padding.
    qo_indptr : [batch_size + 1] int32 or int64, or a sequence
        Offsets of each request's query rows; starts at 0.
    kv_indptr : [batch_size + 1] int32 or int64, or a sequence
        Offsets of each request's **tokens** (not pages): ``PageTable.token_indptr``, or the indptr
        of a RaggedTensor of keys.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, shape, home or device. Values are checked by ``validate``; on the device,
        elements past the end of ``data`` count as False.

    Notes
    -----
    Layout: FlashInfer, "KV-Cache Layout in FlashInfer", section "Mask Layout (2D Ragged Tensor)".

    Examples
    --------
    >>> import numpy as np
    >>> from cukv import RaggedMask
    >>> mask = RaggedMask.from_list([np.ones((1, 5), bool), np.ones((1, 9), bool)])
    >>> mask.indptr, mask[1].shape, mask.pack().indptr
    (array([ 0,  5, 14]), (1, 9), array([0, 1, 3]))
    """

    data: Array
    qo_indptr: Array
    kv_indptr: Array

    def __post_init__(self) -> None:
        """Check the structure once."""
        self._set(**_checked("RaggedMask", self.data, _BOOL, self.qo_indptr, self.kv_indptr))

    @classmethod
    def from_list(cls, masks: Sequence[Array]) -> RaggedMask:
        """Join one mask per request.

        Parameters
        ----------
        masks : sequence of [qo_len, kv_len] bool
            One or more, of one home.

        Returns
        -------
        RaggedMask
            Owns its data; int32 indptrs (int64 for more rows or tokens than int32 counts).

        Raises
        ------
        TypeError, ValueError
            No masks, masks that are not 2-D or not bool, or of several homes or devices.
        """
        op = "RaggedMask.from_list"
        if not len(masks):
            raise ValueError(f"{op}: needs one mask at least: none has no home")
        parts = [as_array(op, f"masks[{i}]", m) for i, m in enumerate(masks)]
        home(op, **{f"masks[{i}]": m for i, m in enumerate(parts)})
        qo_indptr, kv_indptr = [0], [0]
        for i, part in enumerate(parts):
            match(op, f"masks[{i}]", part, ("qo_len", "kv_len"), {})
            _match_bool(op, f"masks[{i}]", part)
            qo_indptr.append(qo_indptr[-1] + part.shape[0])
            kv_indptr.append(kv_indptr[-1] + part.shape[1])
        return cls(concatenate([flattened(p) for p in parts]), qo_indptr, kv_indptr)

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.qo_indptr) - 1

    @property
    def indptr(self) -> Array:
        """Where each request's mask starts in ``data``, ``[batch_size + 1]`` int64, in elements.

        Computed from the present contents, on a GPU by one launch. Source: kernels/mask_indptr.cu.

        Raises
        ------
        ValueError
            On NumPy, an indptr that does not start at 0 or falls.
        """
        return _mask_indptr("RaggedMask.indptr", self.qo_indptr, self.kv_indptr)

    def __len__(self) -> int:
        """Number of requests."""
        return self.batch_size

    def __getitem__(self, i: int) -> Array:
        """Mask of request ``i``, a ``[qo_len, kv_len]`` view. Synchronises if on a GPU."""
        return self._view(request_number("RaggedMask", i, len(self)), *self._host_lens())

    def __iter__(self) -> Iterator[Array]:
        """Views of the requests' masks in turn. Synchronises once if on a GPU."""
        lens = self._host_lens()
        return (self._view(i, *lens) for i in range(len(self)))

    def _host_lens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read qo_len, kv_len and where each mask starts, checked."""
        qo_indptr, kv_indptr = values(self.qo_indptr), values(self.kv_indptr)
        starts = _host_mask_indptr("RaggedMask", qo_indptr, kv_indptr, len(self.data))
        return np.diff(qo_indptr), np.diff(kv_indptr), starts

    def _view(self, i: int, qo_len: np.ndarray, kv_len: np.ndarray, starts: np.ndarray) -> Array:
        return self.data[starts[i] : starts[i + 1]].reshape(qo_len[i], kv_len[i])

    def pack(self) -> PackedMask:
        """Pack into bits, each request starting on a byte.

        Returns
        -------
        PackedMask
            ``(len(data) + 7 * batch_size) // 8`` bytes, those past the last request 0.

        Raises
        ------
        ValueError
            On NumPy, what ``validate`` raises.

        Notes
        -----
        Current stream, no synchronisation. Calls captured into a graph share scratch of 8 bytes per
        request as those of ``PagedKVCache.copy_pages`` do, which is kept for the life of the
        process. Source: kernels/segment_packbits.cu.
        """
        if self._home() is np:
            self.validate()
        op = "RaggedMask.pack"
        indptr = _mask_indptr(op, self.qo_indptr, self.kv_indptr, for_this_call=True)
        data, byte_indptr = segment_packbits(self.data, indptr)
        return PackedMask(data, self.qo_indptr, self.kv_indptr, byte_indptr)

    def validate(self) -> None:
        """Check the values, on the host. Synchronises if the mask is on a GPU.

        Raises
        ------
        ValueError
            An indptr that does not start at 0 or falls, naming the request, or data that is
            shorter than the masks.
        """
        op = "RaggedMask.validate"
        _host_mask_indptr(op, values(self.qo_indptr), values(self.kv_indptr), len(self.data))


@dataclass(frozen=True, eq=False, repr=False, init=False)
class PackedMask(ArrayNoun):
    """Masks of a batch as bits, eight elements to a byte, the first in a byte's lowest bit.

    Each request starts on a byte of its own: element ``[i, j]`` of request ``b`` is bit ``n % 8``
    of ``data[indptr[b] + n // 8]``, ``n = i * kv_len + j``, where:

        mask indptr[1:] == cumsum(qo_len * kv_len)             elements, RaggedMask
        byte indptr[1:] == cumsum(ceil(qo_len * kv_len / 8))   bytes, this noun

    Parameters
    ----------
    data : [indptr[-1]] uint8
        Little-endian bits, any stride. May be longer.
    qo_indptr, kv_indptr : [batch_size + 1] int32 or int64, or a sequence
        Offsets of each request's query rows and of its **tokens**, as in RaggedMask.
    indptr : [batch_size + 1] int32 or int64, or a sequence
        Where each request starts, in **bytes**. By default each starts where the one before ends,
        computed (int64) at each access.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, shape, home or device. Values are checked by ``validate``; on the device, bits
        past the end of ``data`` count as False.

    Notes
    -----
    Layout: FlashInfer, "KV-Cache Layout in FlashInfer", section "Mask Layout (2D Ragged Tensor)".
    """

    data: Array
    qo_indptr: Array
    kv_indptr: Array

    def __init__(
        self, data: Array, qo_indptr: Array, kv_indptr: Array, indptr: Array | None = None
    ) -> None:
        """Check the structure once."""
        op = "PackedMask"
        checked = _checked(op, data, _UINT8, qo_indptr, kv_indptr)
        if indptr is not None:
            indptr = as_index(op, "indptr", indptr, checked["data"])
            home(op, data=checked["data"], indptr=indptr)
            match_index(op, "indptr", indptr, len(checked["qo_indptr"]))
        self._set(**checked, _indptr=indptr)

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "indptr": self._indptr}  # type: ignore[attr-defined]

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.qo_indptr) - 1

    @property
    def indptr(self) -> Array:
        """Where each request starts in ``data``, ``[batch_size + 1]``, in bytes.

        On a GPU it is worked out at each use, unless it was given, with the scratch of
        ``RaggedMask.pack``.
        """
        if (given := given_indptr(self)) is not None:
            return given
        op = "PackedMask.indptr"
        elements = _mask_indptr(op, self.qo_indptr, self.kv_indptr, for_this_call=True)
        return offsets_in_bytes(op, elements)

    def __len__(self) -> int:
        """Number of requests."""
        return self.batch_size

    def validate(self) -> None:
        """Check the values, on the host. Synchronises if the mask is on a GPU.

        Raises
        ------
        ValueError
            An indptr that does not start at 0 or falls, or a request with fewer bytes than its
            mask needs, naming the request; data that ends before the last request.
        """
        op = "PackedMask.validate"
        qo_indptr, kv_indptr = values(self.qo_indptr), values(self.kv_indptr)
        elements = np.diff(_host_mask_indptr(op, qo_indptr, kv_indptr, _NO_LIMIT))
        indptr = values(self.indptr)
        check_indptr(op, "indptr", indptr, len(self.data), "bytes of data")
        needed, given = -(-elements // 8), np.diff(indptr)
        short = np.flatnonzero(given < needed)
        if len(short):
            b = int(short[0])
            raise ValueError(
                f"{op}: request {b} has {elements[b]} mask elements and needs {needed[b]} bytes, "
                f"but indptr[{b}] = {indptr[b]}, indptr[{b + 1}] = {indptr[b + 1]}"
            )


def given_indptr(mask: PackedMask) -> Array | None:
    """Give where requests start as the mask was told, None if it works it out."""
    return mask._indptr  # type: ignore[attr-defined]


Mask = RaggedMask | PackedMask


# ------------------------------------------------------------------------------------------- parts


def _checked(
    op: str, data: Array, dtype: np.dtype[Any], qo_indptr: Array, kv_indptr: Array
) -> dict[str, Array]:
    """Check the structure of a mask: its fields, sequences turned into arrays."""
    data = as_array(op, "data", data)
    qo_indptr = as_index(op, "qo_indptr", qo_indptr, data)
    kv_indptr = as_index(op, "kv_indptr", kv_indptr, data)
    home(op, data=data, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
    match(op, "data", data, ("n",), {})
    if dtype == _BOOL:
        _match_bool(op, "data", data)
    elif data.dtype != dtype:
        raise TypeError(f"{op}: data must be {dtype.name}, got {data.dtype.name}")
    match_indptr(op, "qo_indptr", qo_indptr)
    match_index(op, "kv_indptr", kv_indptr, len(qo_indptr))
    return {"data": data, "qo_indptr": qo_indptr, "kv_indptr": kv_indptr}


def _match_bool(op: str, name: str, array: Array) -> None:
    if array.dtype != _BOOL:
        raise TypeError(f"{op}: {name} must be bool, got {array.dtype.name}; pass {name} != 0")


def _host_mask_indptr(
    op: str, qo_indptr: np.ndarray, kv_indptr: np.ndarray, length: int
) -> np.ndarray[Any, Any]:
    """Where masks start in data of a length, from values that are checked first."""
    check_indptr(op, "qo_indptr", qo_indptr, _NO_LIMIT, "rows")
    check_indptr(op, "kv_indptr", kv_indptr, _NO_LIMIT, "tokens")
    sizes = np.diff(qo_indptr).astype(np.float64) * np.diff(kv_indptr)
    beyond = np.flatnonzero(np.cumsum(sizes) >= 2.0**63)
    if len(beyond):
        b = int(beyond[0])
        raise ValueError(f"{op}: int64 does not count the elements of the masks to request {b}")
    indptr = reference.mask_indptr(qo_indptr, kv_indptr)
    if indptr[-1] > length:
        b = int(np.flatnonzero(indptr[1:] > length)[0])
        raise ValueError(
            f"{op}: data must be [sum(qo_len * kv_len) = {indptr[-1]}] or longer, got [{length}]: "
            f"it ends before the mask of request {b} does"
        )
    return indptr


def _mask_indptr(
    op: str, qo_indptr: Array, kv_indptr: Array, *, for_this_call: bool = False
) -> Array:
    """Where masks start, as a result or for the launches of this call only."""
    if isinstance(qo_indptr, np.ndarray):
        return _host_mask_indptr(op, values(qo_indptr), values(kv_indptr), _NO_LIMIT)
    shape = (len(qo_indptr),)
    if for_this_call:
        out = allocate_scratch(op, shape, _INT64, qo_indptr)
    else:
        out = empty(op, shape, _INT64, cp, like=qo_indptr)
    if len(out) == 1:
        set_to_zero(out)
        return out
    kernel("mask_indptr", out.data.device_id)(
        *ONE_SCAN,
        qo_indptr=pack_index(qo_indptr),
        kv_indptr=pack_index(kv_indptr),
        indptr=pack_index(out),
    )
    return out
