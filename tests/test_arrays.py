"""Arrays in and out: dtypes by name, DLPack both ways, homes and devices that may not mix."""

import ast
import copy
import ctypes
import gc
import importlib
import os
import pickle
import warnings
from pathlib import Path

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import PagedCase, fake_cupy, random_rows
from tolerances import assert_same_bits, bits

import cukv
from cukv import _arrays
from cukv._arrays import as_array, as_dtype, home, read_only_reason, to_dlpack

FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
CODES = {"float16": 2, "bfloat16": 4, "float32": 2, "float8_e4m3fn": 10, "float8_e5m2": 12}


# Dtypes


@pytest.mark.parametrize("name", FLOATS)
def test_a_dtype_is_known_by_its_name_and_by_itself(name):
    dtype = as_dtype("op", "dtype", name)
    assert dtype.name == name
    assert as_dtype("op", "dtype", dtype) is dtype
    assert as_dtype("op", "dtype", dtype.type) is dtype


@pytest.mark.parametrize("dtype", ["half", "int32", "fp8", np.int8, np.complex64, None, 3, "e4m3"])
def test_a_dtype_that_is_not_supported_raises_and_lists_those_that_are(dtype):
    with pytest.raises(TypeError, match=r"op: out must be one of .*float8_e4m3fn.*, got"):
        as_dtype("op", "out", dtype) if dtype is not None else as_dtype("op", "out", object)


@pytest.mark.parametrize("name", FLOATS)
def test_memory_is_allocated_with_its_own_dtype(name, xp):
    array = _arrays.empty("op", (2, 3), as_dtype("op", "dtype", name), xp)
    assert isinstance(array, xp.ndarray)
    assert (array.dtype.name, array.shape) == (name, (2, 3))


def test_memory_of_another_library_is_refused():
    with pytest.raises(TypeError, match="op: xp must be cupy or numpy, got"):
        _arrays.empty("op", (2,), np.dtype(np.float32), "torch")


# DLPack: what a capsule says. A producer here exports NumPy memory, and may claim it is a GPU's.

DEVICE, NDIM, CODE, BITS = 8, 16, 20, 21  # offsets in a DLTensor
VERSIONED, FLAGS = 32, 24  # where it and the flags are in a versioned one


def tensor_address(capsule):
    """Address of a capsule's DLTensor."""
    return ctypes.addressof(_arrays._capsule_fields(capsule)[0]) - CODE


def read_code(capsule):
    """Type code and bits of a capsule."""
    address = tensor_address(capsule)
    return tuple(ctypes.c_uint8.from_address(address + at).value for at in (CODE, BITS))


class Producer:
    """Exports a NumPy array's bits as a GPU array of another type code."""

    def __init__(self, array, code, *, versioned=True, read_only=False, device=2):
        self.array, self.code, self.versioned = array, code, versioned
        self.read_only, self.device = read_only, device
        self.asked = []

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **kwargs):
        self.asked.append(kwargs)
        if not self.versioned and set(kwargs) - {"stream"}:
            raise TypeError(f"unexpected {set(kwargs) - {'stream'}}")
        capsule = self.array.__dlpack__(**({"max_version": (1, 0)} if self.versioned else {}))
        address = tensor_address(capsule)
        ctypes.c_int32.from_address(address + DEVICE).value = self.device
        ctypes.c_uint8.from_address(address + CODE).value = self.code
        if self.read_only:
            ctypes.c_uint64.from_address(address - VERSIONED + FLAGS).value |= 1
        return capsule


@pytest.fixture
def no_streams(monkeypatch):
    """Let CuPy import without asking a driver for the current stream."""
    from_dlpack = cp.from_dlpack
    request = {"stream": 1, "max_version": (1, 0), "copy": None, "dl_device": None}
    monkeypatch.setattr(cp, "from_dlpack", lambda x: from_dlpack(x.__dlpack__(**request)))
    monkeypatch.setattr(_arrays, "is_available", lambda: True)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("name", FLOATS)
