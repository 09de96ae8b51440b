"""Calls from XLA: cukv's methods over XLA's buffers, on its stream, in memory that it gave.

A call is ``work(memory, results, *args)``: it makes nouns' methods write ``results``. On JAX for
the CPU the arrays are NumPy's, and the work is done as it is. On a GPU they are CuPy's, and the
work is recorded: what a call launches is determined by the addresses of its buffers, so that later
calls with the same buffers, as a loop with donation brings them, only repeat it.

``buffer_callback`` calls Python once for each execution, or once for all where XLA captures the
call into a command buffer (a CUDA graph). So nothing here may allocate, load a kernel, wait or read
memory: scratch is one more result, whose size is found, and kernels are loaded, by a rehearsal at
trace time over arrays that are not there. And as XLA updates its graph by captures of the call over
other buffers, which CUDA takes if they hold nodes as before, a call launches the same kernels, in
the same order, whatever its buffers are. XLA's FFI through ctypes would save a few microseconds of
an uncaptured call, at the price of mirroring its C structs.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import jax
import jax.numpy as jnp
import numpy as np
from cupy_backends.cuda.api.runtime import getDevice
from jax.experimental.buffer_callback import buffer_callback

from cukv._cubins import log
from cukv._plan import Plan, placement
from cukv._recording import recording
from cukv._remember import remember

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cukv._arrays import Array
    from cukv._recording import Work

_MAX_REMEMBERED = 64  # sets of addresses of one call on a device; XLA keeps 16 captures of it
_ALIGNMENT = 256  # bytes, as XLA's own allocations on a GPU have
_HOST = -1  # device of NumPy arrays
_DEVICE_TYPES = {1: False, 2: True}  # DLPack's: whether arrays are on a GPU
_NOWHERE = 0x7F00_0000_0000  # where arrays of a rehearsal seem to lie

# ------------------------------------------------------------------------------------------ memory


class Spec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, x: Any) -> Spec:
        return cls(tuple(x.shape), np.dtype(x.dtype))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def on_device(self, pointer: int, device: int) -> Array:
        """Give the contiguous CuPy array at an address, which owns nothing."""
        memory = cp.cuda.UnownedMemory(pointer, self.num_bytes, None, device)
        return cp.ndarray(self.shape, self.dtype, memptr=cp.cuda.MemoryPointer(memory, 0))

    def on_host(self, pointer: int) -> Array:
        """Give the contiguous NumPy array at an address."""
        if not self.num_bytes:
            return np.empty(self.shape, self.dtype)
        memory: Any = (ctypes.c_char * self.num_bytes).from_address(pointer)
        return np.ndarray(self.shape, self.dtype, memory)


class _Arena:
    """Memory given out piece by piece; without a limit, which is a rehearsal, it only counts."""

    def __init__(self, pointer: int, limit: int | None, device: int) -> None:
        self._pointer, self._limit, self._device = pointer, limit, device
        self.used = 0

    def take(self, num_bytes: int) -> int:
        """Give the address of so many bytes."""
        pointer = self._pointer + self.used
        self.used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._limit is not None and self.used > self._limit:
            raise RuntimeError(
                f"cukv: this device needs {self.used} bytes or more, {self._limit} were found "
                "necessary when the call was traced"
            )
        return pointer

    def allocate(self, num_bytes: int) -> cp.cuda.MemoryPointer:
        """Give them as CuPy's allocators do."""
        memory = cp.cuda.UnownedMemory(self.take(num_bytes), num_bytes, self, self._device)
        return cp.cuda.MemoryPointer(memory, 0)


class Memory:
    """What a call's work takes memory from. In NumPy there is nothing to take."""

    def plan(self, make: Callable[[], Plan], lists: Array | None) -> Plan:
        """Make a plan for this call, or find the one whose lists a call of ``fill`` has filled."""
        del lists
        return make()

    def fill(self, make: Callable[[], Plan], lists: Array) -> None:
        """Make a plan for other calls: what they read of it lies in ``lists [bytes]``."""
        del lists
        make()


class _DeviceMemory(Memory):
    def __init__(self, scratch: _Arena, tickets: _Arena, device: int) -> None:
        self._scratch, self._tickets, self._device = scratch, tickets, device

    def plan(self, make: Callable[[], Plan], lists: Array | None) -> Plan:
        if lists is None:
            with _placed(self._scratch, self._scratch, self._scratch):
                return make()
        # The lists are filled already, and so the tickets must be zero. With those of a cascade lie
        # states, which each call writes before it reads them.
        with _placed(self._arena(lists), self._tickets, self._scratch), recording():
            return make()

    def fill(self, make: Callable[[], Plan], lists: Array) -> None:
        with _placed(self._arena(lists), self._scratch, self._scratch):
            make()

    def _arena(self, lists: Array) -> _Arena:
        return _Arena(lists.data.ptr, lists.nbytes, self._device)


