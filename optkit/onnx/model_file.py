"""An ONNX model that is being changed: its graph in memory, its weights on disk.

What is written has one data file beside the graph. So no model is too large for a protobuf (2 GB),
and none has to fit into memory. Data files are read through a memory map: `onnx.load` refuses those
with several hard links, which a user's may have.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit.model.companions import require_inside
from optkit.model.onnx_file import MODEL, OnnxFile, all_graphs, read_graphs, read_proto
from optkit.model.writer import copy_companions, disk_space_for, link_or_copy

DATA = "model.onnx.data"
CONFIG = "config.json"
INLINE_BYTES = 1024
"""Tensors up to this size stay in the graph: shapes and constants, which shape inference wants to
see.
"""
PAGE_BYTES = 4096
"""Tensors in the data file begin at multiples of it, as a memory map wants them."""
EXTERNAL = 1
"""TensorProto.EXTERNAL."""


class ModelFile:
    """A graph of a directory: `proto` is the graph, to be changed; weights are read on demand."""

    def __init__(self, directory: Path, name: str = MODEL) -> None:
        """Raises SourceError if the graph or data is missing or damaged; MissingPackageError."""
        self.directory, self.name = Path(directory), name
        self.files = OnnxFile(self.directory / name).files
        self.replace_graph(read_proto(self.directory / name))
        self._maps: dict[Path, Any] = {}

    def array(self, name: str) -> NDArray[Any]:
        """Return an initializer as a NumPy array, not to be written to."""
        from onnx import TensorProto, helper, numpy_helper

        tensor = self.initializers[name]
        if tensor.data_location != EXTERNAL:
            return np.asarray(numpy_helper.to_array(tensor))
        dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if len(raw := self.raw(tensor)) == math.prod(tensor.dims) * dtype.itemsize:
            return raw.view(dtype).reshape(tensor.dims)
        filled = TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
        filled.raw_data = raw.tobytes()
        return np.asarray(numpy_helper.to_array(filled))

    def raw(self, tensor: Any) -> NDArray[np.uint8]:
        """Return the bytes of a tensor whose data is external, uint8 [bytes]."""
        fields = {entry.key: entry.value for entry in tensor.external_data}
        path = self.directory / fields["location"]
        if path not in self._maps:
            self._maps[path] = (
                np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
            )
        start = int(fields.get("offset", 0))
        stop = start + int(fields["length"]) if "length" in fields else None
        return np.asarray(self._maps[path][start:stop])

    def replace_graph(self, proto: Any) -> None:
        """Go on with another graph, whose external tensors lie as those of the old one did."""
        self.proto = proto
        self.initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
        # named after what they put out, nodes can be told apart by patterns and reports
        taken = Counter(node.name for node in proto.graph.node)
        for node in proto.graph.node:
            if not node.name or taken[node.name] > 1:
                node.name = f"{node.op_type}:{node.output[0]}"

    def fill(self, proto: Any) -> None:
        """Put the weights into a graph with the same external tensors, for tools that need them."""
        for tensor in all_tensors(proto.graph):
            if tensor.data_location == EXTERNAL:
                tensor.raw_data = self.raw(tensor).tobytes()
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")

    def uses(self) -> Counter[str]:
        """Return how often each value is read by a node or given out by the graph."""
        inside = [name for graph in all_graphs(self.proto.graph) for node in graph.node for name in node.input if name]
        return Counter([*inside, *(output.name for output in self.proto.graph.output)])


class ModelWriter:
    """Writes a changed model to `target`: new arrays as they come, all else at the end."""

    def __init__(self, model: ModelFile, target: Path, shared: dict[bytes, int] | None = None) -> None:
        """`shared`: SHA-256 -> place of what writers of other graphs left in the data file, and this
        one adds to.
        """
        self.model = model
        self.target = Path(target)
        self._new: dict[str, Any] = {}
        self._shared = shared
        with (self.target / DATA).open("ab" if shared else "wb") as file:
            self._end = file.tell()

    def add(self, name: str, array: NDArray[Any]) -> str:
        """Take an array as the initializer `name` and return that; ResourceError on a full disk."""
        from onnx import numpy_helper

        array = np.ascontiguousarray(array)
        tensor = numpy_helper.from_array(array if array.nbytes <= INLINE_BYTES else array.reshape(-1)[:0], name)
        if array.nbytes > INLINE_BYTES:
            del tensor.dims[:]
            tensor.dims.extend(array.shape)
            self._place(tensor, array.reshape(-1).view(np.uint8))
        self._new[name] = tensor
        return name

    def finish(self) -> None:
        """Write the rest of the weights and the graph, without unread initializers.

        Raises ResourceError when the disk is full.
        """
        graph = self.model.proto.graph
        used, old = self.model.uses(), [tensor for tensor in graph.initializer if tensor.name not in self._new]
        kept = [tensor for tensor in (*old, *self._new.values()) if tensor.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        for tensor in all_tensors(graph):
            if tensor.data_location == EXTERNAL and tensor.name not in self._new:
                self._place(tensor, self.model.raw(tensor))
            elif len(tensor.raw_data) > INLINE_BYTES:
                self._place(tensor, np.frombuffer(tensor.raw_data, np.uint8))
        text = self.model.proto.SerializeToString()
        path = self.target / self.model.name
        with disk_space_for(path, len(text)):
            path.write_bytes(text)
        if not self._end:
            (self.target / DATA).unlink()

    def _place(self, tensor: Any, data: NDArray[np.uint8]) -> None:
        digest = b"" if self._shared is None else hashlib.sha256(data.data).digest()
        if (offset := (self._shared or {}).get(digest)) is None:
            offset = -(-self._end // PAGE_BYTES) * PAGE_BYTES
            path = self.target / DATA
            with disk_space_for(path, len(data)), path.open("r+b") as file:
                file.seek(offset)
                file.write(data.data)
            self._end = offset + len(data)
            if self._shared is not None:
                self._shared[digest] = offset
        tensor.ClearField("raw_data")
        del tensor.external_data[:]
        tensor.data_location = EXTERNAL
        for key, value in (("location", DATA), ("offset", offset), ("length", len(data))):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)


def about_graphs(directory: Path) -> dict[str, Any]:
    """Return what a report says of the graphs of a directory: the version of ONNX's own operators, how many nodes of
    each kind there are, the most frequent first, and the bytes of graphs and data files.
    """
    graphs = read_graphs(directory)
    return {
        "opset": graphs[0].opsets["ai.onnx"],
        "ir_version": graphs[0].ir_version,
        "nodes": dict(Counter(node.kind for graph in graphs for node in graph.nodes).most_common()),
        "size_bytes": sum(path.stat().st_size for path in {path for graph in graphs for path in graph.files}),
    }


def copy_files_beside(source: Path, target: Path, trusted: bool = False) -> None:
    """Copy config.json and what `copy_companions` copies.
    These are genai_config.json, tokenizer, licence and subfolders.

    Raises ResourceError when the disk is full.
    """
    copy_companions(source, target, trusted)
    if (source / CONFIG).is_file():
        link_or_copy(require_inside(source, CONFIG), target / CONFIG, link=False)


def all_tensors(graph: Any) -> Iterator[Any]:
    """Yield every tensor that a graph holds, in initializers and in attributes."""
    for inner in all_graphs(graph):
        yield from inner.initializer
        for node in inner.node:
            for attribute in node.attribute:
                yield from attribute.tensors
                if attribute.HasField("t"):
                    yield attribute.t