def test_every_float_is_imported_with_its_dtype_and_without_a_copy(name, versioned, no_streams):
    host = np.arange(24, dtype=f"u{as_dtype('op', 'dtype', name).itemsize}").reshape(4, 6)[:, ::2]
    producer = Producer(host, CODES[name], versioned=versioned)
    array = as_array("op", "k", producer)
    assert isinstance(array, cp.ndarray)
    assert (array.dtype.name, array.shape) == (name, (4, 3))
    assert array.data.ptr == host.ctypes.data
    assert array.strides == host.strides
    assert producer.asked[-1]["stream"] == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_is_read_where_its_fields_are(versioned):
    host = np.zeros((2, 3), np.int16)
    capsule = host.__dlpack__(**({"max_version": (1, 0)} if versioned else {}))
    assert read_code(capsule) == (0, 16)
    assert ctypes.c_int32.from_address(tensor_address(capsule) + NDIM).value == 2
    assert _arrays._capsule_fields(capsule)[1] == 0


def test_the_read_only_flag_of_a_producer_is_seen(no_streams):
    host = np.zeros(4, np.uint16)
    assert read_only_reason(Producer(host, 4)) is None
    assert read_only_reason(Producer(host, 4, versioned=False)) is None
    assert "read-only by its producer" in read_only_reason(Producer(host, 4, read_only=True))


def test_numpy_arrays_say_themselves_whether_they_may_be_written():
    host = np.zeros(4)
    assert read_only_reason(host) is None
    host.flags.writeable = False
    assert "read-only" in read_only_reason(host)


def test_a_jax_array_is_never_writable_and_the_way_out_is_named(no_streams):
    class Array(Producer):
        pass

    Array.__module__ = "jaxlib._jax"
    array = Array(np.zeros(4, np.uint16), 4)
    assert read_only_reason(array, "merge_state_in_place").endswith("immutable")
    exported = ast.parse((Path(_arrays.__file__).parent / "jax/__init__.py").read_text()).body[-1]
    for op, name in _arrays._IN_JAX.items():
        assert f"cukv.jax.{name} " in read_only_reason(array, op)
        assert name in ast.literal_eval(exported.value)


@pytest.mark.parametrize("code", [4, 10])
def test_a_cache_that_may_not_be_written_refuses_append_before_anything_happens(code, no_streams):
    bits_ = np.zeros((3, 2, 16, 2, 8), np.uint16 if code == 4 else np.uint8)
    cache = cukv.PagedKVCache(Producer(bits_, code, read_only=True))
    table = cukv.PageTable(*(fake_cupy(n, np.int32) for n in ((2,), (1,), (1,))), 16)
    rows = fake_cupy((1, 2, 8), "bfloat16")
    with pytest.raises(TypeError, match=r"append: .* exported read-only"):
        cache.append(rows, rows, table)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kwargs", [{}, {"max_version": (1, 0)}], ids=["unversioned", "versioned"])
def test_every_float_is_exported_with_its_own_code_and_without_a_copy(name, kwargs, rng):
    data = random_rows(rng, (5, 2, 8), name)
    ragged = cukv.RaggedTensor(data, np.array([0, 5]))
    capsule = ragged.__dlpack__(**kwargs)
    assert read_code(capsule) == (CODES[name], 8 * data.dtype.itemsize)
    address = ctypes.c_void_p.from_address(tensor_address(capsule)).value
    assert address == data.ctypes.data
    assert ragged.__dlpack_device__() == (1, 0)


def test_exporting_leaves_the_array_as_it_was(rng):
    data = random_rows(rng, (5, 2, 8), "bfloat16")
    before = bits(data).copy()
    to_dlpack(data)
    assert data.dtype == ml_dtypes.bfloat16
    assert_same_bits(bits(data), before)


def test_a_pair_is_not_one_array_and_the_way_out_is_named(rng):
    case = PagedCase((3,), form="pair")
    cache, _ = case.nouns(case.arrays(rng))
    with pytest.raises(BufferError, match=r"PagedKVCache: .*\.k and \.v"):
        cache.__dlpack__()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            Producer(np.zeros(3, np.uint16), 4, device=1),
            r"k is in CPU memory \(Producer\); .*from_dlpack",
        ),
        (3.0, "k must be a CuPy, NumPy or DLPack array, got <class 'float'>"),
        (None, "k must be a CuPy, NumPy or DLPack array"),
        ("rows", "k must be a CuPy, NumPy or DLPack array"),
        ([1, 2], "k must be a CuPy, NumPy or DLPack array, got <class 'list'>"),
    ],
)
def test_what_is_no_array_raises_and_says_what_would_be(x, message):
    with pytest.raises(TypeError, match=f"op: {message}"):
        as_array("op", "k", x)


