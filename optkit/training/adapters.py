"""LoRA and DoRA with peft: adapters beside the layers of a student.
They are merged into its weights or written to a directory of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optkit.errors import StageError
from optkit.model.adapter import DOWN, PREFIX, UP, WEIGHTS
from optkit.model.checkpoint import Checkpoint
from optkit.model.writer import disk_space_for

NAME = "default"
"""What peft calls an adapter that nobody named."""
FARTHEST = 0.9
"""Weights that are farther from the origin's, in shares of their norm, are no approximation of
them.
"""
SPARE = 16
"""Singular vectors beyond the rank that the randomized SVD works with."""


@dataclass(frozen=True)
class AdapterForm:
    """What the adapters of a model look like."""

    ranks: Mapping[str, int]
    """Module -> rank."""
    scale: float
    """The product of the two matrices counts so much: alpha / rank, the same beside all layers, for
    older engines know one alone.
    """
    dora: bool = False
    dropout: float = 0.0

    def config(self, model: nn.Module) -> LoraConfig:
        """Return peft's configuration for a model; the usual rank is that of most layers."""
        counts = list(self.ranks.values())
        usual = max(set(counts), key=lambda rank: (counts.count(rank), rank))
        others = {re.escape(name): rank for name, rank in self.ranks.items() if rank != usual}
        modules = [model.get_submodule(name) for name in self.ranks]
        return LoraConfig(
            r=usual,
            lora_alpha=_whole(self.scale * usual),
            rank_pattern=others,
            alpha_pattern={name: _whole(self.scale * rank) for name, rank in others.items()},
            target_modules=targets(self.ranks, model),
            lora_dropout=self.dropout,
            use_dora=self.dora,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules),
        )


