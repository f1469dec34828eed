"""AdamW, fused or in 8 bits, and the learning rate of each moment of a training."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

OptimizerName = Literal["adamw", "adamw_8bit"]
BETAS = (0.9, 0.95)


def make_optimizer(module: nn.Module, name: OptimizerName, weight_decay: float) -> torch.optim.Optimizer:
    """Return the optimizer of all trainable parameters; vectors (norms, biases) do not decay."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trainable if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=BETAS)
        return optimizer
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)


def learning_rate(fraction: float, peak: float, warmup: float) -> float:
    """Return the rate when `fraction` of the training is done.
    It is a line up to `peak` over `warmup` of it, then half a cosine down to 0.
    """
    if fraction < warmup:
        return peak * fraction / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - warmup) / (1 - warmup))))
