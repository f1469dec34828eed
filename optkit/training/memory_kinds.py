"""The peak memory of a training by what it is for, in bytes on one device."""

from __future__ import annotations

from optkit.common.frozen import Frozen


class MemoryKinds(Frozen):
    """Bytes on one device when most of them are in use."""

    weights: int = 0
    """Those that are trained, in the dtype that the optimizer changes, and buffers."""
    computed_weights: int = 0
    """Copies of weights in the dtype that is computed in; of sharded ones those that are gathered."""
    frozen_weights: int = 0
    """Weights without gradients: a base below adapters."""
    teacher: int = 0
    """The teacher's weights, and what its forward keeps."""
    best_weights: int = 0
    """The best so far, if they lie in the memory that is trained in."""
    gradients: int = 0
    optimizer: int = 0
    """States: two numbers for each trained one, and what a step needs besides."""
    activations: int = 0
    """What the backward pass needs of the forward pass."""
    logits: int = 0
    """Logits, the teacher's logits, their gradients and what the loss makes of them."""

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return kind -> bytes, without what takes none."""
        return {name.replace("_", " "): size for name, size in self.model_dump().items() if size}
