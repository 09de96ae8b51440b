"""Where appended rows go: the request and the token index of each."""

from __future__ import annotations

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import INDEX_DTYPES, Array, as_array, empty, home
from cukv._check import check_indptr, check_rows_fit, match_index, narrow, values, whole_number
from cukv._index import SEQUENCES, as_index, pack_index
from cukv._kernels import kernel, one_per_warp

_INT32 = INDEX_DTYPES[0]


def batch_indices_positions(append_indptr: Array, seq_lens: Array, nnz: int) -> tuple[Array, Array]:
    """Find the request and the token index of every appended row.

    The rows of a request are the last rows of its sequence, whose length counts them already.

    Parameters
    ----------
    append_indptr : [batch_size + 1] int32 or int64, or a sequence
        Offsets of each request's rows.
    seq_lens : [batch_size] int32 or int64, or a sequence
        Tokens of each request, the appended ones included.
    nnz : int
        Length of the row axis; rows at or past ``append_indptr[-1]`` are padding.

    Returns
    -------
    batch_indices, positions : [nnz] int32
        -1 and 0 for padding.

    Raises
    ------
    TypeError, ValueError
        Wrong home, dtype or shape; on NumPy also a request with more rows than tokens, and more
        rows than ``nnz``.

    Notes
    -----
    Current stream, no synchronisation. Source: kernels/batch_indices_positions.cu.

    Examples
    --------
    >>> import numpy as np
    >>> batch_indices_positions(np.array([0, 2, 3]), np.array([10, 1]), nnz=4)
    (array([ 0,  0,  1, -1], dtype=int32), array([8, 9, 0, 0], dtype=int32))
    """
    op = "batch_indices_positions"
    like = None if isinstance(seq_lens, SEQUENCES) else as_array(op, "seq_lens", seq_lens)
    append_indptr = as_index(op, "append_indptr", append_indptr, like)
    seq_lens = as_index(op, "seq_lens", seq_lens, append_indptr)
    xp = home(op, append_indptr=append_indptr, seq_lens=seq_lens)
    match_index(op, "append_indptr", append_indptr, len(seq_lens) + 1)
    match_index(op, "seq_lens", seq_lens)
    nnz = whole_number(op, "nnz", nnz, 0)
    if xp is np:
        check_indptr(op, "append_indptr", values(append_indptr), nnz, "rows (nnz)")
        check_rows_fit(op, append_indptr, seq_lens)
        batch_indices, positions = reference.batch_indices_positions(append_indptr, seq_lens, nnz)
        return narrow(op, batch_indices, _INT32), narrow(op, positions, _INT32)
    batch_indices, positions = (empty(op, (nnz,), _INT32, cp, like=append_indptr) for _ in range(2))
    if nnz:
        kernel("batch_indices_positions", append_indptr.data.device_id)(
            *one_per_warp(nnz),
            append_indptr=pack_index(append_indptr),
            seq_lens=pack_index(seq_lens),
            batch_indices=pack_index(batch_indices),
            positions=pack_index(positions),
        )
    return batch_indices, positions
