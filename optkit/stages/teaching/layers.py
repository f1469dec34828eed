"""The linear layers of an opened student."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optkit.model.linear_layers import Layer
from optkit.model.routers import routers_of

if TYPE_CHECKING:
    from optkit.training.student import Student


def linear_modules(student: Student) -> dict[str, Layer]:
    """Return the linear layers of the decoder blocks by their names in the model.
    A layer's own name is that in the checkpoint.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from optkit.model.blocks import find_blocks

    found, routers = {}, routers_of(student.checkpoint.shape)
    for block in find_blocks(student.model):
        for name, module in block.module.named_modules(prefix=block.name):
            if isinstance(module, (nn.Linear, Conv1D)):
                transposed = isinstance(module, Conv1D)
                outputs, inputs = reversed(module.weight.shape) if transposed else module.weight.shape
                stored = student.tensor_names[f"{name}.weight"].removesuffix(".weight")
                found[name] = Layer(stored, outputs, inputs, transposed, stored in routers)
    return found
