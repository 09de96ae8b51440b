"""Cases: shapes of a problem as a frozen dataclass with a readable id, and its poisoned arrays.

Memory that an operation must not read is poisoned: unowned pages and slots past ``kv_len`` are NaN,
page ids are shuffled with gaps, and ``indices`` goes on past ``indptr[-1]`` with ids that are not
pages. A test makes the arrays on the host and the nouns in the home it is about::

    case = PagedCase((45, 8, 25, 22), page_size=16, dtype="bfloat16", layout="HND")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)  # NumPy's share memory with arrays
"""

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from brute import slot
from capturing import capturing

import cukv
from cukv._arrays import DTYPES, as_dtype

_FLOATS = {dtype.name: dtype for dtype in DTYPES}


def random_rows(rng, shape, dtype):
    """Draw normal values, rounded to a dtype or its name."""
    return rng.standard_normal(shape, np.float32).astype(as_dtype("cases", "dtype", dtype))


def on(xp, array):
    """Copy a NumPy array to a home, fp8 as the bytes it is; NumPy's own stays itself."""
    if xp is np:
        return array
    if array.dtype.name.startswith("float8"):
        return cp.asarray(array.view(np.uint8)).view(array.dtype)
    return cp.asarray(array)


def fake_cupy(shape, dtype="float16", device=0):
    """Make a CuPy array over memory that is not there: for checks, which read none."""
    dtype = np.dtype(_FLOATS.get(dtype, dtype))
    size = max(int(np.prod(shape)) * dtype.itemsize, 1)
    memory = cp.cuda.UnownedMemory(1 << 20, size, None, device_id=device)
    return cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))


