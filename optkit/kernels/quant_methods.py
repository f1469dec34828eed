"""The quantization methods that optkit opens with layers of its own, by `quant_method`.

A method is a function that returns the quantized layers of a checkpoint
(`optkit.kernels.stored_layer.QuantizedLayer`). It returns None if the checkpoint asks for something
beyond that method's layers here; transformers opens it then, with the packages that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optkit.common.files import reading
from optkit.errors import SourceError
from optkit.kernels.compressed_tensors_groups import compressed_tensors_layers
from optkit.kernels.integer_layers import awq_layers, gptq_layers
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.model.checkpoint import Checkpoint

METHODS: dict[str, Callable[[Checkpoint, Mapping[str, Any]], Sequence[QuantizedLayer] | None]] = {
    "compressed-tensors": compressed_tensors_layers,
    "gptq": gptq_layers,
    "awq": awq_layers,
}


def quantized_layers(checkpoint: Checkpoint) -> dict[str, QuantizedLayer] | None:
    """Return the quantized layers by name if optkit opens them itself.
    None for float weights and what transformers has to open.

    Raises SourceError if the `quantization_config` is one of ours and no weight is quantized.
    """
    config = checkpoint.quantization
    method = str(config.get("quant_method")) if config else ""
    if config is None or method not in METHODS:
        return None
    with reading(
        checkpoint.directory / "config.json",
        "its quantization_config does not fit the weights",
        "Make the artifact again",
    ):
        layers = METHODS[method](checkpoint, config)
    if layers is None:
        return None
    if not layers:
        raise SourceError(
            "no layer is quantized",
            where=str(checkpoint.directory),
            why=f"The quantization_config says {method}",
            remedy="Make the artifact again",
        )
    return {layer.name: layer for layer in layers}
