"""Kernels by name: source and named template arguments -> cubin -> ``cupy.RawModule`` -> launch.

``kernel(name, device, **template_args)`` gives one loaded specialisation; calling it launches it on
CuPy's current stream with *named* parameters, and ``bind`` packs most of them ahead of many calls.
The ``.cu`` file is the only place where the order of template arguments and the layout of the
parameter struct are written: both are read from it.

Compiling needs no GPU (NVRTC makes machine code for any architecture), so the check that compiles
every specialisation uses the same ``compile_kernels`` as a first call does.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
from cuda import pathfinder
from cupy.cuda import get_current_stream
from cupy_backends.cuda.api.driver import launchKernel
from cupy_backends.cuda.api.runtime import getDevice
from cupy_backends.cuda.libs import nvrtc

from cukv._arrays import CudaUnavailableError, as_dtype, is_available
from cukv._recording import recorder
from cukv._specialisations import SPELLING, runs_on, specialisations

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("cukv")

_PACKAGE = Path(__file__).parent
# A wheel carries the sources inside the package; a checkout has them beside it.
ROOT = next(p for p in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels") if p.exists())

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


# --------------------------------------------------------------------------- reading the sources


@functools.cache
def source(name: str) -> str:
    """Text of ``kernels/<name>.cu``; includes stay includes."""
    return (ROOT / f"{name}.cu").read_text(encoding="utf-8")


@functools.cache
def _headers() -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in sorted(ROOT.glob("common/*.cuh")))


@functools.cache
def _digest() -> str:
    """Hash every kernel source: an edited header must never find an old cubin."""
    sha = hashlib.sha256()
    for path in sorted(p for p in ROOT.rglob("*") if p.suffix in {".cu", ".cuh"}):
        sha.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def _template_names(name: str) -> list[str]:
    found = re.search(rf"(?:template <([^>]*)>\s*)?__global__[^;{{]*?\b{name}\(", source(name))
    if found is None:
        raise ValueError(f"kernels/{name}.cu defines no __global__ function {name}")
    return [p.split()[-1] for p in found[1].split(",")] if found[1] else []


_SCALARS = {"int32_t": "i", "uint32_t": "I", "float": "f", "int64_t": "q", "uint64_t": "Q"}


class Layout(NamedTuple):
    """A C struct as Python packs it; nested structs, or arrays of them, are fields of bytes."""

    names: tuple[str, ...]
    codes: tuple[str, ...]  # of each field, with the padding before it; then the padding at the end
    size: int
    alignment: int

    @property
    def format(self) -> str:
        """Format of all of it."""
        return "=" + "".join(self.codes)


@functools.cache
def struct_layout(struct_name: str, kernel_name: str | None = None) -> Layout:
    """Read a parameter struct from the sources, with C's own alignment rules."""
    text = (source(kernel_name) if kernel_name else "") + _headers()
    alias = re.search(rf"^using {struct_name} = (\w+);$", text, re.MULTILINE)
    if alias is not None:
        return struct_layout(alias[1], kernel_name)
    found = re.search(
        rf"struct (?:alignas\((\d+)\) )?{struct_name}(?: : (\w+))? \{{\n(.*?)\n\}};",
        text,
        re.DOTALL,
    )
    if found is None:
        raise ValueError(f"no struct {struct_name} in kernels/{kernel_name}.cu or kernels/common")
    aligned, base, body = found.groups()
    names, codes, size, alignment, gap = [], [], 0, int(aligned or 1), 0
    if base is not None:  # its fields come first, and the padding at its end stays
        inherited = struct_layout(base, kernel_name)
        names, (*codes, tail_code) = [*inherited.names], inherited.codes
        size, alignment = inherited.size, max(alignment, inherited.alignment)
        gap = struct.calcsize(f"={tail_code}")
    # A field is a statement of the struct itself without a call; the rest are member functions.
    body = re.sub(r" *//[^\n]*", "", body)
    for line in re.findall(r"^    ([^\s(][^(\n]*;)$", body, re.MULTILINE):
        parsed = re.fullmatch(r"([\w ]+?[*&]?) (\w+)(?:\[(\d+)\])?;", line)
        if parsed is None or (parsed[3] and parsed[1] in _SCALARS):
            raise ValueError(f"struct {struct_name}: one plain field per line, got {line!r}")
        declared, field, count = parsed.groups()
        if declared == "uint8_t":
            code, width, align = f"{count}s", int(count), 1
        elif declared.endswith("*"):
            code, width, align = "Q", 8, 8
        elif declared in _SCALARS:
            code = _SCALARS[declared]
            width = align = struct.calcsize("=" + code)
        else:
            nested = struct_layout(declared, kernel_name)
            width, align = nested.size * int(count or 1), nested.alignment
            code = f"{width}s"
        pad = -size % align
        codes.append(f"{gap + pad}x{code}")
        size, alignment, gap = size + pad + width, max(alignment, align), 0
        names.append(field)
    tail = -size % alignment
    return Layout(tuple(names), (*codes, f"{tail}x"), size + tail, alignment)


