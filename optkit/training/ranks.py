"""The processes of a training, one per device; all see the same losses and make the same steps.

A training on several devices is the one on a single device, divided. Each forward pass takes its
share of the sequences of the batch. Means of means are the mean because the shares are equally
large. Whatever decides how the training goes on is the first process's word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from optkit.model.blocks import find_blocks
from optkit.model.together import Processes, Together
from optkit.training.objective import Objective
from optkit.training.student import ZerosStay

Parallel = Literal["ddp", "fsdp"]


class Ranks(Together):
    """A training by one process alone; whatever would be exchanged stays as it is."""

    def prepare(self, objective: Objective) -> nn.Module:
        """Return the module to call in place of the objective; its parameters are to be trained."""
        return objective

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Return a context for a forward and a backward pass.
        `last` is for the one that completes the gradients of a step.
        """
        return nullcontext()

    def mean(self, number: Tensor) -> Tensor:
        """Return the mean of a scalar over the processes."""
        return number

    def complete(self, tensor: Tensor) -> Tensor:
        """Return a tensor of which this process holds a part.
        Every process has to ask for it at the same time.
        """
        return tensor

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return what this process holds, beside a parameter, of a tensor of its shape.
        Every process has the whole of that tensor.
        """
        return whole

    def hand_out_(self, parameter: Tensor, whole: Tensor | None) -> None:
        """Put in what the first process has the whole of."""
        assert whole is not None
        parameter.copy_(whole)

    def forget_gathered(self, module: nn.Module) -> None:
        """Let go of weights that a forward pass without a backward pass has gathered."""

    def collect_(self, objective: nn.Module) -> None:
        """Leave plain parameters at the first process, which alone may use the model afterwards."""


class Group(Processes, Ranks):
    """One of several processes, with a copy of the model (`ddp`) or a part of each weight (`fsdp`)."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if distributed.get_backend() == "nccl"
            else torch.device("cpu")
        )

    def prepare(self, objective: Objective) -> nn.Module:
        if self.parallel == "ddp":
            device_ids = [self.device.index] if self.device.type == "cuda" else None
            return DistributedDataParallel(
                objective,
                device_ids=device_ids,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=any(".experts." in name for name, _ in objective.named_parameters()),
            )
        return self._shard(objective)

    @contextmanager
    def accumulating(self, module: nn.Module, last: bool) -> Iterator[None]:
        if self.parallel == "ddp" and not last:
            with module.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def mean(self, number: Tensor) -> Tensor:
        total = number.detach().clone()
        self.sum_(total)
        return total / self.count

    def complete(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
            return whole
        return distribute_tensor(whole.to(self.device), parameter.device_mesh, parameter.placements, src_data_rank=None)

    def hand_out_(self, parameter: Tensor, whole: Tensor | None) -> None:
        told = torch.empty(parameter.shape, dtype=parameter.dtype) if whole is None else whole
        told = told.to(self.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(told, parameter.device_mesh, parameter.placements, src_data_rank=0))
        else:
            distributed.broadcast(told, 0)
            parameter.copy_(told)

    def forget_gathered(self, module: nn.Module) -> None:
        if self.parallel == "fsdp":
            module.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def collect_(self, objective: nn.Module) -> None:
        if self.parallel == "ddp":
            return
        plain: dict[int, nn.Parameter] = {}
        for module in objective.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in plain:  # tied weights stay tied
                    whole = self.complete(parameter.detach())
                    plain[id(parameter)] = nn.Parameter(
                        whole.cpu() if self.first else whole.new_empty(0), parameter.requires_grad
                    )
                module._parameters[leaf] = plain[id(parameter)]
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = buffer.cpu() if buffer is not None else None

    def _shard(self, objective: Objective) -> nn.Module:
        """Divide each block's weights, and those outside the blocks, among the processes (FSDP2)."""
        mesh = init_device_mesh(self.device.type, (self.count,))
        hooks = {name: (each._backward_hooks or {}).values() for name, each in objective.named_parameters()}
        pruned = [name for name, found in hooks.items() if any(isinstance(hook, ZerosStay) for hook in found)]
        for block in find_blocks(objective.student):
            fully_shard(block.module, mesh=mesh)
        fully_shard(objective, mesh=mesh, reshard_after_forward=False)
        divided = dict(objective.named_parameters())
        for name in pruned:
            _keep_zeros_(divided[name])
        return objective


def _keep_zeros_(part: nn.Parameter) -> None:
    """Let a weight part's zeros stay: FSDP2 puts gradients there past the whole weight's hooks."""
    stay = ZerosStay(part)

    def apply(each: Tensor) -> None:
        assert each.grad is not None
        each.grad = stay(each.grad)

    part.register_post_accumulate_grad_hook(apply)


def current(parallel: Parallel) -> Ranks:
    """Return this process's group, which `optkit.training.worker` joined, else itself alone."""
    return Group(parallel) if distributed.is_available() and distributed.is_initialized() else Ranks()


def copied(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return copies of whole tensors on the CPU at the first process, nothing at the others.
    One at a time is gathered.
    """
    found = {}
    for name, tensor in tensors.items():
        whole = ranks.complete(tensor.detach())
        if ranks.first:
            found[name] = whole.to("cpu", copy=True)
    return found


def optimizer_state(optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """Return the state of an optimizer with whole tensors, which the first process alone may use."""
    state = optimizer.state_dict()
    if ranks.count == 1:
        return state
    whole: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        whole[index] = {**values, **copied(tensors, ranks)}
    return {**state, "state": whole}


def set_optimizer_state_(optimizer: torch.optim.Optimizer, whole: Mapping[str, Any], ranks: Ranks) -> None:
    """Put in a state with whole tensors, which every process has."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            name: ranks.part_of(parameters[index], value) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for index, values in whole["state"].items()
    }
    optimizer.load_state_dict({**whole, "state": state})