class DLPackOnly:
    """A GPU array of another library: nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@contextlib.contextmanager
def captured(call, ready=lambda: None):
    """Capture a call in a graph, in global mode: give (stream, graph, what the call returned).

    The stream is a new one, current in the block and ordered with no other. The call has run on it
    twice, so that all is compiled and the pool holds what the call needs; then ``ready`` has run.
    """
    with cp.cuda.Stream(non_blocking=True) as stream:
        cp.cuda.Device().synchronize()  # arrays made before are there
        for _ in range(2):
            call()
        ready()
        stream.synchronize()
        with capturing(stream) as graphs:
            result = call()
        yield stream, graphs[0], result


def indptr_of(lens, dtype="int32"):
    """Prefix sum of lengths, from 0."""
    return np.cumsum([0, *lens]).astype(dtype)


def poison(shape, dtype):
    """Make an array of NaNs with every bit below the sign set: 0x7f for fp8, 0x7fff for halves."""
    return np.full(shape, 2 ** (8 * dtype.itemsize - 1) - 1, f"u{dtype.itemsize}").view(dtype)


class PagedArrays(NamedTuple):
    """What a case is made of, on the host."""

    data: Any  # the cache: one array or a pair
    indptr: Any
    indices: Any
    last_page_len: Any
    k: Any  # [nnz, heads, dim] the owned rows in order of request and position; ckv of MLA
    v: Any  # [nnz, heads, dim_vo] likewise; kpe of MLA


class Rows(NamedTuple):
    """Where appended rows go."""

    arguments: dict[str, Any]  # of append, on the host
    at: list[tuple[int, int] | None]  # request and position of each row; None: it is skipped


WAYS = ("indptr", "positions", "last")


@dataclass(frozen=True)
class _Pages:
    """Requests of given lengths on shuffled pages."""

    kv_lens: tuple[int, ...]
    page_size: int = 16

    @property
    def batch_size(self):
        """Number of requests."""
        return len(self.kv_lens)

    @property
    def nnz(self):
        """Tokens of all requests."""
        return sum(self.kv_lens)

    @property
    def pages(self):
        """Pages of each request."""
        return [-(-kv_len // self.page_size) for kv_len in self.kv_lens]

    @property
    def last_page_len(self):
        """Tokens in each request's last page; any value counts for a request without pages."""
        return [(kv_len - 1) % self.page_size + 1 if kv_len else 7 for kv_len in self.kv_lens]

    @property
    def max_num_pages(self):
        """Pages of the cache: more than are owned."""
        return 2 * sum(self.pages) + 3

    def _table(self, rng, index_dtype):
        """Give indptr, indices with poisoned padding, and last_page_len."""
        owned = rng.permutation(self.max_num_pages)[: sum(self.pages)]
        huge = np.iinfo(index_dtype).max
        indices = np.array([*owned, huge, -1, huge, -1, huge], index_dtype)
        last = np.array(self.last_page_len, index_dtype)
        return indptr_of(self.pages, index_dtype), indices, last

    def rows(self, way, rng):
        """Give rows to append in one of the three WAYS of saying where they go, padding too."""
        everywhere = [(b, t) for b, kv_len in enumerate(self.kv_lens) for t in range(kv_len)]
        if way == "indptr":  # uneven, requests without rows, one whole sequence
            counts = [int(rng.integers(0, kv_len + 1)) for kv_len in self.kv_lens]
            counts[:1] = self.kv_lens[:1]
            at = [(b, t) for b, t in everywhere if t >= self.kv_lens[b] - counts[b]]
            return Rows({"indptr": indptr_of(counts)}, [*at, None, None, None])
        if way == "last":
            at = [(b, kv_len - 1) if kv_len else None for b, kv_len in enumerate(self.kv_lens)]
            return Rows({}, [*at, None, None])
        # Past kv_len inside the last page is the request's own place; all the rest is nobody's.
        own = [(b, n) for b, n in enumerate(self.kv_lens) if n % self.page_size]
        chosen = [place for place in everywhere + own if rng.random() < 0.7]
        nobody = [(-1, 0), (-1, -1), (self.batch_size, 0), (-(2**31), 3), (2**31 - 1, 0)]
        for b, pages in enumerate(self.pages):
            nobody += [(b, pages * self.page_size), (b, -1), (b, 2**31 - 1)]
        pairs = [*((place, place) for place in chosen), *((place, None) for place in nobody)]
        pairs = [pairs[i] for i in rng.permutation(len(pairs))]
        batch_indices, positions = np.array([place for place, _ in pairs], np.int32).T
        arguments = {"batch_indices": batch_indices, "positions": positions}
        return Rows(arguments, [at for _, at in pairs])

    def where(self, rows, given):
        """Say where ``rows`` go that are ``given``: a RaggedTensor's own offsets must not count."""
        if rows.arguments or not isinstance(given, cukv.RaggedTensor):
            return rows.arguments
        pairs = np.array([place or (-1, 0) for place in rows.at], np.int32).reshape(-1, 2)
        return dict(zip(("batch_indices", "positions"), pairs.T, strict=True))

    def write(self, arrays, store, rows, at):
        """Do by hand what append does to one storage array, seen as ``stores`` gives it."""
        for row, place in zip(rows, at, strict=True):
            if place is not None:
                store[slot(arrays.indptr, arrays.indices, self.page_size, *place)] = row

    def _slots(self, indptr, indices):
        """Page and entry of every token, in order of request and position."""
        positions = [np.arange(kv_len) for kv_len in self.kv_lens]
        pages = [
            indices[first + at // self.page_size]
            for first, at in zip(indptr, positions, strict=False)
        ]
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *pages]), np.concatenate([empty, *positions]) % self.page_size