def packer(struct_name: str, kernel_name: str | None = None) -> Callable[..., bytes]:
    """Give ``pack(*fields) -> bytes`` for a struct of kernels/common or of one kernel, in order."""
    return struct.Struct(struct_layout(struct_name, kernel_name).format).pack


# -------------------------------------------------------------------------------------- compiling


@functools.cache
def cuda_include() -> str:
    """Folder of cuda_fp16.h and its kin, from the runtime-header wheel or a CUDA toolkit."""
    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None:
        raise RuntimeError(
            "cukv: the CUDA headers were not found; `pip install nvidia-cuda-runtime-cu12` "
            "(with cupy-cuda12x) or set CUDA_PATH to a CUDA toolkit"
        )
    return str(folder)


def options(arch: str) -> tuple[str, ...]:
    """NVRTC options for one architecture, e.g. ``sm_90a``."""
    return (
        f"--gpu-architecture={arch}",
        "-std=c++17",
        "-default-device",
        "-lineinfo",
        "--ptxas-options=-v",  # registers, stack and spills go to the log
        f"-I{ROOT}",
        f"-I{cuda_include()}",
    )


def _symbol(name: str, template_args: dict[str, Any]) -> str:
    declared = _template_names(name)
    if sorted(declared) != sorted(template_args):
        raise TypeError(f"{name}: template takes {declared}, got {sorted(template_args)}")
    args = ", ".join(str(SPELLING.get(template_args[p], template_args[p])) for p in declared)
    return f"cukv::{name}<{args}>" if declared else f"cukv::{name}"


def compile_kernels(
    name: str, arch: str, template_args: Sequence[dict[str, Any]]
) -> tuple[bytes, list[str], str]:
    """Compile specialisations of one file: (cubin, lowered names, compiler's log). Needs no GPU."""
    symbols = [_symbol(name, args) for args in template_args]
    # Naming the parameter struct's size lets the kernel assert it: the two sides cannot drift.
    params = struct_layout(_params_struct(name), name)
    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    try:
        for symbol in symbols:
            nvrtc.addNameExpression(program, symbol)
        try:
            nvrtc.compileProgram(program, (*options(arch), f"-DPARAMS_BYTES={params.size}"))
        except nvrtc.NVRTCError as error:
            text = nvrtc.getProgramLog(program)
            raise RuntimeError(f"cukv: {symbols[0]} for {arch}: {error}\n{text}") from error
        lowered = [nvrtc.getLoweredName(program, symbol) for symbol in symbols]
        cubin = nvrtc.getCUBIN(program)
        cubin += bytes(-len(cubin) % 8)  # CuPy gives it without its last byte, a zero
        return cubin, lowered, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _params_struct(name: str) -> str:
    """Name of a kernel's parameter struct: its own name in camel case, e.g. CopyPagesParams."""
    return "".join(word.capitalize() for word in name.split("_")) + "Params"


# ---------------------------------------------------------------------------------- cubins on disk


@functools.cache
def cache_folder() -> Path:
    """Folder of compiled kernels: CUKV_CACHE_DIR, else the user's cache, else a temporary one."""
    named, base = (os.environ.get(name) for name in ("CUKV_CACHE_DIR", "XDG_CACHE_HOME"))
    try:
        folder = Path(named or Path(base or Path("~/.cache").expanduser(), "cukv"))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        temporary = tempfile.mkdtemp(prefix="cukv-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        log.warning("cannot write compiled kernels (%s): they go to %s", error, temporary)
        return Path(temporary)


def _cubin(name: str, arch: str, template_args: dict[str, Any]) -> tuple[Path, str]:
    """Path of a specialisation's cubin and its lowered name, compiled unless already on disk."""
    symbol, flags = _symbol(name, template_args), options(arch)
    headers = Path(cuda_include(), "cuda_fp16.h").stat().st_mtime_ns
    identity = repr((symbol, flags, headers, nvrtc.getVersion(), _digest()))
    key = f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    path, lowered_path = (cache_folder() / f"{key}{suffix}" for suffix in (".cubin", ".name"))
    if not (path.exists() and lowered_path.exists()):
        log.info("compiling %s for %s", symbol, arch)
        cubin, lowered, _ = compile_kernels(name, arch, [template_args])
        # The name first: whoever sees the cubin finds its name too.
        _write_whole(lowered_path, lowered[0].encode())
        _write_whole(path, cubin)
    return path, lowered_path.read_text(encoding="ascii")


def _write_whole(path: Path, content: bytes) -> None:
    """Write so that other processes see nothing or all of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------------------ loading, launching


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
        self._layout = struct_layout(_params_struct(name), name)
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
            path, lowered = _cubin(name, arch_of(device), args)
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
            list(pool.map(lambda chosen_one: _cubin(chosen_one[0], arch, chosen_one[1]), chosen))
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
