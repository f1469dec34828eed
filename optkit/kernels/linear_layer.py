"""What layers share that compute with codes of their own: tensors to hold, and rows to multiply."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn


def hold_(module: nn.Module, **tensors: Tensor | None) -> None:
    """Let a module hold tensors under these names, which move with it and are not trained."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)


class RowsLinear(nn.Module):
    """`x W^T + b`, the product computed for rows whose inputs are sorted by their group."""

    in_features: int
    out_features: int
    order: Tensor | None
    """int64 [in]: the inputs sorted by their group, if they are not so already."""
    bias: Tensor | None

    @abstractmethod
    def products(self, rows: Tensor) -> Tensor:
        """float [n, in] -> float [n, out], without the bias."""

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        rows = hidden.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows[:, self.order]
        product = self.products(rows)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*hidden.shape[:-1], self.out_features)
