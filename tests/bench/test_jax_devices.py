"""Decoding over several GPUs in ``jax.jit``, beside one of them: by keys, and by heads.

``pytest tests/bench/test_jax_devices.py`` times both on all GPUs that there are, per layer of a
loop over 32. What fails are answers that are not those of one GPU, and keys or values that are
gathered or copied. ``--rehearse`` does the same on JAX's CPUs, at small sizes.
"""

import math
import os
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from inputs import HOME, Shape, shapes
from timing import CLOCK, ask
from tolerances import ROW_NORM, assert_rows_close

import cukv
from cukv import _arrays

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory too
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # to rehearse
pytest.importorskip("pytest_benchmark")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.benchmark(timer=CLOCK),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of JAX, from within
]

ROUNDS, WARMUP = 7, 2  # a rehearsal has one round
CALLS = 5  # of a round's loop, one dispatched while another runs
# What of n times one GPU's speed is asked: the rest is for the merge, and for what is not divided.
SHARE = 0.9
# Weights of a million keys are uneven enough at this scale of q that outputs are not near zero, and
# even enough that the keys of every device count.
Q_SCALE = 3.0
SMALL = 64 << 20  # bytes: what all but keys and values may take; of those there is a GB on a device


@pytest.fixture
def mesh():
    """All devices, along one axis."""
    if HOME.xp is not np and _arrays._device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    jax = pytest.importorskip("jax")
    if HOME.xp is not np and jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    devices = jax.devices("cpu" if HOME.xp is np else "gpu")
    with jax.default_device(devices[0]):
        yield jax.sharding.Mesh(np.array(devices), ("x",))


def num_layers() -> int:
    """Count the layers of a loop; a rehearsal has few."""
    return 2 if HOME.xp is np else 32


# Inputs


def uniform(sharding: Any, seed: int, scale: float, *shape: int) -> Any:
    """Make uniform values of this deviation, which depend on their places and the seed only.

    Each device makes its own, with no memory but theirs: the peak that is checked is the loop's.
    """
    import jax

    jnp = jax.numpy

    def make() -> Any:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        n = jnp.uint32(seed * 0x9E3779B9 % 2**32)  # sequences of two seeds are far apart
        for axis, stride in enumerate(strides):
            n = n + jax.lax.broadcasted_iota("uint32", shape, axis) * jnp.uint32(stride)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # a hash of 32 bits
            n = (n ^ (n >> shift)) * jnp.uint32(factor)
        n = n ^ (n >> 16)
        return ((n * 2.0**-31 - 1) * (scale * 3**0.5)).astype("bfloat16")

    return jax.jit(make, out_shardings=sharding)()


