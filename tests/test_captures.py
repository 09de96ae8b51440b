"""Launches whose inputs are ready: only right behind one of their own that writes none of them."""

import ctypes
import dataclasses
import functools
from types import SimpleNamespace

import cupy as cp
import numpy as np
import pytest
from cases import BF16, DLPackOnly, PagedCase, captured, on
from fake_gpus import FakeGpus
from tolerances import assert_same_bits

import cukv
from cukv import RaggedTensor, _attention_launch, _captures
from cukv._geometry import DecodeTile, PrefillTile

CAPTURED, LEGACY = 64, 0  # streams
FOREIGN = (1, 0xF0)  # a node that is not this module's


def at(address, num_bytes=256):
    """Make bytes at an address where there is no memory."""
    memory = cp.cuda.UnownedMemory(address, num_bytes, None, device_id=0)
    return cp.ndarray((num_bytes,), np.uint8, memptr=cp.cuda.MemoryPointer(memory, 0))


@pytest.fixture
def capture(monkeypatch):
    """A capture that is not there. ``read`` launches; ``node`` is the stream's last one."""
    state = SimpleNamespace(stream=CAPTURED, node=FOREIGN, given=None, launches=0, recorded=None)
    state.device = 0

    def launch(*arguments):
        *_, state.given = arguments
        state.launches += 1
        if state.stream == CAPTURED and state.recorded is None and state.device == 0:
            state.node = (1, state.launches)

    def read(reads, writes):
        _captures.launch_overlapping(launch, ("table",), 0, reads, writes)
        return state.given

    def is_capturing(stream):
        assert stream != LEGACY  # which must not be asked while another is captured
        return stream == CAPTURED

    state.read = read
    for name, fake in (
        ("_last", _captures._LastLaunch()),
        ("get_current_stream", lambda: SimpleNamespace(ptr=state.stream)),
        ("streamIsCapturing", is_capturing),
        ("getDevice", lambda: state.device),
        ("recorder", SimpleNamespace(work=None)),
        ("_last_node", lambda stream: state.node),
    ):
        monkeypatch.setattr(_captures, name, fake)
    return state


K, V, Q, OUT = (at(address << 20) for address in (1, 2, 3, 4))


def test_a_launch_right_behind_one_of_its_kind_need_not_wait(capture):
    assert capture.read((K, V, Q, None), (OUT, None)) == 0  # behind whatever was captured before
    assert capture.read((K, V, Q), (OUT,)) == 1
    assert capture.read((K, V, Q), (OUT,)) == 1


def test_whatever_is_captured_between_is_waited_for(capture):
    capture.read((K, V, Q), (OUT,))
    capture.node = FOREIGN
    assert capture.read((K, V, Q), (OUT,)) == 0
    capture.node = None  # several nodes, or a driver that does not say
    assert capture.read((K, V, Q), (OUT,)) == 0
    capture.node = FOREIGN
    assert capture.read((K, V, Q), (OUT,)) == 0


def test_a_node_of_another_capture_is_another_node(capture):
    capture.read((K, V, Q), (OUT,))
    capture.node = (2, capture.node[1])
    assert capture.read((K, V, Q), (OUT,)) == 0


@pytest.mark.parametrize("read", [K, V, Q])
@pytest.mark.parametrize("offset", [-255, 0, 255])
def test_what_the_launch_before_writes_is_waited_for(capture, read, offset):
    capture.read((K, V, Q), (at(read.data.ptr + offset), None))
    assert capture.read((K, V, Q), (OUT,)) == 0


@pytest.mark.parametrize("offset", [-256, 256])
def test_memory_beside_what_is_read_is_not_waited_for(capture, offset):
    capture.read((K, V, Q), (None, at(K.data.ptr + offset)))
    assert capture.read((K, V, Q), (OUT,)) == 1


def test_strides_of_either_sign_are_seen(capture):
    rows = at(K.data.ptr - 1024, 1024 + 256)[::-2]
    capture.read((V, Q), (rows,))
    assert capture.read((K, V, Q), (OUT,)) == 0


