"""Products of E4M3 codes that cuBLASLt scales, and adds to what is there, for which torch has no call.

Else a kernel behind the product scales and adds, which reads it again, and the sums twice.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from optkit.errors import OptkitError
from optkit.kernels.cuda.finishing import Coded
from optkit.kernels.cuda.matrix import Matrix

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
COMPUTED_IN_FLOAT32 = 68
TRANSPOSED, SCALES, FAST, SCALED_BY, ROWS = 3, (17, 18), 25, (31, 32), 3
WORKSPACE = 1
"""Numbers of cudaDataType_t, cublasComputeType_t, cublasLtMatmulDescAttributes_t (of either matrix where there are
two), cublasLtMatmulMatrixScale_t and cublasLtMatmulPreferenceAttributes_t.
"""
FIRST_VERSION = 120900
"""Of cuBLAS, that has scales of rows."""
CAPABILITY = (9, 0)
"""Of the GPUs on which it was tried; others are not known to have scales of rows."""
FEWEST_ROWS = 512
"""For which its kernels that scale are as fast as those that do not, on an H200."""
MOST_WORKSPACE = 32 << 20
"""Bytes that an algorithm may ask for; torch allows as much."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("words", c_uint64 * 8), ("workspace", c_size_t), ("rest", c_int * 6)]


def is_scaled(matrix: Matrix, rows: int) -> bool:
    """Say whether `scaled_product` multiplies so many rows."""
    codes = matrix.weight
    fits = rows >= FEWEST_ROWS and codes.is_cuda and codes.dtype == torch.float8_e4m3fn and matrix.bias is None
    return fits and torch.cuda.get_device_capability(codes.device) == CAPABILITY and _version() >= FIRST_VERSION


def scaled_product(matrix: Matrix, x: Coded, y: Tensor, *, add: bool = False) -> None:
    """Write x W^T into y, float [rows, outputs], or add it; can be captured in a CUDA graph."""
    with torch.cuda.device(y.device):
        product = _product(matrix.outputs, matrix.inputs, len(y), y.dtype, y.get_device())
        product.run(matrix, x, y, float(add))


class _Product:
    """How cuBLASLt makes a product of so many rows, which are columns to it."""

    def __init__(self, outputs: int, inputs: int, rows: int, dtype: torch.dtype, device: int) -> None:
        self._how, self._library, self._alone = c_void_p(), _library(device), Lock()
        _call("MatmulDescCreate", byref(self._how), COMPUTED_IN_FLOAT32, TYPES[torch.float32])
        self._set(TRANSPOSED, c_int(1))
        self._set(FAST, c_int8(1))
        for mode, scales in zip(SCALED_BY, SCALES, strict=True):
            self._set(mode, c_int(ROWS))
            self._set(scales, self._how)  # any place: who looks for an algorithm wants one
        sizes = (inputs, outputs), (inputs, rows), (outputs, rows)
        kinds = torch.float8_e4m3fn, torch.float8_e4m3fn, dtype
        self._layouts = [_layout(TYPES[kind], *size) for kind, size in zip(kinds, sizes, strict=True)]
        weight, x, y = self._layouts
        wanted, self._algorithm, found = c_void_p(), _Algorithm(), c_int()
        _call("MatmulPreferenceCreate", byref(wanted))
        _call("MatmulPreferenceSetAttribute", wanted, WORKSPACE, byref(c_size_t(MOST_WORKSPACE)), c_size_t(8))
        asked = (self._library, self._how, weight, x, y, y, wanted, 1)
        _call("MatmulAlgoGetHeuristic", *asked, byref(self._algorithm), byref(found))

    def run(self, matrix: Matrix, x: Coded, y: Tensor, of_before: float) -> None:
        workspace = torch.empty(self._algorithm.workspace, dtype=torch.uint8, device=y.device)
        weight, codes, sums = zip(map(_address, (matrix.weight, x.codes, y)), self._layouts, strict=True)
        given = (byref(c_float(1)), *weight, *codes, byref(c_float(of_before)), *sums, *sums)
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        how = (byref(self._algorithm), _address(workspace), c_size_t(len(workspace)), stream)
        with self._alone:
            for name, scales in zip(SCALES, (matrix.scales, x.scales), strict=True):
                self._set(name, _address(scales))
            _call("Matmul", self._library, self._how, *given, *how)

    def _set(self, name: int, value: Any) -> None:
        _call("MatmulDescSetAttribute", self._how, name, byref(value), c_size_t(ctypes.sizeof(value)))


_product = cache(_Product)


def _layout(kind: int, rows: int, columns: int) -> c_void_p:
    made = c_void_p()
    _call("MatrixLayoutCreate", byref(made), kind, c_uint64(rows), c_uint64(columns), c_int64(rows))
    return made


def _address(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_cublas(), f"cublasLt{name}")(*arguments):
        raise OptkitError(f"cuBLAS refuses ({status})", where=f"cublasLt{name}")


@cache
def _cublas() -> ctypes.CDLL:
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '13').partition('.')[0]}")


@cache
def _version() -> int:
    return int(_cublas().cublasLtGetVersion())


@cache
def _library(device: int) -> c_void_p:
    """Return cuBLASLt's handle of the current device."""
    handle = c_void_p()
    _call("Create", byref(handle))
    return handle