def test_a_noun_of_numpy_arrays_is_no_array_and_the_way_out_is_named():
    noun = cukv.RaggedTensor(np.zeros((2, 1, 8), np.float16), [0, 2])
    with pytest.raises(TypeError, match=r"^op: k must be an array, got a RaggedTensor: pass .data"):
        as_array("op", "k", noun)


def test_a_sequence_goes_to_the_home_of_the_array_beside_it():
    array = as_array("op", "indptr", [0, 3], np.zeros(1))
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [0, 3]
    assert as_array("op", "indptr", (), np.zeros(1)).shape == (0,)


@pytest.mark.parametrize(("bits_of", "hint"), [("uint8", "float8_e4m3fn"), ("uint16", "bfloat16")])
def test_plain_bits_are_refused_and_the_view_that_names_them_is_shown(bits_of, hint):
    for data in (np.zeros((3, 2, 16, 2, 8), bits_of), fake_cupy((3, 2, 16, 2, 8), bits_of)):
        with pytest.raises(TypeError, match=rf"\.view\(ml_dtypes\.{hint}"):
            cukv.PagedKVCache(data)


@pytest.mark.parametrize("device", [8, 10, 14])  # Metal, ROCm, oneAPI
def test_another_makers_device_is_not_taken_for_the_cpu(device):
    producer = Producer(np.zeros(4, np.uint16), CODES["bfloat16"], device=device)
    message = f"^op: k must be on a CUDA device, got DLPack's device type {device}$"
    with pytest.raises(TypeError, match=message):
        as_array("op", "k", producer)


# Subclasses of numpy.ndarray


def test_a_masked_array_is_refused_as_its_mask_would_be_lost():
    masked = np.ma.masked_array(np.ones((1, 2, 4), np.float16), mask=True)
    indptr = np.array([0, 1])
    for call in (
        lambda: cukv.RaggedTensor(masked, indptr),
        lambda: cukv.PagedKVCache((masked[None], masked[None])),
        lambda: cukv.packbits(masked),
        lambda: cukv.PageTable(np.ma.masked_array(indptr), [0], [1], 16),
    ):
        with pytest.raises(TypeError, match=r"is a masked array, .* pass \w+\.data or \w+\.filled"):
            call()


def test_memory_of_a_subclass_is_taken_as_it_is(tmp_path):
    shape = (3, 2, 4, 2, 8)
    mapped = np.memmap(tmp_path / "cache", np.float16, "w+", shape=shape)
    cache = cukv.PagedKVCache(mapped)
    assert type(cache.data) is np.ndarray
    rows = np.ones((1, 2, 8), np.float16)
    cache.append(rows, rows, cukv.PageTable.from_seq_lens([5], 4, xp=np))
    np.testing.assert_array_equal(mapped[1, :, 0], 1)
    read_only = cukv.PagedKVCache(np.memmap(tmp_path / "cache", np.float16, "r", shape=shape))
    with pytest.raises(TypeError, match="read-only"):
        read_only.copy_pages([0], [1])


# Homes and devices


def test_the_home_is_where_all_arrays_are():
    assert home("op", a=np.zeros(1), b=None, c=np.zeros(2)) is np
    assert home("op", a=None, b=fake_cupy((2,)), c=fake_cupy((3,))) is cp


def test_mixed_homes_raise_and_both_are_named():
    with pytest.raises(TypeError, match="op: q is in NumPy but k is on the GPU"):
        home("op", q=np.zeros(1), k=fake_cupy((1,)))
    with pytest.raises(TypeError, match="op: q is on the GPU but k is in NumPy"):
        home("op", q=fake_cupy((1,)), k=np.zeros(1))


def test_mixed_devices_raise_and_both_are_named():
    with pytest.raises(ValueError, match="op: q is on device 0 but k is on device 1"):
        home("op", q=fake_cupy((1,)), k=fake_cupy((1,), device=1))
    with pytest.raises(ValueError, match=r"device 1.*device 0"):
        cukv.PagedKVCache((fake_cupy((3, 16, 2, 8), device=1), fake_cupy((3, 16, 2, 8))))
    with pytest.raises(ValueError, match="device"):
        cukv.PageTable(*(fake_cupy(n, np.int32, d) for n, d in ((2, 1), (1, 1), (1, 0))), 16)


