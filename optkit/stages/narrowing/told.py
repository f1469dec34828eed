"""What goes of a model, and what a report tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from optkit.model.attention import cache_width
from optkit.model.depth import block_count
from optkit.model.inventory import FLOATS
from optkit.model.shape import DTYPE_BITS, ModelShape
from optkit.model.width import Widths

if TYPE_CHECKING:
    from optkit.stages.narrowing.blocks import NarrowerBlocks


@dataclass(frozen=True)
class Planned:
    """What goes, known before anything runs."""

    count: int
    """Decoder blocks."""
    before: Widths
    after: Widths

    @property
    def narrows(self) -> bool:
        return self.before != self.after


def sizes(shape: ModelShape) -> dict[str, int]:
    """Return parameters, bytes, and the KV cache's bytes for each token.
    The cache is in the dtype of the weights.
    """
    bits = next(DTYPE_BITS[info.dtype] for info in shape.tensors.values() if info.dtype in FLOATS)
    cache = cache_width(shape.config, block_count(shape.config)) * bits // 8
    return {"parameters": shape.elements, "bytes": shape.size_bytes, "kv_cache_bytes_per_token": cache}


def widths_told(planned: Planned, blocks: NarrowerBlocks) -> dict[str, Any]:
    """Return the widths before and after.
    Which heads and channels of the hidden states are left is told too.
    """
    told: dict[str, Any] = {"widths_before": asdict(planned.before), "widths_after": asdict(planned.after)}
    if planned.before.heads != planned.after.heads:
        told["heads"] = [left.heads for left in blocks.lefts]
    if planned.before.key_heads != planned.after.key_heads:
        told["kv_heads"] = [left.pools for left in blocks.lefts]
    return told | ({} if blocks.hidden is None else {"hidden_channels": blocks.hidden.tolist()})


def note(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return what became smaller, of the numbers that `sizes` gives."""
    names = {
        "parameters": "parameters",
        "bytes": "bytes of weights",
        "kv_cache_bytes_per_token": "bytes of KV cache a token",
    }
    changes = (f"{before[key]:,} -> {after[key]:,} {name}" for key, name in names.items() if before[key])
    return f"{', '.join(changes)}; distill it before it is used"
