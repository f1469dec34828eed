"""Open a quantized checkpoint as a torch model that computes with the quantized weights."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optkit.errors import SourceError
from optkit.kernels.cpu.float_linear import use_float_kernels_
from optkit.kernels.cpu.huge_pages import into_huge_pages_
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.model.checkpoint import Checkpoint
from optkit.model.checkpoint_share import CheckpointShare
from optkit.model.empty_model import empty_model
from optkit.model.experts import unfuse_experts_
from optkit.model.names import (
    compute_missing_,
    match_tensors,
    planned_dtypes,
    renamed_tensors,
    stored_parameters,
    with_base_prefix,
)
from optkit.model.read_weights import Read, reads_of
from optkit.model.shape import TensorInfo
from optkit.progress import Progress

Build = Callable[[QuantizedLayer, Tensor | None, torch.dtype, str], tuple[nn.Module, str]]
"""Makes the module of a layer from its bias, dtype and device, as `QuantizedLayer.build` does."""


def load_packed(
    checkpoint: Checkpoint,
    quantized: Mapping[str, QuantizedLayer],
    device: str,
    dtype: torch.dtype,
    progress: Progress,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model on the device and a sentence for each kernel in use.
    `options` go to transformers' `from_config`.

    Raises SourceError if weights and model do not belong together.
    """
    matched = match_packed(checkpoint, quantized, dtype, trust_remote_code, **options)
    notes = fill_(matched, checkpoint, device, dtype, progress)
    if quantized and device == "cpu":
        notes += use_float_kernels_(matched.model)
        into_huge_pages_(matched.model)
    return matched.model, notes


@dataclass(frozen=True)
class Matched:
    """A model on the meta device, and where its weights lie."""

    model: PreTrainedModel
    layers: Mapping[str, QuantizedLayer]
    """By their names in the model."""
    names: Mapping[str, str]
    """Parameter of the model -> tensor of the checkpoint, as it would be in floats."""


def match_packed(
    checkpoint: Checkpoint,
    quantized: Mapping[str, QuantizedLayer],
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    **options: Any,
) -> Matched:
    """Return the model of a quantized checkpoint, empty. Raises SourceError if weights and model
    do not belong together.
    """
    model = empty_model(checkpoint, dtype, trust_remote_code, **options)
    if isinstance(checkpoint, CheckpointShare):
        checkpoint.shrink_(model)
    unfuse_experts_(model, stored_parameters(model, checkpoint))
    layers = _layers_by_module(model, checkpoint, quantized)
    names = match_tensors(model, _with_float_weights(model, checkpoint, layers))
    compute_missing_(model, names)
    return Matched(model, layers, names)


def fill_(
    matched: Matched,
    checkpoint: Checkpoint,
    device: str,
    dtype: torch.dtype,
    progress: Progress,
    build: Build = lambda layer, bias, dtype, device: layer.build(bias, dtype, device),
) -> list[str]:
    """Build the quantized layers of an empty model on the device and load everything else.
    Returns a sentence for each kernel in use.
    """
    model, layers = matched.model, matched.layers
    sentences: Counter[str] = Counter()
    reads = reads_of(checkpoint.config)
    with progress.task("open", len(layers), "layers") as task:
        for name, layer in layers.items():
            bias = f"{layer.name}.bias"
            moved = checkpoint.read(bias).to(device) if bias in checkpoint.tensors else None
            built, sentence = build(layer, moved, dtype, device)
            if Read.DTYPE in reads(layer.name):
                # without elements: its dtype and device are asked for, and nothing computes with it
                built.weight = torch.empty(0, dtype=dtype, device=device)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, built.requires_grad_(False).eval())
            sentences[sentence] += 1
            task.advance(note=name)
    _load_rest_(model, checkpoint, matched.names, set(layers), device, dtype)
    counted = {sentence: f"{count} of {len(layers)} layers" for sentence, count in sentences.items()}
    return [type(sentence)(sentence.replace("{layers}", count)) for sentence, count in counted.items()]


def _layers_by_module(
    model: PreTrainedModel, checkpoint: Checkpoint, quantized: Mapping[str, QuantizedLayer]
) -> dict[str, QuantizedLayer]:
    modules = {
        f"{name}.weight": name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    }
    weights = {f"{name}.weight": name for name in quantized}
    found: dict[str, QuantizedLayer] = {}
    for weight, renamed in renamed_tensors(model, weights).items():
        place = with_base_prefix(renamed, model.base_model_prefix, set(modules))
        if place not in modules:
            raise SourceError(
                f"{weights[weight]} is quantized, and {type(model).__name__} has no linear layer of that name",
                where=str(checkpoint.directory),
                remedy="See that config.json and the weights belong together",
            )
        found[modules[place]] = quantized[weights[weight]]
    return found


def _with_float_weights(
    model: PreTrainedModel, checkpoint: Checkpoint, layers: Mapping[str, QuantizedLayer]
) -> Checkpoint:
    """Return the checkpoint as if in floats, to match names and shapes, not to read weights."""
    view = copy.copy(checkpoint)
    view.tensors = dict(checkpoint.tensors)
    for name, layer in layers.items():
        for tensor in layer.tensors:
            del view.tensors[tensor]
        module, bias = model.get_submodule(name), f"{layer.name}.bias"
        view.tensors[f"{layer.name}.weight"] = TensorInfo(
            "F32", layer.shape[::-1] if isinstance(module, Conv1D) else layer.shape
        )
        if bias in view.tensors and getattr(module, "bias", None) is None:
            del view.tensors[bias]
    return view


def _load_rest_(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    built: Container[str],
    device: str,
    dtype: torch.dtype,
) -> None:
    """Put every parameter and buffer outside the `built` modules on the device.
    Tied ones stay one.
    """
    kept = planned_dtypes(model, dtype)
    loaded: dict[tuple[str, torch.dtype], nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if prefix in built:
            continue
        for leaf, parameter in list(module._parameters.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if parameter is not None and name not in names:
                module._parameters[leaf] = nn.Parameter(parameter.to(device), requires_grad=False)
            elif parameter is not None:
                key = (names[name], kept.get(name, parameter.dtype))
                if key not in loaded:
                    loaded[key] = nn.Parameter(checkpoint.read(key[0]).to(device, key[1]), requires_grad=False)
                module._parameters[leaf] = loaded[key]
        for leaf, buffer in list(module._buffers.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if buffer is not None:
                module._buffers[leaf] = (checkpoint.read(names[name]).to(buffer.dtype) if name in names else buffer).to(
                    device
                )