def test_a_call_mixes_no_homes_and_no_devices():
    cache = cukv.PagedKVCache(fake_cupy((3, 2, 16, 2, 8)))
    table = cukv.PageTable(*(fake_cupy(n, np.int32) for n in (2, 1, 1)), 16)
    there = cukv.PageTable(*(fake_cupy(n, np.int32, 1) for n in (2, 1, 1)), 16)
    rows, host_rows = fake_cupy((1, 2, 8)), np.zeros((1, 2, 8), np.float16)
    for k, v, t, error in [
        (host_rows, host_rows, table, TypeError),
        (rows, host_rows, table, TypeError),
        (
            rows,
            rows,
            table.__class__(np.array([0, 1]), np.array([0]), np.array([1]), 16),
            TypeError,
        ),
        (rows, fake_cupy((1, 2, 8), device=1), table, ValueError),
        (rows, rows, there, ValueError),
    ]:
        with pytest.raises(error, match="append: "):
            cache.append(k, v, t)


@pytest.mark.skipif(cukv.is_available(), reason="there is a GPU")
def test_without_a_gpu_what_needs_one_says_so_and_names_the_way_out():
    with pytest.raises(cukv.CudaUnavailableError, match=r"needs an NVIDIA GPU .*xp=numpy"):
        cukv.PagedKVCache.empty(3, 16, 2, 8, "float8_e4m3fn")
    with pytest.raises(cukv.CudaUnavailableError, match="to_device"):
        cukv.RaggedTensor(np.zeros((3, 2, 8)), np.array([0, 3])).to_device()
    with pytest.raises(cukv.CudaUnavailableError, match="warmup"):
        cukv.warmup()
    with pytest.raises(cukv.CudaUnavailableError, match="op: needs an NVIDIA GPU"):
        as_array("op", "k", Producer(np.zeros(4, np.uint16), CODES["bfloat16"]))


# On the GPU, with other libraries. They are on the machine that records.


def load(name):
    """Import a library; what it warns about is its own business."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def on_gpu(library, host):
    """Copy a NumPy array, of an extended float too, to the GPU in torch or JAX."""
    if library == "jax":
        return load("jax").numpy.asarray(host)
    torch = load("torch")
    if host.dtype.name in CODES:
        as_bits = torch.from_numpy(bits(host).view(f"i{host.dtype.itemsize}"))
        return as_bits.cuda().view(getattr(torch, host.dtype.name))
    return torch.from_numpy(host).cuda()


def address_of(library, array):
    """Address of a torch or JAX array's memory."""
    return array.data_ptr() if library == "torch" else array.unsafe_buffer_pointer()


LIBRARIES = ("torch", "jax")
# JAX makes int64 int32 unless told otherwise.
IMPORTED = [
    (library, name)
    for library in LIBRARIES
    for name in (*FLOATS, "bool", "int32", "int64")
    if (library, name) != ("jax", "int64")
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), IMPORTED)
def test_arrays_of_other_libraries_come_in_as_they_are(library, name, rng):
    if name in FLOATS:
        host = random_rows(rng, (5, 2, 8), name)
    else:
        host = (rng.random((5, 2, 8)) * 3).astype(name)
    theirs = on_gpu(library, host)
    ours = as_array("op", "k", theirs)
    assert isinstance(ours, cp.ndarray)
    assert ours.data.ptr == address_of(library, theirs)
    assert_same_bits(ours, host)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FLOATS)
def test_nouns_go_out_as_arrays_of_other_libraries(library, name, rng):
    host = cukv.RaggedTensor(random_rows(rng, (5, 2, 8), name), np.array([0, 2, 5]))
    ours = host.to_device()
    module = load("torch") if library == "torch" else load("jax").numpy
    theirs = module.from_dlpack(ours)
    assert address_of(library, theirs) == ours.data.data.ptr
    assert str(theirs.dtype).rpartition(".")[2] == name
    assert_same_bits(as_array("op", "k", theirs), host.data)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES)
