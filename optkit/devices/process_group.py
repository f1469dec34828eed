"""Join other processes in torch's default group, each on a device of its own."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from torch import distributed


def join(device: str, rank: int, ranks: int, meeting: str, timeout_s: float) -> None:
    """Join the other processes of this host, by nccl on `cuda:N` and by gloo on `cpu`.
    `meeting` is a file that does not exist yet.
    """
    here = torch.device(device)
    cuda = here.type == "cuda"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(here.index or 0)}
    if cuda:
        torch.cuda.set_device(here)
    elif sys.platform == "linux":  # the name of a host need not lead to it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=here if cuda else None,
    )
    if cuda:
        distributed.broadcast(torch.zeros(1, device=here), 0)  # nccl connects them at the first exchange