def test_arrays_of_other_libraries_may_be_anywhere(capture):
    capture.read((K, V, Q), (OUT,))
    assert capture.read((K, V, Q, DLPackOnly(K)), (OUT,)) == 0
    assert capture.read((K, V, Q, 2.0, np.float32(3.0), np.ones(1)), (OUT,)) == 1  # on the host


def test_a_driver_that_does_not_say_which_node_is_last_is_no_error(monkeypatch):
    def missing(name, *arguments):
        raise AttributeError(name)

    monkeypatch.setattr(_captures, "driver", missing)
    assert _captures._last_node(CAPTURED) is None


def test_without_a_driver_that_says_every_launch_waits(capture, monkeypatch):
    monkeypatch.setattr(_captures, "_last_node", lambda stream: None)
    assert [capture.read((K, V, Q), (OUT,)) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("status", "nodes", "last"),
    [
        (1, [0xA0], (7, 0xA0)),
        (1, [], None),  # the first launch of a capture
        (1, [0xA0, 0xB0], None),  # behind a join
        (0, [0xA0], None),  # not captured
        (2, [0xA0], None),  # a capture that something has ended
    ],
)
def test_a_node_is_the_last_where_the_next_depends_on_it_alone(monkeypatch, status, nodes, last):
    found = (ctypes.c_void_p * 2)(*nodes)

    def ask(stream, *places):
        of_status, of_number, _, of_nodes, _, of_count = (place._obj for place in places)
        of_status.value, of_number.value, of_count.value = status, 7, len(nodes)
        of_nodes.contents = ctypes.c_void_p.from_buffer(found)

    monkeypatch.setattr(_captures, "driver", lambda *_: ask)
    assert _captures._last_node(CAPTURED) == last


def test_arrays_without_elements_are_nowhere(capture):
    capture.read((V, Q), (K[:0],))
    assert capture.read((K[:0], V, K), (OUT,)) == 1


@pytest.mark.parametrize("elsewhere", ["eager", "legacy", "recorded", "another device"])
def test_launches_outside_of_the_capture_wait_and_are_no_part_of_it(capture, elsewhere):
    capture.read((K, V, Q), (OUT,))
    if elsewhere == "recorded":
        capture.recorded = _captures.recorder.work = []
    elif elsewhere == "another device":
        capture.device = 1
    else:
        capture.stream = LEGACY if elsewhere == "legacy" else CAPTURED + 1
    assert capture.read((K, V, Q), (OUT,)) == 0
    capture.stream, capture.recorded, capture.device = CAPTURED, None, 0
    _captures.recorder.work = None
    assert capture.read((K, V, Q), (OUT,)) == 1  # the node is still the first one's


# Which launches are told


def told_of(num_launches, first_tile):
    """Give (a call's launches, what they were told)."""
    told = []
    launches = [lambda *values, i=i: told.append((i, values[-1])) for i in range(num_launches)]
    return _attention_launch.CallLaunch(tuple(launches), first_tile), told


ARRAYS, LISTS, FACTORS = 6 * (0,), (b"", b""), 3 * (b"",)


@pytest.mark.parametrize(
    ("num_lists", "first_tile", "want"),
    [
        (1, DecodeTile, [(0, 0), (0, 1)]),
        (1, PrefillTile, [(0, 0), (0, 0)]),
        (2, DecodeTile, 2 * [(0, 0), (1, 0)]),  # rows of few beside many
    ],
)
def test_only_a_decode_that_is_all_of_a_call_need_not_wait(capture, num_lists, first_tile, want):
    call, told = told_of(num_lists, first_tile)
    for _ in range(2):
        call(ARRAYS, LISTS[:num_lists], FACTORS, 0, (K, V, Q), (OUT,))
        capture.node = _captures._last.node  # nothing comes between
    assert told == want


