"""CUDA C++ compiled by the NVRTC that comes with torch, launched on torch's current stream.

Launches can be captured in a CUDA graph. If the GPU can (compute capability 9.0), each kernel
may start before the one before it in the stream has ended (programmatic dependent launch); the
kernels wait for its end themselves, with `griddepcontrol.wait`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.common.cache import cache_directory
from optkit.errors import OptkitError
from optkit.kernels.library_cache import LENGTH, keep_library, kept_library, private_directory

SOURCES = Path(__file__).parent
PROGRAMMATIC_STREAM_SERIALIZATION = 6
MAX_DYNAMIC_SHARED_BYTES, SHARED_PER_CENT, LARGE_CLUSTERS = 8, 9, 14
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION and, of CU_FUNC_ATTRIBUTE, MAX_DYNAMIC_SHARED_SIZE_BYTES,
PREFERRED_SHARED_MEMORY_CARVEOUT and NON_PORTABLE_CLUSTER_SIZE_ALLOWED of cuda.h.
"""
KEPT, SUFFIX = "cuda_kernels", ".cubin"
"""Where in the cache directory machine code is kept, and how its files end."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
        ],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Kernel:
    """A compiled function on a device."""

    def __init__(self, function: ctypes.c_void_p, where: str, device: int, overlaps: bool) -> None:
        self._function, self._where, self._device, self._overlaps = function, where, device, overlaps
        self._allowed = 0

    def __call__(
        self, grid: tuple[int, int, int], threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0
    ) -> None:
        """Launch on torch's current stream of the device.

        `arguments`: tensors (their first byte), None (a null pointer), int and float (32 bits).
        Raises OptkitError if CUDA refuses.
        """
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(grid, threads, arguments, shared_bytes)
        return self.again(grid, threads, arguments, shared_bytes)()

    def again(
        self, grid: tuple[int, int, int], threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0
    ) -> Callable[..., None]:
        """Return what launches it again and again as `__call__` does, on what is the current stream now, perhaps with
        another int as its last argument. The device is the current one.
        """
        library = driver()
        if shared_bytes > self._allowed:
            self._check(library.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes))
            self._check(library.cuFuncSetAttribute(self._function, SHARED_PER_CENT, 100))
            if self._overlaps:
                self._check(library.cuFuncSetAttribute(self._function, LARGE_CLUSTERS, 1))
            self._allowed = shared_bytes
        values = [_as_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(*grid, threads, 1, 1, shared_bytes, stream, ctypes.pointer(attribute), int(self._overlaps))

        def once(*last: int) -> None:
            for value in last:
                values[-1].value = value
            self._check(library.cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None))

        return once

    def _check(self, status: int) -> None:
        if status:
            message = ctypes.c_char_p()
            driver().cuGetErrorString(status, ctypes.byref(message))
            raise OptkitError(f"CUDA: {(message.value or b'error').decode()} ({status})", where=self._where)


def compiled(source: str, name: str, macros: Mapping[str, int], device: int) -> Kernel:
    """Return the function `name` of SOURCES/`source` with these macros, without those that are False, for a
    device. numbers.cuh goes before it; it is loaded once in a process.
    """
    return _loaded(source, name, tuple(sorted(defined(macros).items())), device)


def defined(macros: Mapping[str, int]) -> dict[str, int]:
    """Return the macros with 1 for True, and without those that are False."""
    return {name: int(value) for name, value in macros.items() if value is not False}


@cache
def _loaded(source: str, name: str, macros: tuple[tuple[str, int], ...], device: int) -> Kernel:
    capability = torch.cuda.get_device_capability(device)
    code = (SOURCES / "numbers.cuh").read_text(encoding="utf-8") + (SOURCES / source).read_text(encoding="utf-8")
    where = f"{source} ({', '.join(f'{key}={value}' for key, value in macros)})"
    architecture = f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")  # a: wgmma
    binary = kept_binary(code, dict(macros), architecture, where)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context is torch's
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        kernel = Kernel(function, where, device, overlaps=capability >= (9, 0))
        kernel._check(driver().cuModuleLoadData(ctypes.byref(module), binary))
        kernel._check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return kernel


def kept_binary(code: str, macros: Mapping[str, int], architecture: str, where: str) -> bytes:
    """Return what `compile_source` does; an earlier process may have compiled it.
    It is kept in the cache, if anything can be.
    """
    parts = (code, *_options(macros, architecture), *_version())
    made_of = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:LENGTH]
    with contextlib.suppress(OSError):
        if kept := kept_library(private_directory(cache_directory() / KEPT), made_of, SUFFIX):
            return kept.read_bytes()
    binary = compile_source(code, macros, architecture, where)
    with contextlib.suppress(OSError):
        place = private_directory(cache_directory() / KEPT)
        with tempfile.TemporaryDirectory(dir=place) as directory:
            made = Path(directory) / f"kernel{SUFFIX}"
            made.write_bytes(binary)
            keep_library(made, place, made_of)
    return binary


def _options(macros: Mapping[str, int], architecture: str) -> list[str]:
    return [f"--gpu-architecture={architecture}", "--std=c++17", *[f"-D{key}={value}" for key, value in macros.items()]]


def _version() -> tuple[str, str]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return str(major.value), str(minor.value)


def compile_source(code: str, macros: Mapping[str, int], architecture: str, where: str) -> bytes:
    """Return the machine code for e.g. `sm_90`; needs no GPU. Raises OptkitError with the
    compiler's first lines.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"optkit.cu", 0, None, None)
    options = _options(macros, architecture)
    given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
            lines = log.strip("\0\n").splitlines()
            errors = [line for line in lines if " error" in line] or lines
            raise OptkitError("NVRTC cannot compile it", where=where, why="; ".join(errors[:3]))
        return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, size_of: Any, read: Any) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    read(program, held)
    return held.raw


def _as_c(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


@cache
def driver() -> ctypes.CDLL:
    """Return CUDA's driver."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "13").partition(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError as error:
        raise OptkitError(
            f"libnvrtc.so.{major} is not there", why="torch's CUDA packages bring it", remedy="Install torch for CUDA"
        ) from error
