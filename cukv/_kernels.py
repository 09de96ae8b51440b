"""Kernels by name: cubin -> ``cupy.RawModule`` -> launch.

``kernel(name, device, **template_args)`` gives one loaded specialisation; calling it launches it on
CuPy's current stream with *named* parameters, and ``bind`` packs most of them ahead of many calls.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
from cupy.cuda import get_current_stream
from cupy_backends.cuda.api.driver import launchKernel
from cupy_backends.cuda.api.runtime import getDevice
from cupy_backends.cuda.libs import nvrtc

from cukv._arrays import CudaUnavailableError, as_dtype, is_available
from cukv._cubins import cache_folder, cubin
from cukv._recording import recorder
from cukv._sources import params_struct, source, struct_layout
from cukv._specialisations import SPELLING, runs_on, specialisations

if TYPE_CHECKING:
    from collections.abc import Sequence

# CTA sizes. SCAN_THREADS is written in kernels/common/scan.cuh too.
SCAN_THREADS = 1024
_THREADS = 256
WARP = 32


def one_per_thread(size: int, threads: int = _THREADS) -> tuple[int, int]:
    """Grid and CTA for one thread per entry."""
    return -(-size // threads), threads


def one_per_warp(size: int) -> tuple[int, int]:
    """Grid and CTA for one warp per entry."""
    return -(-size * WARP // _THREADS), _THREADS


ONE_SCAN = (1, SCAN_THREADS)  # grid and CTA of a prefix sum


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, with a value of 4 of its 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
# CUlaunchConfig: grid, CTA and shared memory, packed before; stream; address and number of
# attributes. Then what brings the parameters behind it to a multiple of 64 bytes.
_CONFIG = "28s4xQQI4x8x"
_CONFIG_BYTES = struct.calcsize(f"={_CONFIG}")
_pack_geometry = struct.Struct("=7I").pack


@functools.cache
def _cu_launch_kernel_ex() -> Any:
    """Find the driver's launch that takes attributes, which CuPy's does not."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


class _Staging(threading.local):
    """Where this thread packs a launch; the driver copies it during the call."""

    def __init__(self) -> None:
        # A thread's first launch needs a context; the driver's call, unlike CuPy's, makes none.
        if is_available():
            cp.cuda.runtime.setDevice(getDevice())
        memory = (ctypes.c_char * 4096)()
        address = ctypes.addressof(memory)
        self._pointers = (ctypes.c_void_p * 1)(address + _CONFIG_BYTES)
        self._attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        # One look-up: memory of a launch's configuration and parameters, its address, those of the
        # driver's array of pointers to parameters and of attributes.
        self.places = (
            memory,
            address,
            ctypes.addressof(self._pointers),
            ctypes.addressof(self._attribute),
        )


@functools.cache
def _staging() -> _Staging:
    return _Staging()  # not at import, which must touch no GPU


BoundLaunch = Callable[..., None]  # launches with what Kernel.bind left to each call

_UNASKED_SMEM_BYTES = 48 * 1024  # dynamic shared memory that any launch may have
_smem_lock = threading.Lock()


class _Split(NamedTuple):
    """How a parameter struct is packed in two parts."""

    fixed: tuple[str, ...]  # names of the second part's fields
    pack: Callable[..., bytes]  # the second part, with the padding before it
    # A configuration, the first part's fields, and the second part as packed.
    pack_into: Callable[..., None]


