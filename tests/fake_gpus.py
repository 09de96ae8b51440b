"""GPUs that are not there: the host's half of every call runs on them, up to the launches.

No kernel is compiled, and arrays are ``cases.fake_cupy``'s, which nothing reads or writes.
"""

import ctypes
from typing import NamedTuple

import cupy as cp
from cases import fake_cupy

from cukv import (
    _arrays,
    _captures,
    _kernels,
    _latent_attention,
    _paged_attention,
    _plan,
    _tensor_maps,
)
from cukv._noun import Noun

STREAM_OFFSET = 32  # in CUlaunchConfig

# What remembers devices or what was loaded on them.
KNOWN_DEVICES = (
    _kernels.num_sms,
    _kernels.smem_limits,
    _kernels.arch_of,
    _latent_attention._kinds_of,
    _paged_attention._kinds_of,
)


def moved(change, x):
    """Move an array, a noun, or what has several of them."""
    if isinstance(x, (tuple, list)):
        return [moved(change, each) for each in x]
    return x._map(change) if isinstance(x, Noun) else change(x)


def fake(device, x):
    """Make what has their shapes on a GPU that is not there."""
    return moved(lambda array: fake_cupy(array.shape, array.dtype, device), x)


class Launch(NamedTuple):
    """A launch: of which kernel, loaded on which device; where it went."""

    name: str
    loaded_on: int
    current: int  # device
    stream_of: int  # device


class FakeGpus:
    """GPUs of an H200's size and one compute capability; device 0 is current at first."""

    attributes = {  # noqa: RUF012
        "MultiProcessorCount": 132,
        "MaxSharedMemoryPerBlockOptin": 232_448,
        "MaxSharedMemoryPerMultiprocessor": 233_472,
    }

    def __init__(self, monkeypatch, compute_capability, count=1):
        self.compute_capability = compute_capability
        self.current = 0
        self.launches = []
        self.allocated_on = []  # devices
        self.capturing = set()  # devices whose stream is
        functions = []  # by their handles: names, and where they are loaded
        gpus = self

        class Device:
            attributes, compute_capability = gpus.attributes, gpus.compute_capability

            def __init__(self, device=None):
                self.id = gpus.current if device is None else device
                assert 0 <= self.id < count
                self._before = []

            def __enter__(self):
                self._before.append(gpus.current)
                gpus.current = self.id
                return self

            def __exit__(self, *error):
                gpus.current = self._before.pop()

        class Module:
            max_dynamic_shared_size_bytes = _kernels._UNASKED_SMEM_BYTES

            def __init__(self, path):
                functions.append((path, gpus.current))
                self.ptr = len(functions) - 1

            kernel = property(lambda self: self)

            def get_function(self, name):
                return self

        class Stream:
            def __init__(self, device=-1):
                self.ptr = gpus.current if device < 0 else device

            def is_capturing(self):
                return self.ptr in gpus.capturing

        def launch(function, stream):
            self.launches.append(Launch(*functions[function], self.current, stream))

        def launch_ex(config, function, *parameters):
            launch(function, ctypes.c_uint64.from_address(config + STREAM_OFFSET).value)
            return 0

        def get_device():
            return self.current

        for place, name, fake in (
            (cp.cuda, "Device", Device),
            (cp.cuda, "get_current_stream", Stream),
            (_arrays, "getDevice", get_device),
            (cp, "RawModule", Module),
            (_arrays, "is_available", lambda: True),
            (_plan, "getDevice", get_device),
            (_kernels, "getDevice", get_device),
            (_kernels, "get_current_stream", Stream),
            (_captures, "get_current_stream", Stream),
            (_captures, "streamIsCapturing", lambda stream: stream in self.capturing),
            (_captures, "getDevice", get_device),
            (_captures, "_last_node", lambda stream: None),
            # A function, grid, CTA, bytes of shared memory, a stream, and parameters.
            (_kernels, "launchKernel", lambda *args: launch(args[0], args[8])),
            (_kernels, "_cu_launch_kernel_ex", lambda: launch_ex),
            (_kernels, "cubin", lambda name, *_: (name, name)),
            (_kernels, "_loaded", {}),
            (_kernels, "_locks", {}),
            (_tensor_maps, "_cu_tensor_map_encode_tiled", lambda: lambda *args: 0),
        ):
            monkeypatch.setattr(place, name, fake)

    def __enter__(self):
        self._forget()
        self._allocator = cp.cuda.get_allocator()
        cp.cuda.set_allocator(self._allocate)
        return self

    def __exit__(self, *error):
        cp.cuda.set_allocator(self._allocator)
        self._forget()

    def names(self):
        """Give the names of the kernels launched since it was last asked."""
        names = [launch.name for launch in self.launches]
        self.launches.clear()
        return names

    def _allocate(self, num_bytes):
        """Give memory that is not there, at an address that any vector is aligned to."""
        self.allocated_on.append(self.current)
        memory = cp.cuda.UnownedMemory(1 << 30, num_bytes, None, self.current)
        return cp.cuda.MemoryPointer(memory, 0)

    def _forget(self):
        for function in KNOWN_DEVICES:
            function.cache_clear()
