"""Headers and indexes of safetensors, checked whole when they are read.
Format: https://github.com/huggingface/safetensors#format.

A file is 8 bytes of length, that much JSON, and the data: shapes and sizes are known without torch.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from optkit.common.files import check_name, open_file, read_object, reading, shown, texts_of
from optkit.errors import SourceError
from optkit.model.shape import DTYPE_BITS, TensorInfo

AGAIN = "Copy or download it again"
METADATA = "__metadata__"
MOST_BYTES = 100_000_000
"""Of a header; the library safetensors reads no more."""
MOST_DIMENSIONS = 64
SHARD_BYTES = 1 << 30
"""Largest shard that is written, unless one tensor is larger."""
FILES_AT_ONCE = 1024
"""Headers that are kept, of the files that were read last: a run opens a checkpoint some ten times."""


class Stamp(NamedTuple):
    """What tells a file from another that takes its place."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Stamp:
        """Return that of an open file."""
        status = os.fstat(descriptor)
        return cls(status.st_size, status.st_mtime_ns)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return name -> dtype and shape of one safetensors file.
    Raises SourceError if the file is cut off or not safetensors.
    """
    return {name: info for name, (info, _) in read_places(path)[0].items()}


def read_places(path: Path) -> tuple[Mapping[str, tuple[TensorInfo, int]], Stamp]:
    """Return name -> dtype and shape, and the byte of the file that its data begins at; and which file
    that was. Raises as `read_header`.
    """
    with open_file(path) as file:
        stamp = Stamp.of(file.fileno())
    return _places(path.absolute(), stamp), stamp


@lru_cache(FILES_AT_ONCE)
def _places(path: Path, stamp: Stamp) -> Mapping[str, tuple[TensorInfo, int]]:
    size = stamp.size
    with open_file(path) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= size - 8:
            raise SourceError(f"not a whole safetensors file ({size:,} bytes)", where=str(path), remedy=AGAIN)
        with reading(path, "the header is not safetensors", AGAIN):
            if length > MOST_BYTES:
                raise ValueError(f"It has {length:,} bytes")
            tensors, data = _read(json.loads(file.read(length)))
    if 8 + length + data != size:
        raise SourceError(
            f"the file has {size:,} bytes and its header asks for {8 + length + data:,}",
            where=str(path),
            why="It was cut off or overwritten",
            remedy=AGAIN,
        )
    return {name: (info, 8 + length + begin) for name, (info, begin) in tensors.items()}


def _read(header: Any) -> tuple[dict[str, tuple[TensorInfo, int]], int]:
    """Return the tensors of a header with their beginnings, and the bytes of their data, which they
    fill without holes.
    """
    if not isinstance(header, dict):
        raise ValueError(f"{shown(header)} is not an object")
    texts_of(header.get(METADATA) or {})
    entries = {name: entry for name, entry in header.items() if name != METADATA}
    offsets = {name: _offsets(name, entry) for name, entry in entries.items()}
    tensors = {name: (tensor_info(name, entry), offsets[name][0]) for name, entry in entries.items()}
    at = 0
    for (begin, end), name in sorted((place, name) for name, place in offsets.items()):
        if begin != at:
            raise ValueError(f"{name} begins at byte {begin:,} of the data and not at {at:,}")
        info = tensors[name][0]
        if end - begin != (size := info.size_bytes):
            raise ValueError(f"{name} has {end - begin:,} bytes, and {info.dtype} {list(info.shape)} needs {size:,}")
        at = end
    return tensors, at


def tensor_info(name: str, entry: Any) -> TensorInfo:
    """Return what `{"dtype": ..., "shape": [...]}` says; raises ValueError if it is malformed."""
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, Mapping) else (None, None)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"{name} has the dtype {shown(dtype)}, which is none of {', '.join(DTYPE_BITS)}")
    sizes: Any = shape if isinstance(shape, list | tuple) and len(shape) <= MOST_DIMENSIONS else [None]
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"{name} has the shape {shown(shape)}, which is no list of sizes")
    return TensorInfo(dtype, tuple(sizes))


def _offsets(name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    found = entry.get("data_offsets")
    if not (
        isinstance(found, list)
        and len(found) == 2
        and all(type(each) is int for each in found)
        and 0 <= found[0] <= found[1]
    ):
        raise ValueError(f"{name} lies at {shown(found)}, which is no beginning and end")
    return found[0], found[1]


def read_index(path: Path) -> dict[str, str]:
    """Return tensor -> file of an index of several safetensors files, all of them in its directory.
    Raises SourceError.
    """
    found = read_object(path, remedy=AGAIN)
    with reading(path, "is not an index of safetensors", AGAIN):
        files = dict(texts_of(found.get("weight_map")))
        if not files:
            raise ValueError("It names no tensor")
        for name in set(files.values()):
            check_name(name)
    return files
