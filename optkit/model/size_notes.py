"""Notes on a quantized model that is hardly smaller than what it was made of. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from optkit.common.byte_sizes import size_text
from optkit.model.config_file import of_weights
from optkit.model.inventory import FLOATS
from optkit.model.linear_layers import matrices_of
from optkit.model.packed_floats import stacked_experts
from optkit.model.shape import ModelShape

MOST = 0.5
"""The share of the weights of the decoder blocks that a quantizer is expected to take at least."""


def notes_on_size(origin: ModelShape, before: ModelShape, after: ModelShape) -> Iterator[str]:
    """Yield what asks to act: most weights stayed float because they are no linear layers, or the
    model is larger than the one that the recipe starts from.
    """
    if not of_weights(after.config.get("quantization_config") or {}):
        return
    layers = matrices_of(before)
    blocks = {name: info for name, info in before.tensors.items() if before.block(name) and len(info.shape) > 1}
    stay = {
        name: info
        for name, info in blocks.items()
        if name.removesuffix(".weight") not in layers and info.dtype in FLOATS and after.tensors.get(name) == info
    }
    if sum(info.elements for info in stay.values()) > MOST * sum(info.elements for info in blocks.values()):
        name, info = max(stay.items(), key=lambda item: item[1].elements)
        yield (
            f"most weights stay float: {size_text(sum(each.size_bytes for each in stay.values()))} of the "
            f"{size_text(after.size_bytes)} that it leaves, such as {name} {list(info.shape)}, are those of no linear "
            f"layer, and it takes these alone; {_remedy(after)}"
        )
    if after.size_bytes > origin.size_bytes:
        method = origin.quant_method
        yield (
            f"it is {size_text(after.size_bytes - origin.size_bytes)} larger than the model that the recipe starts "
            f"from, which has {size_text(origin.size_bytes)}{f' in {method}' if method else ''}; deploy that one, or "
            "leave this stage out"
        )


def _remedy(left: ModelShape) -> str:
    if stacked_experts(left):
        return "`mx: {type: mxfp4}` packs them, in the form in which such models are published"
    return "to make it smaller, remove experts or blocks (`prune_structured`), or export it with `gguf`"
