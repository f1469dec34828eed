"""What of a model does not commute with a rotation of its hidden states, as far as names tell. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optkit.errors import StageError
from optkit.model.linear_layers import layers_of
from optkit.model.read_weights import Read, norm_classes
from optkit.model.shape import ModelShape
from optkit.model.text_config import text_type

BEHIND = r"post_(feedforward|mlp|ffn|ffw|norm)"
"""In the names of norms behind the feed-forward layers."""
OWN_PARTS = {
    r"\.indexer\.": "an index of tokens, which has norms of its own",
    r"_sub_norm\.": "a norm between two layers that is no norm of the hidden states",
    r"_residual$": "scales of the hidden states, one for each channel",
}
"""In the names of tensors -> what they belong to."""
WHY = "It does not commute with a rotation of the residual stream"


def refuse_unrotated(shape: ModelShape) -> None:
    """Raise StageError if blocks have a part that a rotated residual stream would make compute something else."""
    for name, what in _parts(shape):
        remedy = "Set rotate.residual to false for this architecture"
        raise StageError(f"the blocks have {what}", where=f"rotate: {name}", why=WHY, remedy=remedy)


def _parts(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield tensors or layers, and what they are."""
    kinds = norm_classes(text_type(shape.config))
    for tensor in (name for name in shape.tensors if shape.block(name)):
        name, _, leaf = tensor.rpartition(".")
        info, beside = shape.tensors[tensor], shape.tensors.get(f"{name}.weight")
        kind = kinds.get(name.rpartition(".")[2], "")
        if leaf == "bias" and beside and beside.shape == info.shape == (shape.width,):
            yield name, "a norm that adds a bias"
        elif kind.endswith("LayerNorm") and "RMS" not in kind:
            yield name, f"a norm that subtracts the mean ({kind})"
        elif re.search(BEHIND, name):
            yield name, "a norm behind the feed-forward layers, whose scales cannot be folded into a layer"
        elif len(info.shape) == 3 and "conv" not in name:
            yield tensor, f"a tensor {list(info.shape)}, as of joined experts, and not one matrix for each"
        yield from ((tensor, what) for part, what in OWN_PARTS.items() if re.search(part, tensor))
    for name, layer in layers_of(shape).items():
        if read := next(iter(layer.reads & {Read.COMPUTES, Read.SHARED}), None):
            yield name, f"a layer that is not only called: {read}"
    vectors = [name for name, info in shape.tensors.items() if shape.block(name) and info.shape == (shape.width,)]
    if shape.decoder and not vectors:
        yield shape.decoder, "norms without weights, so that nothing of them is folded into a layer"
