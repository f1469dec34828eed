"""Open one share of a model in a process that has joined the others (`rank.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from optkit.devices import process_group
from optkit.kernels.shares import SPLIT_BY, local_part
from optkit.model.checkpoint_share import CheckpointShare
from optkit.model.split_plan import BY_INPUTS, BY_OUTPUTS, style_of

EXPERTS = "experts"
"""In what a plan says of modules of joined experts."""
_joined: list[DeviceMesh] = []


def join(device: str, rank: int, ranks: int, meeting: str, timeout_s: float) -> None:
    """Join the other processes, see `process_group.join`, for a model that is split."""
    process_group.join(device, rank, ranks, meeting, timeout_s)
    _joined.append(init_device_mesh(torch.device(device).type, (ranks,)))


def is_joined() -> bool:
    """Whether this process is one of several that hold a model together."""
    return bool(_joined)


def share_kwargs(devices: int) -> dict[str, Any]:
    """Return what `from_pretrained` needs to read this process's share."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=devices, tp_plan="auto"), "device_mesh": _joined[0]}


def add_up_(model: PreTrainedModel, checkpoint: CheckpointShare) -> None:
    """Let the layers of a share give what the layers of the whole model would, where the next one needs it."""
    head: Any = model.get_output_embeddings()
    if checkpoint.dimension_of("lm_head.weight") is None:  # it is the embedding, which is whole
        head.weight = nn.Parameter(head.weight.chunk(checkpoint.count)[checkpoint.index], requires_grad=False)
    for name, module in model.named_modules():
        dimension = BY_OUTPUTS if module is head else checkpoint.dimension_of(f"{name}.weight")
        if dimension is not None:
            setattr(module, SPLIT_BY, dimension)
        if dimension == BY_INPUTS:
            module.register_forward_hook(_summed)
    head.register_forward_hook(_side_by_side)


def _summed(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    distributed.all_reduce(output)
    return output


def _side_by_side(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    found = [torch.empty_like(output) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, output.contiguous())
    return torch.cat(found, -1)


def take_own_shares_(model: PreTrainedModel) -> None:
    """Make plain tensors of the shares of parameters that the plan names and no layer holds, such as sinks.
    transformers does so with those of experts alone.
    """
    plan = model.tp_plan
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            own = style_of(f"{name}.{leaf}.weight", plan) and EXPERTS not in (style_of(f"{name}.weight", plan) or "")
            if own and hasattr(parameter, "placements"):
                setattr(module, leaf, nn.Parameter(local_part(parameter), requires_grad=False))


def is_split(model: PreTrainedModel) -> bool:
    """Whether this process holds only its share of a model."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())