class Kernel:
    """One loaded specialisation; calling it launches it on CuPy's current stream."""

    __slots__ = (
        "_by_name",
        "_device",
        "_function",
        "_launch_early",
        "_layout",
        "_name",
        "_pack_into",
        "_raw",
        "_smem_bytes",
        "_splits",
        "_staging",
    )

    def __init__(self, name: str, device: int, raw: Any) -> None:
        self._name, self._device = name, device
        self._raw = raw  # owns the module that holds the function
        self._function = raw.kernel.ptr
        # A kernel that waits for those before it by itself is launched early: its CTAs may be
        # placed while the last launch is ending, half a microsecond less from one small launch to
        # the next. Compute capability 9.0 is the first that can.
        waits = "griddepcontrol_wait();" in source(name)
        early = waits and int(cp.cuda.Device(device).compute_capability) >= 90
        self._launch_early = _cu_launch_kernel_ex() if early else None
        self._layout = struct_layout(params_struct(name), name)
        self._splits: dict[tuple[str, ...], _Split] = {}
        self._pack_into = self._split(self._layout.names).pack_into
        self._smem_bytes = _UNASKED_SMEM_BYTES
        self._staging = _staging()
        # The last launch by name, and its grid, CTA and shared memory.
        self._by_name: tuple[tuple[int, ...], Any] = (), None

    def __call__(self, grid: int, cta: int, smem_bytes: int = 0, /, **params: Any) -> None:
        """Launch ``grid`` CTAs of ``cta`` threads. Parameters are the fields of the struct."""
        names = self._layout.names
        if len(params) != len(names):
            raise TypeError(f"{self._name}: takes {len(names)} parameters, got {sorted(params)}")
        if smem_bytes > self._smem_bytes:
            self._allow(smem_bytes)
        geometry = grid, cta, smem_bytes
        last, launch = self._by_name
        if last != geometry:
            launch = self._launch(*geometry, self._pack_into, b"")
            self._by_name = geometry, launch
        launch(*map(params.__getitem__, names))

    def bind(
        self,
        grid: int,
        cta: int,
        smem_bytes: int = 0,
        /,
        *,
        per_call: tuple[str, ...],
        **fixed: Any,
    ) -> BoundLaunch:
        """Prepare a launch for many calls: ``bind(...)(*values of the fields per_call)``.

        ``per_call`` are the struct's first fields, in its order. All others are given here and
        packed once.
        """
        split = self._splits.get(per_call) or self._split(per_call)
        if len(fixed) != len(split.fixed):
            raise TypeError(f"{self._name}: bind takes {list(split.fixed)}, got {sorted(fixed)}")
        if smem_bytes > self._smem_bytes:
            self._allow(smem_bytes)
        packed = split.pack(*map(fixed.__getitem__, split.fixed))
        return self._launch(grid, cta, smem_bytes, split.pack_into, packed)

    def _split(self, per_call: tuple[str, ...]) -> _Split:
        """Split the struct into the fields that each call gives and those that all share."""
        names, codes, size, _ = self._layout
        n = len(per_call)
        if names[:n] != per_call:
            raise TypeError(
                f"{self._name}: per_call must be the first of {list(names)}, got {list(per_call)}"
            )
        first, second = ("=" + "".join(part) for part in (codes[:n], codes[n:]))
        whole = struct.Struct(f"={_CONFIG}{first[1:]}{size - struct.calcsize(first)}s")
        pack = struct.Struct(second).pack
        return self._splits.setdefault(per_call, _Split(names[n:], pack, whole.pack_into))

    def _allow(self, smem_bytes: int) -> None:
        """Let launches have so much dynamic shared memory."""
        with _smem_lock, cp.cuda.Device(self._device):
            if self._raw.max_dynamic_shared_size_bytes < smem_bytes:
                self._raw.max_dynamic_shared_size_bytes = smem_bytes
            self._smem_bytes = max(self._smem_bytes, smem_bytes)

    def _launch(
        self, grid: int, cta: int, smem_bytes: int, pack_into: Callable[..., None], fixed: bytes
    ) -> BoundLaunch:
        """Give a launch. All that it needs is a local name of its own, which is found soonest."""
        device, function, staging, early = (
            self._device, self._function, self._staging, self._launch_early
        )  # fmt: skip
        num_bytes = self._layout.size
        geometry = _pack_geometry(grid, 1, 1, cta, 1, 1, smem_bytes)

        def launch(*per_call: Any) -> None:
            if getDevice() != device:
                with cp.cuda.Device(device):
                    launch(*per_call)
                return
            memory, config, params, attributes = staging.places
            stream = get_current_stream().ptr
            pack_into(memory, 0, geometry, stream, attributes, 1, *per_call, fixed)
            if recorder.work is not None:
                packed = ctypes.string_at(config + _CONFIG_BYTES, num_bytes)
                recorder.work.append(functools.partial(self._repeat, grid, cta, smem_bytes, packed))
            elif early is None:
                launchKernel(function, grid, 1, 1, cta, 1, 1, smem_bytes, stream, params, 0)
            elif error := early(config, function, params, None):
                raise RuntimeError(f"cukv: cuLaunchKernelEx gave CUDA error {error}")

        return launch

    def _repeat(self, grid: int, cta: int, smem_bytes: int, params: bytes, stream: int) -> None:
        """Make a launch that was recorded; its device is the current one.

        Never early: XLA captures what is repeated and updates its graphs, and CUDA updates none
        that has early launches.
        """
        _, config, address, _ = self._staging.places
        ctypes.memmove(config + _CONFIG_BYTES, params, len(params))
        launchKernel(self._function, grid, 1, 1, cta, 1, 1, smem_bytes, stream, address, 0)


