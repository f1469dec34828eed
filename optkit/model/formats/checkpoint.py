"""config.json and safetensors: float weights, packed ones, and packed ones with an adapter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from optkit.model.adapter import has_adapter, read_adapter
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import files_of, lies_inside
from optkit.model.formats.base import Format
from optkit.model.layer_sizes import LayerSize, module_sizes
from optkit.model.shape import ModelShape

SUFFIX = ".safetensors"


class FloatCheckpoint(Format):
    """config.json, safetensors with float weights, tokenizer and every other file of the source."""

    kind: ClassVar[str] = "checkpoint"
    label: ClassVar[str] = "safetensors"
    phrase: ClassVar[str] = "a checkpoint with float weights"
    opened: ClassVar[str] = "a torch model"
    origin: ClassVar[str] = "the model's float weights"
    is_checkpoint: ClassVar[bool] = True
    session: ClassVar[str] = "optkit.session.torch_opening:open_torch"
    verification: ClassVar[str] = "optkit.verification.safetensors_files:SafetensorsFiles"

    def detects(self, names: Collection[str]) -> bool:
        return any(self.holds_weights(name) for name in names)

    def holds_weights(self, name: str) -> bool:
        return name.endswith(SUFFIX)

    def narrowed(self, config: Mapping[str, Any], directory: Path | None) -> Format:
        """Return whether the weights are packed, and an adapter lies beside them."""
        if not config.get("quantization_config"):
            return Format.CHECKPOINT
        return Format.ADAPTED if directory and has_adapter(directory) else Format.QUANTIZED

    def check(self, directory: Path) -> tuple[Path, ...]:
        """Return the files that the index names, and that of an adapter beside packed weights."""
        checkpoint = Checkpoint(directory)
        adapter = read_adapter(checkpoint.directory) if checkpoint.quantization else None
        return (*dict.fromkeys(checkpoint.files.values()), *([adapter.weights] if adapter else []))

    def published(self, directory: Path) -> set[str]:
        wanted = (SUFFIX, f"{SUFFIX}.index.json")
        return {name for name, path in files_of(directory) if name.endswith(wanted) and lies_inside(directory, path)}

    def shape(self, directory: Path) -> ModelShape:
        return Checkpoint(directory).shape

    def layer_sizes(self, directory: Path) -> list[LayerSize]:
        """Return the modules, and an adapter, which stands for no weight of its own."""
        checkpoint = Checkpoint(directory)
        adapter = read_adapter(directory) if checkpoint.quantization else None
        beside = [LayerSize(8 * adapter.size_bytes, 0, quantized=False)] if adapter else []
        return [*module_sizes(checkpoint).values(), *beside]


class QuantizedCheckpoint(FloatCheckpoint):
    """The same, with packed weights and a `quantization_config`.
    Of its weights `dequantize` makes floats; few stages read codes.
    """

    kind: ClassVar[str] = "quantized"
    phrase: ClassVar[str] = "one with packed weights"

    def detects(self, names: Collection[str]) -> bool:
        """Say no: names of files alone do not tell it from a checkpoint."""
        return False


class AdaptedCheckpoint(QuantizedCheckpoint):
    """A quantized checkpoint with a LoRA adapter of peft in `adapter/`."""

    kind: ClassVar[str] = "adapted"
    phrase: ClassVar[str] = "one with packed weights and an adapter"