@contextmanager
def _placed(lists: _Arena, tickets: _Arena, states: _Arena) -> Iterator[None]:
    """Have plans and all other arrays of this thread made in arenas."""
    outer = placement.place
    placement.place = lambda *sizes: (
        lists.take(sizes[0]),
        tickets.take(sizes[1]),
        states.take(sizes[2]),
    )
    try:
        with cp.cuda.using_allocator(lists.allocate):
            yield
    finally:
        placement.place = outer


# ----------------------------------------------------------------------------------------- devices


def gpus() -> dict[int, Any]:
    """Give the GPUs that JAX works on by default, by number; none: it works on the CPU."""
    chosen = jax.config.jax_default_device
    platform = getattr(chosen, "platform", chosen) or jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return {}
    return {device.local_hardware_id: device for device in jax.local_devices(backend="gpu")}


def _zeros(num_bytes: int, device: Any) -> Any:
    """Give zero bytes on a device of JAX, in its own memory, also while a function is traced."""
    with jax.ensure_compile_time_eval():
        zeros = jax.device_put(np.zeros(num_bytes, np.uint8), device)
    return zeros.block_until_ready()


def _rehearsed(specs: Sequence[Spec], device: int) -> list[Array]:
    """Give arrays that are like those of a call, but are not there."""
    if device == _HOST:
        return [np.zeros(spec.shape, spec.dtype) for spec in specs]
    pointer, arrays = _NOWHERE, []
    for spec in specs:
        arrays.append(spec.on_device(pointer, device))
        pointer += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
    return arrays


# ----------------------------------------------------------------------------------------- buffers


class _DLTensor(ctypes.Structure):
    """The beginning of DLPack's DLTensor, with which an unversioned capsule begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _locate(buffers: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
    """Give the device of XLA's buffers, and their addresses.

    XLA's own descriptions of buffers know no fp8; shapes and dtypes are known from tracing.
    """
    pointers = []
    for buffer in buffers:
        capsule = buffer.__dlpack__()
        tensor = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
        pointers.append(tensor.data or 0)
        device = tensor.device_id if _DEVICE_TYPES[tensor.device_type] else _HOST
    return device, tuple(pointers)


# ------------------------------------------------------------------------------------------- calls


class _Callback:
    """What XLA calls, with the buffers of a call: its operands, its results and its scratch.

    Tickets, by which CTAs count each other, are zero before and after a call, and are the same for
    all buffers: calls on one device follow each other, as ``cukv.jax`` says.
    """

    def __init__(
        self,
        work: Callable[..., None],
        args: tuple[Any, ...],
        results: Any,
        aliases: dict[int, int],
    ) -> None:
        leaves, self._args = jax.tree.flatten(args)
        outputs, self._results = jax.tree.flatten(results)
        self._num_operands, self._aliases = len(leaves), aliases
        self._work = work
        self._specs = [Spec.of(x) for x in (*leaves, *outputs)]
        # By device, each of which a thread of its own may call for, and by addresses.
        self._recorded: dict[int, dict[tuple[int, ...], list[Work]]] = defaultdict(dict)
        self.scratch_bytes = 0
        self.launches = False  # shapes decide whether a call does anything
        self._tickets: dict[int, tuple[int, int]] = {}  # of each device: address and bytes
        self._zeros: list[Any] = []  # JAX's arrays that they are

    def __call__(self, context: Any, results: Sequence[Any], *operands: Any) -> None:
        device, pointers = _locate((*operands, *results))
        if device == _HOST:
            self._on_host(pointers)
            return
        recorded = self._recorded[device].get(pointers)
        if recorded is None:
            recorded = self._record(device, pointers)
        if getDevice() == device:
            _repeat(recorded, context)
        else:
            with cp.cuda.Device(device):
                _repeat(recorded, context)

    def rehearse(self, device: int, of_jax: Any) -> None:
        """Check the call, load its kernels, and see to the memory that it needs."""
        arrays = _rehearsed(self._specs, device)
        scratch, tickets = (_Arena(_NOWHERE << n, None, device) for n in (1, 2))
        with cp.cuda.Device(device), recording() as recorded:
            self._on_device(arrays, scratch, tickets, device)
        self.launches |= bool(recorded)
        self.scratch_bytes = max(self.scratch_bytes, scratch.used)
        if tickets.used:
            zeros = _zeros(tickets.used, of_jax)
            self._tickets[device] = zeros.unsafe_buffer_pointer(), zeros.nbytes
            self._zeros.append(zeros)

    def _on_host(self, pointers: Sequence[int]) -> None:
        arrays = [spec.on_host(p) for spec, p in zip(self._specs, pointers, strict=False)]
        for operand in arrays[: self._num_operands]:
            operand.flags.writeable = False
        try:
            self._do(Memory(), arrays)
        except Exception as error:
            # Where other devices wait for this one, JAX never comes to raise it.
            if jax.local_device_count("cpu") > 1:
                log.error("on one of JAX's devices: %s", error)
            raise

    def _record(self, device: int, pointers: tuple[int, ...]) -> list[Work]:
        """Note what is to be launched for these buffers."""
        arrays = [spec.on_device(p, device) for spec, p in zip(self._specs, pointers, strict=False)]
        scratch = _Arena(pointers[-1], self.scratch_bytes, device)
        tickets = _Arena(*self._tickets.get(device, (0, 0)), device)
        with cp.cuda.Device(device), recording() as recorded:
            self._on_device(arrays, scratch, tickets, device)
        remember(self._recorded[device], pointers, recorded, _MAX_REMEMBERED)
        return recorded

    def _on_device(
        self, arrays: list[Array], scratch: _Arena, tickets: _Arena, device: int
    ) -> None:
        with cp.cuda.using_allocator(scratch.allocate):
            self._do(_DeviceMemory(scratch, tickets, device), arrays)

    def _do(self, memory: Memory, arrays: list[Array]) -> None:
        operands, results = arrays[: self._num_operands], arrays[self._num_operands :]
        for operand, result in self._aliases.items():
            operands[operand] = results[result]
        results = jax.tree.unflatten(self._results, results)
        self._work(memory, results, *jax.tree.unflatten(self._args, operands))


def _repeat(recorded: list[Work], context: Any) -> None:
    """Do what was recorded on XLA's stream."""
    stream = context.stream
    for work in recorded:
        work(stream)


