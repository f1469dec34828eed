"""Read model.onnx without its weights: the graph, initializers, and whether their data is whole.

ONNX IR specification: https://github.com/onnx/onnx/blob/main/docs/IR.md, external data:
.../docs/ExternalData.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from optkit.common.files import check_kinds, check_name, check_regular, reading
from optkit.errors import SourceError, needing
from optkit.model.companions import require_inside
from optkit.model.shape import DTYPE_BITS

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

MODEL = "model.onnx"
ENCODER, DECODER, STEPS = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
PARTS = (STEPS, DECODER, ENCODER)
"""The graphs of an encoder-decoder, as optimum calls them: the decoder behind its first tokens, at
them, where it leaves the KV cache, and what makes both of their input.
"""
AGAIN = "Copy or export it again"
RENAMED = {"float": "float32", "double": "float64"}
SAFETENSORS_NAMES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "int4": "I4", "int2": "I2",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "uint4": "U4", "uint2": "U2",
    "float8e4m3fn": "F8_E4M3", "float8e4m3fnuz": "F8_E4M3", "float8e5m2": "F8_E5M2", "float8e5m2fnuz": "F8_E5M2",
    "float8e8m0": "F8_E8M0", "float4e2m1": "F4",
}  # fmt: skip
"""ONNX's names of dtypes in lower case (`float` is `float32` here and `double` is `float64`), and
those of safetensors.
"""
BITS = {name: DTYPE_BITS[each] for name, each in SAFETENSORS_NAMES.items()} | {"complex128": 128}
"""Bits of one element."""


@dataclass(frozen=True)
class Port:
    """An input or output of the graph."""

    name: str
    dtype: str
    """As in `BITS`."""
    shape: tuple[int | str, ...]
    """A size, the name of one that is free, or "" if it has none."""


@dataclass(frozen=True)
class Initializer:
    """A constant tensor of the graph: a weight, a scale, a table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    location: str | None
    """The external file that it lies in, as the graph names it; None if the graph itself holds it."""
    offset: int = 0
    """Where it begins in the external file."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return (self.elements * BITS[self.dtype] + 7) // 8


@dataclass(frozen=True)
class Node:
    """One operation."""

    kind: str
    domain: str
    """Empty for ONNX's own operators, e.g. `com.microsoft` for those of ONNX Runtime."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | float | str | tuple[int, ...]]
    """Numbers, texts and lists of integers; tensors and graphs are left out."""


class OnnxFile:
    """A graph, such as model.onnx, and its external data. Weights are not read, and not held even inside the file."""

    def __init__(self, path: Path) -> None:
        """Raises SourceError if the file is missing, cut off or no ONNX.
        External data must be there and long enough.
        """
        self.path = path
        check_kinds(path.parent)
        model = read_proto(path)
        with reading(path, "not a whole ONNX file", AGAIN):
            self._read(model)

    def _read(self, model: ModelProto) -> None:
        self.ir_version: int = model.ir_version
        self.opsets: dict[str, int] = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
        self.producer: str = f"{model.producer_name} {model.producer_version}".strip()
        graphs = list(all_graphs(model.graph))
        held = {tensor.name for graph in graphs for tensor in graph.initializer}
        self.inputs = {port.name: port for each in model.graph.input if each.name not in held for port in [_port(each)]}
        self.outputs = {port.name: port for port in map(_port, model.graph.output)}
        self.nodes: tuple[Node, ...] = tuple(
            _node(each)
            for nodes in (*(graph.node for graph in graphs), *(each.node for each in model.functions))
            for each in nodes
        )
        tensors = [*(tensor for graph in graphs for tensor in graph.initializer), *_constants(graphs)]
        self.initializers: dict[str, Initializer] = {tensor.name: self._initializer(tensor) for tensor in tensors}
        self._check_data(tensors)

    @cached_property
    def data_files(self) -> tuple[Path, ...]:
        """The external data files, each once."""
        named = sorted({each.location for each in self.initializers.values() if each.location})
        return tuple(self.path.parent / name for name in named)

    @property
    def files(self) -> tuple[Path, ...]:
        """The graph and its external data."""
        return (self.path, *self.data_files)

    def _initializer(self, tensor: TensorProto) -> Initializer:
        dtype, shape = _dtype(tensor.data_type), tuple(tensor.dims)
        if dtype != "string" and dtype not in BITS:
            raise SourceError(f"{tensor.name} has the dtype {dtype}, which optkit does not know", where=str(self.path))
        location = _external(tensor).get("location") if tensor.data_location == tensor.EXTERNAL else None
        if tensor.data_location == tensor.EXTERNAL and not location:
            raise SourceError(
                f"{tensor.name} lies in a file without a name", where=str(self.path), remedy="Export it again"
            )
        if min(shape, default=0) < 0 or (dtype == "string" and location):
            raise ValueError(f"{tensor.name} is {dtype} {list(shape)}")
        offset = int(_external(tensor).get("offset") or 0) if location else 0
        found = Initializer(tensor.name, dtype, shape, location, offset)
        if tensor.HasField("raw_data"):
            self._check_size(found, len(tensor.raw_data))
        return found

    def _check_size(self, tensor: Initializer, size_bytes: int, place: str = "") -> None:
        if size_bytes != tensor.size_bytes:
            raise SourceError(
                f"{tensor.name} has {size_bytes:,} bytes{place}, and {tensor.dtype} {list(tensor.shape)} "
                f"needs {tensor.size_bytes:,}",
                where=str(self.path),
                why="The file was damaged",
                remedy=AGAIN,
            )

    def _check_data(self, tensors: Iterable[TensorProto]) -> None:
        root = self.path.parent.resolve()
        needed: dict[str, int] = {}
        for tensor in tensors:
            known = self.initializers[tensor.name]
            if known.location is None:
                continue
            check_name(known.location)
            place = PurePosixPath(known.location)
            if place.is_absolute() or ".." in place.parts:
                why = "Data outside of the directory would not travel with it"
                raise SourceError(
                    f"{tensor.name} lies in {place}", where=str(self.path), why=why, remedy="Export it again"
                )
            entry = _external(tensor)
            length = int(entry.get("length") or known.size_bytes)
            self._check_size(known, length, f" in {place}")
            if known.offset < 0:
                raise ValueError(f"{tensor.name} begins at byte {known.offset:,} of {place}")
            needed[known.location] = max(needed.get(known.location, 0), known.offset + length)
        for name in (self.path.name, *needed):
            require_inside(self.path.parent, name)
        missing = [name for name in needed if not (root / name).is_file()]
        if missing:
            raise SourceError(
                f"{len(missing)} of {len(needed)} files with its weights are missing: {', '.join(missing[:3])}",
                where=str(self.path),
                why=f"{self.path.name} holds the graph alone, the weights lie beside it",
                remedy="Copy them into the same directory, or export it again",
            )
        for name, least in needed.items():
            size = (root / name).stat().st_size
            if size < least:
                raise SourceError(
                    f"the file has {size:,} bytes and the graph asks for {least:,}",
                    where=str(self.path.parent / name),
                    why="It was cut off, or belongs to another model",
                    remedy=AGAIN,
                )


