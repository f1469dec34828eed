"""Modules that torch.onnx.export cannot take."""

import torch
from torch import Tensor, nn


class Branching(nn.Module):
    """What it computes depends on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class Eigenvalues(nn.Module):
    """ONNX has no operator for it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x.T @ x).real