def call(
    op: str,
    work: Callable[..., None],
    results: Any,
    *args: Any,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Have XLA do ``work(memory, results, *args)``: give its results.

    Parameters
    ----------
    op : str
        Named by errors.
    work : callable
        Called with pytrees as ``results`` and ``args`` are, of NumPy or CuPy arrays. On a GPU it
        launches and nothing else.
    results : pytree of jax.ShapeDtypeStruct
        What the work writes.
    args : pytrees of arrays
        What it reads.
    aliases : {operand: result}
        Leaves of ``args`` that become a result: the work gets, and writes, the result's memory.
    """
    leaves, structure = jax.tree.flatten(args)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    args = jax.tree.unflatten(structure, leaves)
    aliases = aliases or {}
    callback = _Callback(work, args, results, aliases)
    for device, of_jax in gpus().items():
        callback.rehearse(device, of_jax)
    specs, structure = jax.tree.flatten(results)
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
    if callback.scratch_bytes:
        shapes.append(jax.ShapeDtypeStruct((callback.scratch_bytes,), np.uint8))
    launch = buffer_callback(
        callback,
        shapes,
        input_output_aliases=aliases,
        command_buffer_compatible=callback.launches,  # XLA refuses to capture nothing
    )
    found = _inference(op, launch)(*leaves)[: len(specs)]
    # In a loop XLA writes a call's result where it belongs in a stacked output, by a copy of the
    # call, and where the result is needed besides, both are done: a barrier has it see one call.
    if not aliases:
        found = jax.lax.optimization_barrier(found)
    return jax.tree.unflatten(structure, vary_as(leaves, found))


def plan_key(make: Callable[..., Plan], *args: Any) -> tuple[str, tuple[tuple[str, Any], ...], int]:
    """Give the operation and the key of a plan, and the bytes of its lists, without its making."""
    leaves, structure = jax.tree.flatten(args)
    specs, sizes = [Spec.of(leaf) for leaf in leaves], [0]
    for device in gpus():
        arrays = jax.tree.unflatten(structure, _rehearsed(specs, device))
        lists, scratch = (_Arena(_NOWHERE << n, None, device) for n in (1, 2))
        with cp.cuda.Device(device), recording(), _placed(lists, scratch, scratch):
            plan = make(*arrays)
        sizes.append(lists.used)
    if len(sizes) == 1:
        plan = make(*jax.tree.unflatten(structure, _rehearsed(specs, _HOST)))
    return plan.op, plan.key, max(sizes)


def _inference(op: str, launch: Callable[..., Any]) -> Any:
    """Refuse vmap and derivatives, by name."""

    def without_vmap(*_: Any) -> Any:
        raise NotImplementedError(
            f"cukv.jax.{op}: has no vmap: requests are its batch; put them in one table or indptr"
        )

    def without_grad(*_: Any) -> Any:
        raise NotImplementedError(f"cukv.jax.{op}: is for inference and has no derivative")

    one_batch = jax.custom_batching.custom_vmap(lambda *arrays: launch(*arrays))
    one_batch.def_vmap(without_vmap)
    inference = jax.custom_jvp(lambda *arrays: one_batch(*arrays))
    inference.defjvp(without_grad)
    return inference


def _varying_axes(x: Any) -> frozenset[str]:
    """Name the axes of shard_map along which an array differs."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):  # since JAX 0.10
        varying: frozenset[str] = kind.manual_axis_type.varying
        return varying
    return getattr(kind, "vma", frozenset())


def vary_as(args: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
    """Mark results as differing among the devices of shard_map that an argument differs among."""
    axes = tuple(frozenset().union(*(_varying_axes(x) for x in args)))
    if not axes:
        return results
    if hasattr(jax.lax, "pcast"):
        return [jax.lax.pcast(x, axes, to="varying") for x in results]
    return [jax.lax.pvary(x, axes) for x in results]