def graph_names(directory: Path) -> tuple[str, ...]:
    """Return the names of a directory's graphs: model.onnx, or the parts of an encoder-decoder."""
    whole = (directory / MODEL).is_file() or not any((directory / name).is_file() for name in PARTS)
    return (MODEL,) if whole else PARTS


def read_graphs(directory: Path) -> tuple[OnnxFile, ...]:
    """Return the graphs of a directory. Raises what `OnnxFile` raises, for a part that is missing too."""
    return tuple(OnnxFile(directory / name) for name in graph_names(directory))


def all_initializers(graphs: Iterable[OnnxFile]) -> dict[str, Initializer]:
    """Return the initializers of all graphs. What several of them read from one place is there once."""
    places: dict[object, tuple[str, OnnxFile, Initializer]] = {}
    for graph in graphs:
        for name, each in graph.initializers.items():
            place = (each.location, each.offset) if each.location else (graph.path, name)
            places.setdefault(place, (name, graph, each))
    found: dict[str, Initializer] = {}
    for name, graph, each in places.values():
        found[name if name not in found else f"{graph.path.stem}/{name}"] = each
    return found


def read_proto(path: Path) -> ModelProto:
    """Return a parsed ONNX file without its external data. Raises SourceError if it is none,
    MissingPackageError without `onnx`.
    """
    with needing("onnx", str(path), "optkit[onnx]"):
        import onnx
        from google.protobuf.message import DecodeError
    if not path.is_file():
        parted = path.name in PARTS
        raise SourceError(
            f"there is no {path.name}",
            where=str(path.parent),
            why=f"An encoder-decoder is {', '.join(PARTS)}" if parted else "",
            remedy="Export it again: with optkit, or with optimum and --no-post-process" if parted else "",
        )
    check_regular(path)
    try:
        model: ModelProto = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise _no_onnx(path, str(error) or type(error).__name__) from error
    if not (model.ir_version and model.graph.output):
        raise _no_onnx(path, "It holds no graph with outputs")
    return model


def _no_onnx(path: Path, why: str) -> SourceError:
    return SourceError(f"not a whole ONNX file ({path.stat().st_size:,} bytes)", where=str(path), why=why, remedy=AGAIN)


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and those inside its nodes (the branches of an If, the body of a Loop or Scan)."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from all_graphs(inner)


def _constants(graphs: Iterable[GraphProto]) -> Iterator[TensorProto]:
    """Yield the tensors of Constant nodes, named as what the nodes put out."""
    for graph in graphs:
        for node in graph.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                if attribute.HasField("t"):
                    attribute.t.name = node.output[0]
                    yield attribute.t


def _node(node: NodeProto) -> Node:
    from onnx import AttributeProto

    read: dict[int, Any] = {
        AttributeProto.INT: lambda each: int(each.i),
        AttributeProto.FLOAT: lambda each: float(each.f),
        AttributeProto.STRING: lambda each: each.s.decode("utf-8", "replace"),
        AttributeProto.INTS: lambda each: tuple(each.ints),
    }
    attributes = {each.name: read[each.type](each) for each in node.attribute if each.type in read}
    return Node(node.op_type, node.domain, node.name, tuple(node.input), tuple(node.output), attributes)


def _port(value: ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    sizes = (each.dim_value if each.HasField("dim_value") else each.dim_param for each in tensor.shape.dim)
    return Port(value.name, _dtype(tensor.elem_type), tuple(sizes))


def _dtype(number: int) -> str:
    from onnx import TensorProto

    name = TensorProto.DataType.Name(number).lower() if number in TensorProto.DataType.values() else str(number)
    return RENAMED.get(name, name)


def _external(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}