def page_ids(num_pages: int, parts: int) -> np.ndarray[Any, Any]:
    """Give the ids of pages, ``[parts, pages of each]``: those of each part, shuffled."""
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(num_pages // parts) for _ in range(parts)]).astype(np.int32)


def loop(shape: Shape, over: str | None = None) -> Callable[..., Any]:
    """Give what decodes in all layers, ``over`` an axis of the mesh if keys are shared out."""
    import jax

    import cukv.jax as cj

    def layers(q: Any, data: Any, *table: Any) -> Any:
        cache = cj.noun(cukv.PagedKVCache, data)
        of_all = cj.noun(cukv.PageTable, *table, shape.page_size)
        plan = cj.plan(q[0], cache, of_all)

        outputs = []
        before = 0 * q[0]
        for rows in q:
            # A layer waits for the one before; its NaNs, were there any, would stay.
            rows = rows + 0 * before
            before = cj.decode(rows, cache, of_all, plan=plan, return_lse=over is not None)
            if over is not None:
                o, lse = before
                before, _ = cj.pmerge_states(o, lse, over)
            outputs.append(before)
        return jax.numpy.stack(outputs)

    return layers


# One GPU, and all


class Run(NamedTuple):
    """A compiled loop and its arguments."""

    compiled: Any
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Run it once and wait."""
        import jax

        return jax.block_until_ready(self.compiled(*self.args))

    def seconds(self) -> float:
        """Time it: seconds of a layer."""
        import jax

        start = time.perf_counter()
        for _ in range(CALLS):
            out = self.compiled(*self.args)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (CALLS * num_layers())


def on_one(mesh: Any, shape: Shape, ids: np.ndarray[Any, Any], last: int) -> Run:
    """Decode on the first device, whose cache has all pages; ``ids`` are of each request."""
    import jax

    device = jax.sharding.SingleDeviceSharding(mesh.devices[0])
    q, data = inputs(shape, device, device)
    table = (offsets(shape.batch_size, ids), ids.reshape(-1), np.full(shape.batch_size, last, "i4"))
    args = q, data, *jax.device_put(table, device)
    return Run(jax.jit(loop(shape)).lower(*args).compile(), args)


def inputs(shape: Shape, of_q: Any, of_cache: Any) -> tuple[Any, Any]:
    """Make the queries of all layers and the cache that these share: it is far beyond the L2."""
    q = num_layers(), shape.batch_size, shape.num_qo_heads, shape.head_dim
    num_pages = shape.batch_size * -(-shape.kv_len // shape.page_size)
    cache = num_pages, 2, shape.page_size, shape.num_kv_heads, shape.head_dim
    return uniform(of_q, 1, Q_SCALE, *q), uniform(of_cache, 2, 1.0, *cache)


def offsets(batch_size: int, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give the indptr of requests that have equally many pages."""
    return np.linspace(0, ids.size, batch_size + 1).astype(np.int32)


def on_all(mesh: Any, specs: tuple[Any, ...], out: Any, layers: Any, args: tuple[Any, ...]) -> Run:
    """Decode on all devices, each with its part."""
    import jax

    sharded = jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=out)
    return Run(jax.jit(sharded).lower(*args).compile(), args)


def measure(benchmark: Any, mesh: Any, shape: Shape, run: Run, one: Callable[[], Run]) -> None:
    """Check that nothing is gathered nor copied, and answers; time both in turns."""
    data = run.args[1]
    assert run.compiled.memory_analysis().temp_size_in_bytes <= SMALL
    before = filled_up(mesh)
    got = run()
    for device, (peak, _) in before.items():
        assert device.memory_stats()["peak_bytes_in_use"] - peak <= SMALL, f"copies on {device}"
    del before
    alone = one()
    rows = (-1, shape.head_dim)
    want = np.asarray(alone()).astype(np.float32).reshape(rows)
    found = np.asarray(got).astype(np.float32).reshape(rows)
    assert_rows_close(found, want, 2 * ROW_NORM["bfloat16"])  # of two kernels' results
    of_all: list[float] = []  # seconds
    of_one: list[float] = []

    def turn() -> None:
        of_all.append(run.seconds())
        of_one.append(alone.seconds())
        CLOCK.seconds += of_all[-1]

    benchmark.group = f"a layer over {mesh.size} devices"
    rounds = 1 if HOME.xp is np else ROUNDS
    benchmark.pedantic(turn, rounds=rounds, warmup_rounds=WARMUP)
    took, took_alone = (statistics.median(found[WARMUP:]) for found in (of_all, of_one))
    nbytes = data.nbytes
    benchmark.extra_info |= {"shape": str(shape), "devices": mesh.size, "one_us": 1e6 * took_alone}
    benchmark.extra_info |= {"bytes": nbytes, "gbs": nbytes / took / 1e9}
    asked = math.floor(1000 / (SHARE * mesh.size)) / 1000
    ask(benchmark, asked, f"of one device's time, of {mesh.size}", took / took_alone)