@dataclass(frozen=True)
class PagedCase(_Pages):
    """A paged cache. ``form`` is "5d" (one array) or "pair", which may have two head_dims."""

    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_vo: int | None = None
    dtype: str = "float16"
    layout: str = "NHD"
    form: str = "5d"
    index_dtype: str = "int32"

    def __str__(self):
        dims = f"{self.head_dim}" + (f"/{self.head_dim_vo}" if self.head_dim_vo else "")
        index = "" if self.index_dtype == "int32" else f"-{self.index_dtype}"
        return (
            f"{_lens(self.kv_lens)}-page{self.page_size}-heads{self.num_kv_heads}x{dims}"
            f"-{self.dtype}-{self.layout}-{self.form}{index}"
        )

    def arrays(self, rng):
        """Make the case's arrays: PagedArrays on the host, with poison where nobody may read."""
        dtype = as_dtype("cases", "dtype", self.dtype)
        dims = (self.head_dim, self.head_dim_vo or self.head_dim)
        nhd = (self.max_num_pages, self.page_size, self.num_kv_heads)
        axes = (0, 1, 2, 3) if self.layout == "NHD" else (0, 2, 1, 3)
        if self.form == "5d":
            assert dims[0] == dims[1], "one 5-D array has one head_dim"
            shape = [nhd[axis] for axis in axes[:3]]
            data = poison((shape[0], 2, *shape[1:], dims[0]), dtype)
            stores = data[:, 0], data[:, 1]
        else:
            data = stores = tuple(
                poison((*(nhd[axis] for axis in axes[:3]), dim), dtype) for dim in dims
            )
        indptr, indices, last = self._table(rng, self.index_dtype)
        rows = []
        for store, dim in zip(stores, dims, strict=True):
            rows.append(random_rows(rng, (self.nnz, self.num_kv_heads, dim), dtype))
            store.transpose(axes)[self._slots(indptr, indices)] = rows[-1]
        return PagedArrays(data, indptr, indices, last, *rows)

    def nouns(self, arrays, xp=np):
        """Give (PagedKVCache, PageTable) over the arrays: themselves on NumPy, copies on CuPy."""
        cache = cukv.PagedKVCache(arrays.data, self.layout)
        return _at_home(xp, cache, *_page_table(arrays, self.page_size))

    def stores(self, data):
        """See K and V of a cache's data, of either home, as [pages, page_size, heads, dim]."""
        pair = data if self.form == "pair" else (data[:, 0], data[:, 1])
        return [s if self.layout == "NHD" else s.swapaxes(1, 2) for s in pair]

    def queries(self, rng, num_rows, num_qo_heads):
        """Draw queries [num_rows, num_qo_heads, head_dim] of the cache's dtype, bf16 for fp8."""
        dtype = "bfloat16" if self.dtype.startswith("float8") else self.dtype
        return random_rows(rng, (num_rows, num_qo_heads, self.head_dim), dtype)


@dataclass(frozen=True)
class MLACase(_Pages):
    """An MLA cache. ``form`` is "one" (ckv and kpe side by side in one array) or "pair"."""

    head_dim_ckv: int = 512
    head_dim_kpe: int = 64
    dtype: str = "float16"
    form: str = "one"
    index_dtype: str = "int32"

    def __str__(self):
        index = "" if self.index_dtype == "int32" else f"-{self.index_dtype}"
        return (
            f"{_lens(self.kv_lens)}-page{self.page_size}-{self.head_dim_ckv}+{self.head_dim_kpe}"
            f"-{self.dtype}-{self.form}{index}"
        )

    def arrays(self, rng):
        """Make the case's arrays: as PagedCase's, with k = ckv and v = kpe, [nnz, 1, dim]."""
        dtype = as_dtype("cases", "dtype", self.dtype)
        dims = (self.head_dim_ckv, self.head_dim_kpe)
        pages = (self.max_num_pages, self.page_size)
        if self.form == "one":
            data = poison((*pages, sum(dims)), dtype)
            stores = data[..., : dims[0]], data[..., dims[0] :]
        else:
            data = stores = tuple(poison((*pages, dim), dtype) for dim in dims)
        indptr, indices, last = self._table(rng, self.index_dtype)
        rows = []
        for store, dim in zip(stores, dims, strict=True):
            rows.append(random_rows(rng, (self.nnz, 1, dim), dtype))
            store[self._slots(indptr, indices)] = rows[-1][:, 0]
        return PagedArrays(data, indptr, indices, last, *rows)

    def stores(self, data):
        """See ckv and kpe of a cache's data, of either home, as [pages, page_size, 1, dim]."""
        split = self.head_dim_ckv
        pair = data if self.form == "pair" else (data[..., :split], data[..., split:])
        return [s[:, :, None] for s in pair]

    def nouns(self, arrays, xp=np):
        """Give (MLAPagedCache, PageTable) over the arrays: themselves on NumPy, copies on CuPy."""
        dims = {} if self.form == "pair" else {"head_dim_kpe": self.head_dim_kpe}
        cache = cukv.MLAPagedCache(arrays.data, **dims)
        return _at_home(xp, cache, *_page_table(arrays, self.page_size))


