"""Open one share of a model in a process that has joined the others (`rank.py`)."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

_joined: list[DeviceMesh] = []


def join(device: str, rank: int, ranks: int, meeting: str, timeout_s: float) -> None:
    """Join the other processes, by nccl on `cuda:N` and by gloo on `cpu`.
    `meeting` is a file that does not exist yet.
    """
    here = torch.device(device)
    cuda = here.type == "cuda"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(here.index or 0)}
    if cuda:
        torch.cuda.set_device(here)
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=here if cuda else None,
    )
    _joined.append(init_device_mesh(here.type, (ranks,)))


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