def test_leaves_of_a_cascade_wait_for_what_is_shared_alone():
    call, told = told_of(2, DecodeTile)
    levels = SimpleNamespace(for_shared=5 * (0,), packed=b"")
    call.cascade(ARRAYS, LISTS, FACTORS, levels)
    assert told == [(0, 0), (1, 1)]


# What calls say that they read and write


@pytest.fixture
def touched(monkeypatch):
    """Addresses that launches say they read, and write; on a GPU that is not there."""
    found = []

    def spy(launch, arguments, device, reads, writes):
        found.append([{r[0] for r in _captures._ranges(arrays)} for arrays in (reads, writes)])

    monkeypatch.setattr(_attention_launch, "launch_overlapping", spy)
    with FakeGpus(monkeypatch, "90"):
        yield found


class Memory:
    """Arrays at addresses of their own, where there is no memory."""

    def __init__(self):
        self.addresses = {}

    def __call__(self, name, shape, dtype=BF16):
        dtype = np.dtype(dtype)
        address = (len(self.addresses) + 1) << 32
        self.addresses[name] = address
        return at(address, int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)

    def of(self, *names):
        return {self.addresses[name] for name in names}


SCALES = ("q_scale", "k_scale", "v_scale")
READ = ("k", "v", "indices", "q", "sinks", *SCALES)


def test_decode_says_all_that_it_reads_and_writes(touched):
    memory = Memory()
    k, v = (memory(name, (6, 16, 2, 64)) for name in "kv")
    table = cukv.PageTable(
        memory("indptr", (3,), "int32"), memory("indices", (6,), "int32"),
        memory("last_page_len", (2,), "int32"), 16,
    )  # fmt: skip
    q, out = (memory(name, (2, 8, 64)) for name in ("q", "out"))
    options = {"sinks": memory("sinks", (8,), "float32")}
    options |= {name: memory(name, (), "float32") for name in SCALES}
    lse = memory("lse", (2, 8), "float32")
    cukv.PagedKVCache((k, v)).decode(q, table, out=out, lse=lse, **options)
    assert touched == [[memory.of(*READ), memory.of("out", "lse")]]


def test_new_results_are_said_to_be_written_too(touched):
    memory = Memory()
    q = memory("q", (1, 8, 64))
    cache = cukv.PagedKVCache(memory("data", (6, 2, 16, 2, 64)))
    table = cukv.PageTable.from_seq_lens([40], 16, xp=np)
    table = table._map(lambda x: memory(str(len(memory.addresses)), x.shape, x.dtype))
    o, lse = cache.decode(q, table, return_lse=True)
    assert touched[0][1] == {o.data.ptr, lse.data.ptr}


def test_few_rows_over_packed_keys_say_what_they_read(touched):
    memory = Memory()
    indptr = memory("indptr", (3,), "int32")
    q = RaggedTensor(memory("q", (2, 8, 64)), indptr)
    k, v = (RaggedTensor(memory(name, (50, 2, 64)), indptr) for name in "kv")
    out = memory("out", (2, 8, 64))
    q.prefill(k, v, out=out)
    reads, writes = touched[0]
    assert memory.of("q", "k", "v") <= reads
    assert writes == memory.of("out")


# On a GPU

LENS = (700, 1, 0, 1300, 64, 16, 17, 450)
CASE = PagedCase(LENS, num_kv_heads=8, head_dim=128, dtype="bfloat16")


@pytest.fixture
def told(monkeypatch):
    """What launches were told: whether their inputs are ready."""
    found = []
    launch_overlapping = _captures.launch_overlapping

    def spy(launch, *rest):
        def launched(*arguments):
            found.append(arguments[-1])
            launch(*arguments)

        launch_overlapping(launched, *rest)

    monkeypatch.setattr(_attention_launch, "launch_overlapping", spy)
    return found


def restoring(data):
    """Give a function that undoes what was done to an array since."""
    before = data.copy()

    def restore():
        data[...] = before

    return restore


