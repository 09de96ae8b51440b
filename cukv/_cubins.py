"""Cubins by name: a kernel's source and named template arguments -> machine code, kept on disk.

Compiling needs no GPU (NVRTC makes machine code for any architecture), so the check that compiles
every specialisation uses the same ``compile_kernels`` as a first call does.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda import pathfinder
from cupy_backends.cuda.libs import nvrtc

from cukv import _sources
from cukv._sources import digest, params_struct, source, struct_layout, template_names
from cukv._specialisations import SPELLING

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("cukv")

_SUFFIXES = (".cubin", ".name")


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
        f"-I{_sources.ROOT}",
        f"-I{cuda_include()}",
    )


def symbol(name: str, template_args: dict[str, Any]) -> str:
    """Spell a specialisation in C++; its template arguments are given by name."""
    declared = template_names(name)
    if sorted(declared) != sorted(template_args):
        raise TypeError(f"{name}: template takes {declared}, got {sorted(template_args)}")
    args = ", ".join(str(SPELLING.get(template_args[p], template_args[p])) for p in declared)
    return f"cukv::{name}<{args}>" if declared else f"cukv::{name}"


def compile_kernels(
    name: str, arch: str, template_args: Sequence[dict[str, Any]]
) -> tuple[bytes, list[str], str]:
    """Compile specialisations of one file: (cubin, lowered names, compiler's log). Needs no GPU."""
    symbols = [symbol(name, args) for args in template_args]
    # Naming the parameter struct's size lets the kernel assert it: the two sides cannot drift.
    params = struct_layout(params_struct(name), name)
    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    try:
        for expression in symbols:
            nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, (*options(arch), f"-DPARAMS_BYTES={params.size}"))
        except nvrtc.NVRTCError as error:
            text = nvrtc.getProgramLog(program)
            raise RuntimeError(f"cukv: {symbols[0]} for {arch}: {error}\n{text}") from error
        lowered = [nvrtc.getLoweredName(program, expression) for expression in symbols]
        binary = nvrtc.getCUBIN(program)
        binary += bytes(-len(binary) % 8)  # CuPy gives it without its last byte, a zero
        return binary, lowered, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


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
        return _temporary_folder(error)


def _temporary_folder(error: Exception) -> Path:
    """Make a folder for this process alone, because another cannot be written."""
    temporary = tempfile.mkdtemp(prefix="cukv-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    log.warning("cannot write compiled kernels (%s): they go to %s", error, temporary)
    return Path(temporary)


def cubin(name: str, arch: str, template_args: dict[str, Any]) -> tuple[Path, str]:
    """Path of a specialisation's cubin and its lowered name, compiled unless already on disk."""
    expression, flags = symbol(name, template_args), options(arch)
    headers = Path(cuda_include(), "cuda_fp16.h").stat().st_mtime_ns
    identity = repr((expression, flags, headers, nvrtc.getVersion(), digest()))
    key = f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    path, lowered_path = (cache_folder() / f"{key}{suffix}" for suffix in _SUFFIXES)
    if path.exists() and lowered_path.exists():
        return path, lowered_path.read_text(encoding="ascii")
    log.info("compiling %s for %s", expression, arch)
    binary, lowered, _ = compile_kernels(name, arch, [template_args])
    try:
        return _write_both(cache_folder(), key, binary, lowered[0]), lowered[0]
    except OSError as error:  # a full disk
        return _write_both(_temporary_folder(error), key, binary, lowered[0]), lowered[0]


def _write_both(folder: Path, key: str, binary: bytes, lowered: str) -> Path:
    """Write a cubin and its name; the name first: whoever sees the cubin finds its name too."""
    path, lowered_path = (folder / f"{key}{suffix}" for suffix in _SUFFIXES)
    _write_whole(lowered_path, lowered.encode())
    _write_whole(path, binary)
    return path


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