def test_memory_lives_as_long_as_whoever_holds_it(library, rng):
    host = random_rows(rng, (512, 2, 64), "bfloat16")
    ours = cukv.RaggedTensor(on_gpu(library, host), cp.array([0, 512]))  # theirs is gone
    gc.collect()
    taken = [on_gpu(library, np.zeros_like(host)) for _ in range(4)]  # what is free, is written
    assert_same_bits(ours.data, host)

    module = load("torch") if library == "torch" else load("jax").numpy
    theirs = module.from_dlpack(cukv.RaggedTensor(host, np.array([0, 512])).to_device())
    gc.collect()
    taken += [cp.zeros(host.nbytes, np.uint8) for _ in range(4)]
    assert_same_bits(as_array("op", "k", theirs), host)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_step_takes_every_argument_from_another_library(library, rng):
    case = PagedCase((45, 8, 25, 22), dtype="bfloat16")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays)
    theirs = [on_gpu(library, x) for x in (arrays.indptr, arrays.indices, arrays.last_page_len)]
    their_table = cukv.PageTable(*theirs, case.page_size)
    own = cache.to_device()
    rows = random_rows(rng, (4, 2, 64), "bfloat16")
    their_rows = on_gpu(library, rows)
    own.append(their_rows, their_rows, their_table)
    cache.append(rows, rows, table)
    assert_same_bits(own.data, cache.data)
    for got, want in zip(
        own.gather(their_table, nnz=100), cache.gather(table, nnz=100), strict=True
    ):
        assert_same_bits(got.data, want.data)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_appending_to_a_jax_array_raises_and_leaves_it_as_it_was(rng):
    jnp = load("jax").numpy
    theirs = jnp.zeros((3, 2, 16, 2, 8), jnp.bfloat16)
    cache = cukv.PagedKVCache(theirs)
    table = cukv.PageTable.from_seq_lens([5], 16)
    rows = cp.ones((1, 2, 8), ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"append: .*jax\.Array.*cukv\.jax"):
        cache.append(rows, rows, table)
    assert not np.asarray(theirs).any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_appending_to_a_torch_tensor_writes_it():
    torch = load("torch")
    theirs = torch.zeros((3, 2, 16, 2, 8), dtype=torch.float8_e4m3fn, device="cuda")
    cache = cukv.PagedKVCache(theirs)
    rows = cp.ones((1, 2, 8), cp.float16)
    cache.append(rows, rows, cukv.PageTable.from_seq_lens([5], 16))
    cp.cuda.get_current_stream().synchronize()
    written = theirs.float().cpu().numpy()
    assert written.sum() == 2 * 2 * 8
    assert (written[0, :, 4] == 1).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_rows_that_their_producer_has_not_finished_are_waited_for():
    torch = load("torch")
    produced, ours = torch.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
    table = cukv.PageTable.from_seq_lens([1], 16)
    cache = cukv.PagedKVCache(cp.zeros((1, 2, 16, 2, 8), cp.float16))
    cache.append(*[cp.zeros((1, 2, 8), cp.float16)] * 2, table)  # compiled from here on
    cp.cuda.Device().synchronize()
    for i in range(1, 1001):
        with torch.cuda.stream(produced):
            rows = torch.zeros((1, 2, 8), dtype=torch.float16, device="cuda")
            torch.cuda._sleep(1_000_000)  # cycles: longer than to queue the rest
            rows.fill_(i)
            with ours:
                cache.append(rows, rows, table)
                got = cache.gather(table, nnz=1)[0].data.get(stream=ours)
        assert (got == i).all()
    torch.cuda.synchronize()


# Moving and copying nouns


@pytest.mark.parametrize("form", ["5d", "pair", "views"])
@pytest.mark.parametrize("name", FLOATS)
def test_nouns_travel_and_are_copied_bit_for_bit(name, form, xp, rng):
    case = PagedCase((45, 0, 8), dtype=name, layout="HND", form="pair" if form == "pair" else "5d")
    arrays = case.arrays(rng)
    there, table = case.nouns(arrays, xp)
    if form == "views":  # a pair whose arrays are not contiguous
        there = cukv.PagedKVCache((there.k, there.v), "HND")
    want = [bits(x).copy() for x in (there.k, there.v)]
    for twin in (there.to_host(), copy.deepcopy(there), pickle.loads(pickle.dumps(there))):
        assert twin.layout == "HND"
        assert twin.dtype.name == name
        for got, expected in zip((twin.k, twin.v), want, strict=True):
            assert_same_bits(bits(got), expected)
    for twin in (copy.deepcopy(there), pickle.loads(pickle.dumps(there))):
        assert isinstance(twin.k, xp.ndarray)
        twin.append(*[xp.ones((3, 2, 64), np.float16)] * 2, table)  # a buffer of its own
    assert_same_bits(bits(there.k), want[0])
    assert_same_bits(table.to_host().indices, arrays.indices)
