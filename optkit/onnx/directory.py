"""An ONNX directory: model.onnx, its external data and configs, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from optkit.errors import SourceError
from optkit.model.config_file import read_config
from optkit.model.onnx_file import MODEL, Initializer, Node, OnnxFile, Port, graph_names
from optkit.model.onnx_shape import GENAI_CONFIG, read_genai_config
from optkit.model.task import positions_of
from optkit.model.text_config import text_config

__all__ = ["GENAI_CONFIG", "MODEL", "CacheLayer", "Initializer", "Node", "OnnxDirectory", "OnnxFile", "Port"]

SHARING = frozenset({"GroupQueryAttention"})
"""Operations that write new keys and values into the memory of the past ones, if both are bound
to it.
"""


@dataclass(frozen=True)
class CacheLayer:
    """One tensor of the KV cache: what the graph reads and what it leaves in its place."""

    past: Port
    present: str
    shared: bool
    """The operation behind it can write into the memory that it reads from; else it leaves a longer
    copy.
    """


class OnnxDirectory:
    """A directory with model.onnx, or one part of an encoder-decoder; the decoder unless it is named."""

    def __init__(self, directory: Path, name: str | None = None) -> None:
        """Raises SourceError if the graph or its data is missing, cut off or damaged.
        Raises MissingPackageError without `onnx`.
        """
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise SourceError("no such directory", where=str(directory))
        self.graph = OnnxFile(self.directory / (name or graph_names(self.directory)[0]))
        """Inputs, outputs, nodes, initializers, opsets, IR version, producer and files of the
        model.
        """
        self.config = read_config(self.directory / "config.json") if (self.directory / "config.json").is_file() else {}
        """The parsed config.json; empty if there is none."""
        self.genai_config = read_genai_config(self.directory)
        """The parsed genai_config.json of ONNX Runtime GenAI; empty if there is none."""

    @property
    def path(self) -> Path:
        """The graph itself."""
        return self.graph.path

    @cached_property
    def cache(self) -> tuple[CacheLayer, ...]:
        """The tensors of the KV cache, in the order of the inputs; empty for a model without.
        What an encoder-decoder keeps of its input stays as it is, and is none of them.

        Raises SourceError if what is read has nothing that takes its place.
        """
        grown = [port for name, port in self.graph.inputs.items() if "past" in name and ".encoder." not in name]
        pasts = [port for port in grown if len(port.shape) == 4]
        pairs = [(past, self._present(past)) for past in pasts]
        return tuple(CacheLayer(past, present, self._is_shared(past.name, present)) for past, present in pairs)

    @property
    def vocabulary(self) -> int | None:
        """Width of the logits; None if neither the graph nor a config says it."""
        last = self.graph.outputs["logits"].shape[-1] if "logits" in self.graph.outputs else None
        if isinstance(last, int) and last:
            return last
        found = text_config(self.config).get("vocab_size") or self._genai_model.get("vocab_size")
        return int(found) if found else None

    @property
    def positions(self) -> int | None:
        """Longest sequence that the model was built for, in tokens; None if neither config says it."""
        found = positions_of(self.config) or self._genai_model.get("context_length")
        return int(found) if found else None

    @property
    def _genai_model(self) -> dict[str, Any]:
        return dict(self.genai_config.get("model") or {})

    def _present(self, past: Port) -> str:
        """Return the output that takes the place of a past input."""
        for before, after in (
            ("past_key_values", "present"),
            ("past_key_values", "present_key_values"),
            ("past", "present"),
        ):
            if before in past.name and (name := past.name.replace(before, after, 1)) in self.graph.outputs:
                return name
        raise SourceError(
            f"the input {past.name} has no output that would take its place",
            where=str(self.path),
            why=f"Its outputs are {', '.join([*self.graph.outputs][:4])}, ...",
            remedy="Export it with names like past_key_values.0.key and present.0.key",
        )

    def _is_shared(self, past: str, present: str) -> bool:
        return any(
            node.kind in SHARING and past in node.inputs and present in node.outputs for node in self.graph.nodes
        )
