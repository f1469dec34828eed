"""LoRA beside layers that stay: `base(x) + scale * B (A x)`, whatever kernel computes the base."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.errors import SourceError
from optkit.kernels.linear_layer import hold_
from optkit.model.adapter import Adapter


class LowRankLinear(nn.Module):
    """A linear layer with a product of two thin matrices beside it (LoRA, arXiv:2106.09685)."""

    down: Tensor
    up: Tensor

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor) -> None:
        """down: float [rank, in]; up: float [out, rank], with the scale in it."""
        super().__init__()
        self.base = base
        self.in_features, self.out_features = down.shape[1], up.shape[0]
        hold_(self, down=down, up=up)

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        low = F.linear(F.linear(hidden.to(self.down.dtype), self.down), self.up)
        product: Tensor = self.base(hidden)
        return product + low.to(product.dtype)


def apply_adapter_(model: nn.Module, adapter: Adapter, device: str, dtype: torch.dtype) -> str:
    """Put an adapter beside the layers of an opened model, computing in `dtype`; return a note.

    Raises SourceError if it is not one of this model.
    """
    modules = dict(model.named_modules())
    for name, (down, up) in adapter.read().items():
        layer = adapter.layers[name]
        base = modules.get(name)
        outputs = getattr(base, "out_features", getattr(base, "nf", None))
        inputs = getattr(base, "in_features", layer.inputs)
        if base is None or (outputs, inputs) != (layer.outputs, layer.inputs):
            what = "is not there" if base is None else f"is {outputs} x {inputs} there"
            raise SourceError(
                f"the adapter is for a layer of {layer.outputs} x {layer.inputs}, which {what}",
                where=f"{adapter.directory}: {name}",
                remedy="See that the adapter and the weights belong together",
            )
        up = (up.float() * layer.scale).to(device, dtype)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, LowRankLinear(base, down.to(device, dtype), up).eval())
    ranks = " and ".join({f"{adapter.ranks[0]}": None, f"{adapter.ranks[-1]}": None})
    return f"adapter: LoRA of rank {ranks} beside {len(adapter.layers):,} layers, {adapter.size_bytes:,} bytes"