_loaded: dict[tuple[Any, ...], Kernel] = {}
_locks: dict[tuple[Any, ...], threading.Lock] = {}


def kernel(name: str, device: int, /, **template_args: Any) -> Kernel:
    """Give a specialisation loaded on a device."""
    key = (name, device, *template_args.items())
    return _loaded.get(key) or _load(key, name, device, template_args)


def _load(key: tuple[Any, ...], name: str, device: int, args: dict[str, Any]) -> Kernel:
    if args not in specialisations()[name]:
        known = [tuple(map(str, s.values())) for s in specialisations()[name]]
        wanted = {n: str(a) for n, a in args.items()}
        raise NotImplementedError(f"{name}: no specialisation {wanted}; there are {known}")
    with _locks.setdefault(key, threading.Lock()):
        if key not in _loaded:
            path, lowered = cubin(name, arch_of(device), args)
            with cp.cuda.Device(device):
                raw = cp.RawModule(path=str(path)).get_function(lowered)
                _loaded[key] = Kernel(name, device, raw)
        return _loaded[key]


@functools.cache
def num_sms(device: int) -> int:
    """Count the multiprocessors of a device."""
    return int(cp.cuda.Device(device).attributes["MultiProcessorCount"])


@functools.cache
def smem_limits(device: int) -> tuple[int, int]:
    """Give the bytes of shared memory that a CTA may have, and that an SM has."""
    attributes = cp.cuda.Device(device).attributes
    return (
        int(attributes["MaxSharedMemoryPerBlockOptin"]),
        int(attributes["MaxSharedMemoryPerMultiprocessor"]),
    )


@functools.cache
def arch_of(device: int) -> str:
    """Architecture to compile for; from sm_90 on with its own features (wgmma needs sm_90a)."""
    capability = cp.cuda.Device(device).compute_capability
    return f"sm_{capability}{'a' if int(capability) >= 90 else ''}"


def warmup(*kernels: str, dtypes: Sequence[Any] = ("bfloat16",), device: int | None = None) -> None:
    """Compile and load kernels now, so that no later call, and no graph capture, has to.

    Parameters
    ----------
    kernels : names
        Names of ``kernels/*.cu``; all of them by default.
    dtypes : dtypes or names
        Dtypes of the rows and caches that will be used; every combination of them is compiled.
    device : int
        CUDA device; the current one by default.

    Raises
    ------
    CudaUnavailableError
        There is no GPU.
    ValueError
        A name that is not a kernel's.
    """
    if not is_available():
        raise CudaUnavailableError("warmup")
    unknown = set(kernels) - set(specialisations())
    if unknown:
        known = list(specialisations())
        raise ValueError(f"warmup: no kernel {sorted(unknown)}; there are {known}")
    wanted = {as_dtype("warmup", "dtypes", d) for d in dtypes}
    with cp.cuda.Device(device) as current:
        arch = arch_of(current.id)
        chosen = [
            (name, args)
            for name in kernels or specialisations()
            for args in specialisations()[name]
            if runs_on(name, arch)
            if all(value in wanted for value in args.values() if value in SPELLING)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda chosen_one: cubin(chosen_one[0], arch, chosen_one[1]), chosen))
        for name, args in chosen:
            kernel(name, current.id, **args)


def info() -> dict[str, Any]:
    """Describe what kernels are made with and run on; works without a GPU."""
    gpus, driver = [], "none"
    if is_available():
        driver = str(cp.cuda.runtime.driverGetVersion())
        for i in range(cp.cuda.runtime.getDeviceCount()):
            name = cp.cuda.runtime.getDeviceProperties(i)["name"].decode()
            gpus.append(f"{name} (compute capability {cp.cuda.Device(i).compute_capability})")
    return {
        "gpu": ", ".join(gpus) or "none",
        "driver": f"CUDA {driver[:-3]}.{driver[-2]}" if gpus else "none",
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        "cache_folder": str(cache_folder()),
        "kernels": ", ".join(specialisations()),
    }
