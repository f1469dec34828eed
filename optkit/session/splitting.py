"""Open one share of a model in a process that has joined the others (`rank.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from optkit.devices import process_group

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


def is_split(model: PreTrainedModel) -> bool:
    """Whether this process holds only its share of a model."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())