class Layers:
    """Caches of other values under one table and one plan."""

    def __init__(self, rng, case=CASE):
        arrays = case.arrays(rng)
        cache, self.table = case.nouns(arrays, cp)
        self.caches = [cache]
        for i in range(1, 6):
            data = (arrays.data.astype(np.float32) * 0.9**i).astype(arrays.data.dtype)
            self.caches.append(case.nouns(arrays._replace(data=data), cp)[0])
        self.q = on(cp, case.queries(rng, len(LENS), 32))
        self.plan = cache.plan(self.q, self.table)

    def decode(self, i, q=None, **options):
        """Attend to the i-th cache."""
        q = self.q if q is None else q
        return self.caches[i].decode(q, self.table, plan=self.plan, **options)


def check_replays(call, told, ready, restore=lambda: None):
    """Capture a call, replay it a few times: each gives what it gives eagerly, bit for bit.

    ``ready`` is what its launches must be told; ``restore`` undoes what the call changes.
    """
    want = [x.copy() for x in call()]
    with captured(call, restore) as (stream, graph, results):
        assert told[-len(ready) :] == ready
        for _ in range(20):
            restore()
            for x in results:
                x.view(np.uint8).fill(0xFF)  # NaN
            graph.launch(stream)
            stream.synchronize()
            for got, expected in zip(results, want, strict=True):
                assert_same_bits(got, expected)


@pytest.mark.gpu
def test_decode_behind_decode_reads_at_once(rng, told):
    layers = Layers(rng)
    check_replays(lambda: [layers.decode(i) for i in range(6)], told, [0, 1, 1, 1, 1, 1])


@pytest.mark.gpu
def test_chains_of_short_launches_end_in_order(rng, told):
    layers = Layers(rng)
    out = cp.empty_like(layers.q)

    def call():
        for i in range(60):
            o, lse = layers.decode(i % 6, out=out, return_lse=True)
        return o, lse

    check_replays(call, told, [0] + 59 * [1])


@pytest.mark.gpu
def test_results_of_one_are_queries_of_the_next(rng, told):
    layers = Layers(rng)

    def call():
        results = [layers.q]
        for i in range(6):
            results.append(layers.decode(i, results[-1]))
        return results[1:]

    check_replays(call, told, 6 * [0])


@pytest.mark.gpu
def test_results_of_one_are_keys_of_the_next(rng, told):
    layers = Layers(rng)
    data = layers.caches[0].data
    page = data[int(layers.table.indices[0])].reshape(layers.q.shape)  # of the first request

    def call():
        layers.decode(1, out=page)
        return [layers.decode(0), layers.decode(0)]

    check_replays(call, told, [0, 0, 1], restoring(data))


@pytest.mark.gpu
def test_a_kernel_between_that_writes_keys_is_waited_for(rng, told):
    layers = Layers(rng)
    data = layers.caches[1].data
    bits = data.view(np.uint16)

    def call():
        first = layers.decode(0)
        bits[...] ^= np.uint16(0x8000)  # of every sign
        return [first, layers.decode(1), layers.decode(1)]

    check_replays(call, told, [0, 0, 1], restoring(data))


@pytest.mark.gpu
def test_append_and_update_between_are_waited_for(rng, told):
    layers = Layers(rng)
    rows = on(cp, CASE.queries(rng, len(LENS), 8))

    def call():
        results = [layers.decode(0)]
        layers.caches[0].append(rows, rows, layers.table)
        results.append(layers.decode(0))
        layers.plan.update()
        return [*results, layers.decode(0)]

    check_replays(call, told, [0, 0, 0], restoring(layers.caches[0].data))


@pytest.mark.gpu
def test_outside_of_a_capture_nothing_is_known(rng, told):
    layers = Layers(rng)
    with cp.cuda.Stream(non_blocking=True):
        for i in range(4):
            layers.decode(i)
    layers.decode(0)
    assert told == 5 * [0]


