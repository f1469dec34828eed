"""model.gguf, and config and tokenizer beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from optkit.model.config_file import read_config
from optkit.model.formats.base import Format
from optkit.model.gguf_file import read_gguf
from optkit.model.layer_sizes import LayerSize
from optkit.model.shape import DTYPE_BITS, ModelShape, TensorInfo

MODEL = "model.gguf"


class GgufModel(Format):
    """model.gguf, which llama.cpp needs alone; config.json and tokenizer are for optkit."""

    kind: ClassVar[str] = "gguf"
    label: ClassVar[str] = "GGUF"
    phrase: ClassVar[str] = "a GGUF model"
    opened: ClassVar[str] = "a GGUF model"
    origin: ClassVar[str] = "the checkpoint that it was made of"
    made_by: ClassVar[str] = "gguf"
    computes_in: ClassVar[str | None] = "float32"
    libraries: ClassVar[Mapping[str, tuple[str, ...]]] = {"llama.cpp": ("llama-cpp-python",)}
    session: ClassVar[str] = "optkit.session.gguf_session:GgufSession"
    verification: ClassVar[str] = "optkit.verification.model_files:GgufFiles"

    def detects(self, names: Collection[str]) -> bool:
        return MODEL in names

    def holds_weights(self, name: str) -> bool:
        return name.endswith(".gguf")

    def check(self, directory: Path) -> tuple[Path, ...]:
        """Return the file, whose header says that it is whole."""
        return (read_gguf(directory / MODEL).path,)

    def shape(self, directory: Path) -> ModelShape:
        """Return config.json and the tensors of the header, quantized ones as bytes."""
        tensors = {
            name: TensorInfo(each.type, each.shape) if each.type in DTYPE_BITS else TensorInfo("U8", (each.size_bytes,))
            for name, each in read_gguf(directory / MODEL).tensors.items()
        }
        return ModelShape(read_config(directory / "config.json"), tensors)

    def layer_sizes(self, directory: Path) -> list[LayerSize]:
        """Return the tensors by the types that the file declares."""
        from math import prod

        return [
            LayerSize(8 * each.size_bytes, prod(each.shape), quantized=each.type not in DTYPE_BITS)
            for name, each in read_gguf(directory / MODEL).tensors.items()
            if name != "rope_freqs.weight"
        ]