def filled_up(mesh: Any) -> dict[Any, tuple[int, Any]]:
    """Take memory until as much is in use as ever was, so that more than that shows in the peak.

    Gives the peak of each device, and the memory. JAX's CPUs count nothing.
    """
    import jax

    found = {}
    for device in mesh.devices.flat:
        stats = device.memory_stats()
        if stats:
            free = stats["peak_bytes_in_use"] - stats["bytes_in_use"]
            with jax.default_device(device):  # else it would come by way of the default device
                ballast = jax.numpy.zeros(free, np.uint8).block_until_ready()
            found[device] = device.memory_stats()["peak_bytes_in_use"], ballast
    return found


def gathered_bytes(compiled: Any) -> list[int]:
    """List what collective operations of a program give on a device, in bytes."""
    found = []
    for line in compiled.as_text().splitlines():
        result = re.search(r"= (.*?) (all|collective|reduce-scatter)[\w-]*\(", line)
        if result:
            arrays = re.findall(r"[a-z]+(\d+)\w*\[([\d,]*)\]", result[1])  # bf16[64,128]
            sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, dims in arrays]
            bits = [int(bits) * size for (bits, _), size in zip(arrays, sizes, strict=True)]
            found.append(sum(bits) // 8)
    return found


# One request of a million keys: a part of them on each device, whose states are merged.
@shapes(Shape(1, 1 << 20), name=lambda shape: f"kv{shape.kv_len}")
def test_keys_over_devices(benchmark, mesh, shape):
    import jax

    P, n = jax.sharding.PartitionSpec, mesh.size
    whole = n * shape.page_size
    num_pages = -(-shape.kv_len // whole) * n
    shape = Shape(1, num_pages * shape.page_size, num_qo_heads=shape.num_qo_heads,
                  num_kv_heads=shape.num_kv_heads)  # fmt: skip
    ids = page_ids(num_pages, n)

    specs = P(), P("x"), P("x"), P("x"), P("x")
    replicated, by_pages = (jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P("x")))
    table = np.tile(np.array([0, num_pages // n], np.int32), n), ids.reshape(-1)
    table = jax.device_put((*table, np.full(n, shape.page_size, np.int32)), by_pages)
    args = *inputs(shape, replicated, by_pages), *table
    run = on_all(mesh, specs, P(), loop(shape, over="x"), args)
    state = shape.num_qo_heads * (2 * shape.head_dim + 4)  # bytes
    found = gathered_bytes(run.compiled)
    assert found
    assert max(found) <= 2 * (n + 1) * state  # of two operations, operands too
    first = np.arange(n, dtype=np.int32)[:, None] * (num_pages // n)
    measure(benchmark, mesh, shape, run, lambda: on_one(mesh, shape, ids + first, shape.page_size))


# A batch: some heads on each device, which need nothing of each other.
@shapes(Shape(64, 8192), name=lambda shape: f"b{shape.batch_size}_kv{shape.kv_len}")
def test_heads_over_devices(benchmark, mesh, shape):
    import jax

    if HOME.xp is np:  # a head at least on each of many
        shape = Shape(shape.batch_size, shape.kv_len)
    if shape.num_kv_heads % mesh.size:
        pytest.skip(f"{shape.num_kv_heads} heads are not divided among {mesh.size} devices")
    P = jax.sharding.PartitionSpec
    each = -(-shape.kv_len // shape.page_size)
    last = (shape.kv_len - 1) % shape.page_size + 1
    ids = page_ids(shape.batch_size * each, 1)
    specs = P(None, None, "x"), P(None, None, None, "x"), P(), P(), P()
    of_q, of_cache, replicated = (jax.sharding.NamedSharding(mesh, spec) for spec in specs[:3])
    table = offsets(shape.batch_size, ids), ids.reshape(-1)
    table = jax.device_put((*table, np.full(shape.batch_size, last, np.int32)), replicated)
    args = *inputs(shape, of_q, of_cache), *table
    run = on_all(mesh, specs, P(None, None, "x"), loop(shape), args)
    assert not gathered_bytes(run.compiled)
    measure(benchmark, mesh, shape, run, lambda: on_one(mesh, shape, ids, last))