@pytest.mark.gpu
def test_what_a_fork_brings_back_is_waited_for(rng, told):
    layers = Layers(rng)
    data = layers.caches[1].data
    bits, side = data.view(np.uint16), cp.cuda.Stream(non_blocking=True)

    def call():
        stream = cp.cuda.get_current_stream()
        side.wait_event(stream.record())
        with side:
            for _ in range(33):
                bits[...] ^= np.uint16(0x8000)
        first = layers.decode(0)
        stream.wait_event(side.record())
        return [first, layers.decode(1), layers.decode(2)]

    check_replays(call, told, [0, 0, 1], restoring(data))


@pytest.mark.gpu
def test_nodes_of_two_captures_differ(rng):
    layers = Layers(rng)
    nodes = []

    def call():
        layers.decode(0)
        nodes.append(_captures._last_node(cp.cuda.get_current_stream().ptr))

    for _ in range(2):
        with captured(call):
            assert nodes[-3:-1] == [None, None]  # of the calls before the capture
    assert None not in (nodes[2], nodes[5])
    assert nodes[2] != nodes[5]


# A launch that was let in early lets the next one in, which must find the end of both. What writes
# late here lets the next launch in at once, takes far longer than all that follow, and then writes.

LATE = r"""
extern "C" __global__ void write_late(char* to, const char* from, int num_bytes) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const long long begin = clock64();
    while (clock64() - begin < 400000) {
    }
    for (int i = threadIdx.x; i < num_bytes; i += blockDim.x) {
        to[i] = from[i];
    }
}
"""


def write_late(to, content):
    """Launch ``write_late`` on the current stream, and have it taken for a launch of decode."""
    kernel = cp.RawKernel(LATE, "write_late")
    kernel((1,), (256,), (to, content, np.int32(to.nbytes)))
    stream = cp.cuda.get_current_stream()
    _captures._last.node = _captures._last_node(stream.ptr)
    _captures._last.writes = _captures._ranges((to,))


def busy(rng):
    """Make a decode whose CTAs all have keys: every one of them lets the next launch in early."""
    case = PagedCase(32 * (64,), num_kv_heads=8, head_dim=128, dtype="bfloat16")
    cache, table = case.nouns(case.arrays(rng), cp)
    q = on(cp, case.queries(rng, 32, 32))
    return functools.partial(cache.decode, q, table, plan=cache.plan(q, table))


@pytest.mark.gpu
def test_keys_that_the_last_launch_but_one_wrote_are_there(rng, told):
    between = busy(rng)
    for case in (CASE, dataclasses.replace(CASE, head_dim=40, dtype="float8_e4m3fn")):
        layers = Layers(rng, case)
        data = layers.caches[0].data.view(np.uint8)
        first, second = (data[int(layers.table.indices[i])] for i in range(2))
        content = second.copy()

        def call(layers=layers, first=first, content=content):
            before = layers.decode(0)
            write_late(first, content)
            return [before, between(), layers.decode(0)]

        check_replays(call, told, [0, 1, 1], restoring(data))


@pytest.mark.gpu
def test_queries_that_the_last_launch_but_one_wrote_are_there(rng, told):
    """And so are page ids: both come past the ring of buffers."""
    layers, between = Layers(rng), busy(rng)
    ids = layers.table.indices
    full_pages = ids[:43], ids[45:88]  # of requests 0 and 3
    for changed, content in ((layers.q, layers.q[::-1].copy()), full_pages):

        def call(changed=changed, content=content):
            before = layers.decode(0)
            write_late(changed, content)
            return [before, between(), layers.decode(0)]

        check_replays(call, told, [0, 1, 1], restoring(changed))


@pytest.mark.gpu
def test_results_in_the_same_place_are_those_of_the_last(rng, told):
    # So many items that the first is finished before any warp comes to its last step.
    case = PagedCase(1600 * (1,), page_size=1, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    cache, table = case.nouns(case.arrays(rng), cp)
    q = on(cp, case.queries(rng, len(case.kv_lens), 32))
    plan, out = cache.plan(q, table), cp.empty_like(q)
    content = cp.zeros_like(out[0])

    def call():
        write_late(out[0], content)
        return [cache.decode(q, table, plan=plan, out=out)]

    check_replays(call, told, [1])
