"""What all nouns share: frozen, compared by identity, shown unread, copied and moved whole."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import cupy as cp
import numpy as np
import pytest
from cases import NOUNS, arange, fake_array, fake_cupy, host_array, on
from tolerances import assert_same_bits, bits, to_numpy

import cukv
from cukv._noun import _arrays


def at(xp):
    return lambda shape, dtype="float16": on(xp, host_array(shape, dtype))


def refuse_to_read(monkeypatch):
    """Make every way from the GPU to the host fail."""

    def read(*args, **kwargs):
        raise AssertionError("the device was read")

    monkeypatch.setattr(cp, "asnumpy", read)
    monkeypatch.setattr("cukv._check.values", read)


@pytest.mark.parametrize("name", NOUNS)
def test_a_noun_is_frozen(name):
    noun = NOUNS[name](host_array)
    for field in dataclasses.fields(noun):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(noun, field.name, None)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(noun, field.name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        noun.something = 1


@pytest.mark.parametrize("make", [host_array, fake_array], ids=["host", "device"])
@pytest.mark.parametrize("name", NOUNS)
def test_equality_is_identity_and_nouns_hash(name, make):
    noun, other = NOUNS[name](make), NOUNS[name](make)
    same = type(noun)(*(getattr(noun, f.name) for f in dataclasses.fields(noun)))
    assert noun == noun
    assert noun != other
    assert noun != same
    assert len({noun, other, same, noun}) == 3
    assert {noun: 1}[noun] == 1


@pytest.mark.parametrize("name", NOUNS)
def test_what_is_no_axes_is_not_drawn_on_and_a_table_has_another_name(name):
    noun, table = (NOUNS[key](host_array) for key in (name, "PageTable"))
    with pytest.raises(
        TypeError, match=r"^\w+.plot: ax must be axes of matplotlib, got <class 'int"
    ):
        noun.plot(3)
    with pytest.raises(TypeError, match=r"got <class .*PageTable'>; pass it as table=$"):
        noun.plot(table)


@pytest.mark.parametrize("name", NOUNS)
def test_a_noun_is_shown_by_names_dtypes_and_shapes(name, monkeypatch):
    refuse_to_read(monkeypatch)
    for make, where in ((host_array, "numpy"), (fake_array, "cuda:0")):
        shown = repr(NOUNS[name](make))
        assert shown.startswith(name.split()[0] + "(")
        assert shown.endswith(f", device={where})")
        assert "array" not in shown
        assert len(shown) < 400
    there = NOUNS[name](lambda shape, dtype="float16": fake_array(shape, dtype, 1))
    assert repr(there).endswith("device=cuda:1)")


def test_a_large_noun_is_shown_at_once():
    shown = repr(cukv.PagedKVCache(fake_cupy((700_000, 2, 16, 8, 128), "bfloat16")))
    assert (
        shown == "PagedKVCache(data=bfloat16[700000, 2, 16, 8, 128], layout='NHD', device=cuda:0)"
    )
    levels = NOUNS["CascadeLevels"](fake_array)
    assert "tables=(PageTable(indptr=int32[2], indices=int32[5]" in repr(levels)


@pytest.mark.parametrize("name", NOUNS)
def test_copies_own_their_buffers(xp, name):
    noun = NOUNS[name](at(xp))
    before = [bits(a).copy() for a in _arrays(noun)]
    for twin in (copy.deepcopy(noun), pickle.loads(pickle.dumps(noun))):
        assert type(twin) is type(noun)
        assert twin != noun
        assert repr(twin) == repr(noun)
        for got, mine, want in zip(_arrays(twin), _arrays(noun), before, strict=True):
            assert isinstance(got, xp.ndarray)
            assert_same_bits(bits(got), want)
            assert not xp.shares_memory(*(
                a.view(np.uint8) if a.dtype.itemsize == 1 else a for a in (got, mine)))  # fmt: skip
            if got.dtype.itemsize == 1:
                got.view(np.uint8)[...] = 77
            else:
                got.view(f"u{got.dtype.itemsize}")[...] = 77
        for mine, want in zip(_arrays(noun), before, strict=True):
            assert_same_bits(bits(mine), want)


def test_a_copy_of_a_view_is_whole_and_writable(xp):
    whole = on(xp, arange((6, 3, 2, 4, 2, 8)))
    if xp is np:
        whole.flags.writeable = False
    cache = cukv.PagedKVCache(whole[::-1, 1])
    twin = copy.deepcopy(cache)
    assert_same_bits(twin.data, to_numpy(cache.data))
    rows = on(xp, np.ones((1, 2, 8), np.float16))
    twin.append(rows, rows, cukv.PageTable.from_seq_lens([1], 4, on(xp, np.array([2]))))
    assert_same_bits(cache.data, arange((6, 3, 2, 4, 2, 8))[::-1, 1].copy())


def test_copies_append_on_their_own(xp):
    cache = cukv.PagedKVCache(on(xp, np.zeros((3, 2, 4, 2, 8), np.float16)))
    table = cukv.PageTable.from_seq_lens([1], 4, on(xp, np.array([2])))
    rows = on(xp, np.ones((1, 2, 8), np.float16))
    cache.append(rows, rows, table)
    twin = copy.deepcopy(cache)
    twin.append(rows + 1, rows + 1, table)
    assert (to_numpy(cache.k)[2, 0] == 1).all()
    assert (to_numpy(twin.k)[2, 0] == 2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NOUNS)
def test_nouns_move_between_homes_bit_for_bit(name):
    noun = NOUNS[name](host_array)
    there = noun.to_device()
    assert all(isinstance(a, cp.ndarray) for a in _arrays(there))
    back = there.to_host()
    for got, want in zip(_arrays(back), _arrays(noun), strict=True):
        assert_same_bits(got, want)
        assert not np.shares_memory(got, want)
    assert there.to_device() is there


@pytest.mark.parametrize("name", NOUNS)
def test_a_noun_that_is_at_home_stays_itself(name):
    noun = NOUNS[name](host_array)
    assert noun.to_host() is noun
    there = NOUNS[name](fake_array)
    assert there.to_device() is there


UNPICKLE = """
import pickle, sys
noun = pickle.loads(sys.stdin.buffer.read())
print(repr(noun))
"""


def test_a_pickle_is_read_in_another_process():
    noun = NOUNS["PagedKVCache pair"](host_array)
    run = subprocess.run(
        [sys.executable, "-c", UNPICKLE],
        input=pickle.dumps(noun),
        capture_output=True,
        check=False,
        cwd=Path(cukv.__file__).parent.parent,
    )
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.decode().strip() == repr(noun)


EXPORTED = ["RaggedTensor", "RaggedTensor HND", "RaggedMask", "PackedMask", "PagedKVCache",
            "MLAPagedCache"]  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_data_is_exported_without_a_copy(xp, name):
    noun = NOUNS[name](at(xp))
    got = xp.from_dlpack(noun)
    assert_same_bits(got, to_numpy(noun.data))
    assert xp.shares_memory(got, noun.data)
    assert noun.__dlpack_device__() == noun.data.__dlpack_device__()


@pytest.mark.parametrize(
    ("name", "parts"), [("PagedKVCache pair", ".k and .v"), ("MLAPagedCache pair", ".ckv and .kpe")]
)
def test_a_pair_is_not_one_array_and_the_way_out_is_named(name, parts):
    noun = NOUNS[name](host_array)
    for call in (noun.__dlpack__, noun.__dlpack_device__):
        with pytest.raises(BufferError, match=f"^{type(noun).__name__}: a pair .*{parts}$"):
            call()


def test_tables_and_levels_export_their_arrays_only():
    for name in ("PageTable", "CascadeLevels"):
        assert not hasattr(NOUNS[name](host_array), "__dlpack__")


def test_nouns_keep_no_reference_cycle():
    # A cache of gigabytes must go when its last name goes, not when the collector comes.
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        for name in NOUNS:
            noun = NOUNS[name](host_array)
            if name.startswith("PagedKVCache"):
                dims = noun.head_dim, noun.head_dim_vo
                rows = [np.zeros((1, 2, d), noun.dtype) for d in dims]
                noun.append(*rows, cukv.PageTable.from_seq_lens([1], 4, xp=np))
            gone = weakref.ref(noun)
            del noun
            assert gone() is None, name
    finally:
        gc.enable()
