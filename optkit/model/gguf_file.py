"""Read a GGUF file's header, metadata and tensor infos, without torch and without weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from optkit.common.files import open_file, reading
from optkit.errors import SourceError, needing

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type of the format -> struct code."""
STRING, ARRAY = 8, 9
ALIGNMENTS = frozenset(1 << power for power in range(21))
MOST_DIMENSIONS = 4
"""Of a tensor of ggml."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file."""

    shape: tuple[int, ...]
    """As torch has it: the fastest dimension last."""
    type: str
    """As ggml names it: F32, Q4_1, ..."""
    size_bytes: int
    offset: int
    """From the start of the data section, in bytes."""


@dataclass(frozen=True)
class Gguf:
    """What the header says."""

    path: Path
    metadata: Mapping[str, Any]
    """Arrays are left out, all but their length: `("array", 49152)`."""
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's own part of the metadata, e.g. `embedding_length`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> Gguf:
    """Return the header of a GGUF file. Raises SourceError if the file is missing, of another
    kind, split or cut off.
    """
    if not path.exists():
        raise SourceError("no such file", where=str(path))
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(4) != MAGIC:
            raise SourceError(
                f"not a GGUF file ({size:,} bytes)",
                where=str(path),
                why="It does not begin with 'GGUF'",
                remedy="Download it again",
            )
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            reading(path, f"not a whole GGUF file ({size:,} bytes)"),
        ):
            gguf, end = _read(_Reader(data, path), path)
    if end > size:
        raise _cut_off(path, size, end)
    if (parts := gguf.metadata.get("split.count", 1)) != 1:
        raise SourceError(
            f"one of {parts} parts of a split GGUF",
            where=str(path),
            why="optkit reads whole files",
            remedy="Join them: llama-gguf-split --merge FIRST_PART WHOLE",
        )
    return gguf


class _Reader:
    """Reads one value behind the other, and none that the file is too short for."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 4

    def take(self, count: int) -> int:
        """Return the place of the next bytes, and go on behind them."""
        at = self.at
        if count > len(self.data) - at:
            raise _cut_off(self.path, len(self.data), at + count)
        self.at += count
        return at

    def scalar(self, code: str) -> Any:
        form = struct.Struct(f"<{code}")
        return form.unpack_from(self.data, self.take(form.size))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        at = self.take(length)
        return self.data[at : at + length].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(self.code(kind))
        item, count = self.scalar("I"), self.scalar("Q")
        if item == STRING:
            for _ in range(count):
                self.take(self.scalar("Q"))
        elif item == ARRAY:
            raise ValueError("an array of arrays, which no model has")
        else:
            self.take(count * struct.calcsize(f"<{self.code(item)}"))
        return ("array", count)

    def code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise SourceError(
                f"unknown value type {kind} in the metadata", where=str(self.path), remedy="Download it again"
            )
        return SCALARS[kind]


def _read(reader: _Reader, path: Path) -> tuple[Gguf, int]:
    version = reader.scalar("I")
    if version not in VERSIONS:
        why, remedy = "optkit reads versions 2 and 3, little-endian", "Download or convert it again"
        raise SourceError(f"GGUF version {version}", where=str(path), why=why, remedy=remedy)
    tensor_count, value_count = reader.scalar("Q"), reader.scalar("Q")
    metadata = {}
    for _ in range(value_count):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    tensors = {}
    for _ in range(tensor_count):
        name, rank = reader.string(), reader.scalar("I")
        if rank > MOST_DIMENSIONS:
            raise ValueError(f"{name} has {rank:,} dimensions")
        dimensions = [reader.scalar("Q") for _ in range(rank)]
        tensors[name] = _tensor(name, tuple(reversed(dimensions)), reader.scalar("I"), reader.scalar("Q"), path)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in ALIGNMENTS:
        raise ValueError(f"general.alignment is {alignment!r}, which is no power of two")
    start = -(-reader.at // alignment) * alignment
    end = max((start + tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=start)
    return Gguf(path, metadata, tensors), end


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int, path: Path) -> GgufTensor:
    with needing("gguf", str(path), "optkit[gguf]"):
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    if kind not in {known.value for known in GGMLQuantizationType}:
        raise SourceError(
            f"the tensor type {kind} is not known", where=f"{path}: {name}", remedy="Run: pip install -U gguf"
        )
    quantization = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if prod(shape[-1:]) % block:
        raise ValueError(f"{name} has rows of {shape[-1]:,} numbers, and {quantization.name} packs {block} at a time")
    return GgufTensor(shape, quantization.name, prod(shape) // block * block_bytes, offset)


def _cut_off(path: Path, size: int, end: int | None = None) -> SourceError:
    asked = f" and its header asks for {end:,}" if end else ""
    return SourceError(
        f"the GGUF file has {size:,} bytes{asked}",
        where=str(path),
        why="It was cut off or overwritten",
        remedy="Copy or download it again",
    )