def _lens(kv_lens):
    shown = ",".join(map(str, kv_lens[:6])) or "none"
    return shown if len(kv_lens) <= 6 else f"{shown},..x{len(kv_lens)}"


def _page_table(arrays, page_size):
    return [cukv.PageTable(arrays.indptr, arrays.indices, arrays.last_page_len, page_size)]


def _at_home(xp, *nouns):
    return nouns if xp is np else tuple(noun.to_device() for noun in nouns)


# Nouns of every kind

BF16, FP8 = _FLOATS["bfloat16"], _FLOATS["float8_e4m3fn"]


def arange(shape, dtype="float16"):
    """Number the elements of an array, so that every copy can be told from it."""
    dtype = np.dtype(dtype)
    if dtype.kind == "i":
        return np.zeros(shape, dtype)
    size = int(np.prod(shape))
    return (np.arange(size) % 100).astype(f"u{dtype.itemsize}").view(dtype).reshape(shape)


def _make_table(make, page_size=4):
    return cukv.PageTable(*(make(n, "int32") for n in (3, 5, 2)), page_size)


# Every noun, in every form, over arrays that ``make(shape, dtype)`` gives.
NOUNS = {
    "RaggedTensor": lambda make: cukv.RaggedTensor(make((5, 2, 8)), make(3, "int32")),
    "RaggedTensor HND": lambda make: cukv.RaggedTensor(make((2, 5, 8)), make(3, "int64"), "HND"),
    "RaggedMask": lambda make: cukv.RaggedMask(
        make(30, "bool"), make(3, "int32"), make(3, "int32")
    ),
    "PackedMask": lambda make: cukv.PackedMask(
        make(9, "uint8"), make(3, "int32"), make(3, "int32"), make(3, "int64")
    ),
    "PackedMask without indptr": lambda make: cukv.PackedMask(
        make(9, "uint8"), make(3, "int32"), make(3, "int32")
    ),
    "PageTable": _make_table,
    "PagedKVCache": lambda make: cukv.PagedKVCache(make((3, 2, 4, 2, 8))),
    "PagedKVCache HND": lambda make: cukv.PagedKVCache(make((3, 2, 2, 4, 8), FP8), "HND"),
    "PagedKVCache pair": lambda make: cukv.PagedKVCache(
        (make((3, 4, 2, 8), BF16), make((3, 4, 2, 16), BF16))
    ),
    "MLAPagedCache": lambda make: cukv.MLAPagedCache(make((3, 4, 24)), 8),
    "MLAPagedCache pair": lambda make: cukv.MLAPagedCache((make((3, 4, 16), FP8), make((3, 4, 8)))),
    "CascadeLevels": lambda make: cukv.CascadeLevels(
        (make(2, "int32"), make(3, "int32")),
        (
            cukv.PageTable(make(2, "int32"), make(5, "int32"), make(1, "int32"), 4),
            _make_table(make),
        ),
    ),
    "CascadeLevels with an order": lambda make: cukv.CascadeLevels(
        (make(3, "int32"),), (_make_table(make),), make(2, "int32")
    ),
}


def host_array(shape, dtype="float16"):
    """Make an array on the host: zeros of index and truth values, numbered elements of others."""
    dtype = np.dtype(dtype)
    return np.zeros(shape, dtype) if dtype.kind in "bui" else arange(shape, dtype)


def fake_array(shape, dtype="float16", device=0):
    """Make a CuPy array of any dtype over memory that is not there."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "bu":
        return fake_cupy(shape, dtype.name, device)
    memory = cp.cuda.UnownedMemory(1 << 20, 1 << 12, None, device_id=device)
    return cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))