def targets(names: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Return the last names of layers if these mean no others of the model's, else full names."""
    last = {name.rpartition(".")[2] for name in names}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    return sorted(last) if meant == set(names) else sorted(names)


class WhileLearning(nn.Module):
    """Dropout when gradients are wanted.
    A student is in evaluation mode throughout, and judged without.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape, kept."""
        return F.dropout(hidden, self.share, training=torch.is_grad_enabled())


class SparseLora(LoraLinear):
    """peft's layer in which the zeros of the base stay zeros.
    What is added to the weight is masked at every step, not at the end alone.
    """

    kept: Tensor
    """bool, of the weight's shape."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return what is added to the weight, in its layout."""
        change: Tensor = super().get_delta_weight(adapter)
        return change.masked_fill(~self.kept, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        base = self.get_base_layer()
        with torch.autocast(hidden.device.type, enabled=False):
            change = self._merged(base.weight) - base.weight
        product: Tensor = base(hidden)
        dropped = self.lora_dropout[NAME](hidden)
        return product + F.linear(dropped, change.T if self.fan_in_fan_out else change)

    def _merged(self, weight: Tensor) -> Tensor:
        whole = weight + self.get_delta_weight(NAME)
        if NAME not in self.lora_variant:
            return whole
        outputs = 0 if self.fan_in_fan_out else 1
        # DoRA takes it for a constant (arXiv:2402.09353, section 4.3)
        norm = whole.detach().norm(dim=outputs, keepdim=True)
        magnitude: Tensor = self.lora_magnitude_vector[NAME].weight
        scaled: Tensor = magnitude.unsqueeze(outputs) / norm * whole
        return scaled


def inject_(model: nn.Module, form: AdapterForm) -> LoraConfig:
    """Put adapters beside layers of a model; they alone want a gradient then.
    Returns peft's configuration of them.
    """
    config = form.config(model)
    inject_adapter_in_model(
        config, nn.ModuleDict({"student": model})
    )  # peft rewrites what it is asked for if it sees a model of experts
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    for _, module in adapted(model):
        if form.dropout:
            module.lora_dropout[NAME] = WhileLearning(form.dropout)
    return config


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the layers that have an adapter, with their names."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            yield name, module


def keep_zeros_(model: nn.Module, share: float) -> list[str]:
    """Let the zeros stay zeros of weights of which at least a share is zero.
    Returns the layers' names.
    """
    names = []
    for name, module in adapted(model):
        kept = module.get_base_layer().weight.detach() != 0
        if 1 - float(kept.float().mean()) >= share:
            module.__class__ = SparseLora
            module.register_buffer("kept", kept, persistent=False)
            names.append(name)
    return names


@dataclass(frozen=True)
class Origin:
    """The model whose weights a base is an approximation of."""

    checkpoint: Checkpoint
    transposed: bool
    """Its matrices are stored [in, out]."""
    tensors: Mapping[str, str]
    """Parameter of the student -> tensor."""

    def weight(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Return the weight of a layer, float32 [out, in]. Raises StageError if it has another
        shape or is missing.
        """
        tensor = self.tensors[f"{name}.weight"]
        info = self.checkpoint.tensors.get(tensor)
        if info is None or info.shape != (shape[::-1] if self.transposed else shape):
            there = "has none of that name" if info is None else f"has {list(info.shape)} there"
            raise StageError(
                f"the layer is {list(shape)}, and the recipe's first model {there}",
                where=f"lora_recover.initialization: {name}",
                why="loftq compensates for the rounding of the first model's weights",
                remedy="Set initialization: zero",
            )
        stored = self.checkpoint.read_finite(tensor).float()
        return stored.T if self.transposed else stored


@torch.no_grad()
def start_from_errors_(model: nn.Module, origin: Origin) -> dict[str, float]:
    """Let each adapter begin as the best product of its rank for what the base lost.
    That is of the origin's weight, by SVD.

    That is one round of LoftQ (arXiv:2310.08659); there the base is quantized anew after each, here
    it stays as it is. If nothing was lost, an adapter begins as any other. Returns the share of
    the square of the error that each takes away. Raises StageError for a base that is no
    approximation of the origin.
    """
    taken = {}
    for name, module in adapted(model):
        base = module.get_base_layer()
        weight = base.weight.T if isinstance(base, Conv1D) else base.weight
        theirs = origin.weight(name, (weight.shape[0], weight.shape[1])).to(weight.device)
        error = theirs - weight
        if float(error.norm()) > FARTHEST * float(theirs.norm()):
            raise StageError(
                f"its weights are {float(error.norm() / theirs.norm()):.2f} of their norm away from those "
                "of the recipe's first model",
                where=f"lora_recover.initialization: {name}",
                why="loftq compensates for rounding, and these weights were changed by more (rotated, or scaled)",
                remedy="Set initialization: zero",
            )
        if not bool(error.any()):  # both halves would be 0, and never learn
            taken[name] = 0.0
            continue
        rank, scale = module.r[NAME], module.scaling[NAME]
        left, values, right = torch.svd_lowrank(error, q=min(rank + SPARE, *error.shape), niter=4)
        roots = (values[:rank] / scale).sqrt()
        module.lora_A[NAME].weight.copy_((right[:, :rank] * roots).T)
        module.lora_B[NAME].weight.copy_(left[:, :rank] * roots)
        taken[name] = round(float(values[:rank].square().sum() / error.square().sum().clamp_min(1e-30)), 4)
    return taken


@torch.no_grad()
def merge_(model: nn.Module) -> None:
    """Add every adapter to its weight and take it away, so that the model is a plain one again."""
    for name, module in adapted(model):
        module.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())


def write_adapter(model: nn.Module, config: LoraConfig, target: Path, dtype: torch.dtype) -> int:
    """Write the adapters of a model into a new directory as peft does.
    Returns how many layers have one. Raises ResourceError.
    """
    tensors: dict[str, Tensor] = {}
    layers = dict(adapted(model))
    for name, module in layers.items():
        for leaf, held in ((DOWN, module.lora_A[NAME]), (UP, module.lora_B[NAME])):
            tensors[f"{PREFIX}{name}{leaf}"] = held.weight.detach().to("cpu", dtype).contiguous()
    target.mkdir()
    with disk_space_for(target / WEIGHTS, sum(tensor.nbytes for tensor in tensors.values())):
        save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
        config.inference_mode = True
        config.task_type = "CAUSAL_LM"
        config.save_pretrained(target)
    return len(layers)


def _whole(number: float) -> float:
    """Return the number, without a fraction if there is none: older readers expect an integer."""
    return int(number) if float(number).is_integer() else number
