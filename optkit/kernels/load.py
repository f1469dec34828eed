"""Open a packed checkpoint as a torch model that computes with the packed weights; the dequantized model is never held."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optkit.errors import SourceError
from optkit.kernels.bag import BagLinear, why_not_bag
from optkit.kernels.formats import PackedCheckpoint
from optkit.kernels.int4 import Int4Linear, why_not_int4
from optkit.kernels.packed import PackedLinear, PackedWeight
from optkit.model.checkpoint import Checkpoint
from optkit.model.experts import unfuse_experts_
from optkit.model.names import match_tensors, renamed_tensors, with_base_prefix
from optkit.model.shape import TensorInfo
from optkit.model.skeleton import empty_model, planned_dtypes, stored_parameters
from optkit.progress import Progress


def packed_layer(weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    """Return the fastest layer that can compute with a packed weight on the device, and one phrase that says which it is."""
    not_int4 = why_not_int4(weight, dtype, device)
    if not_int4 is None:
        return Int4Linear(weight, bias), f"use torch's {'CUDA' if weight.words.is_cuda else 'CPU'} int4 kernel"
    not_bag = why_not_bag(weight, device)
    if not_bag is None:
        return BagLinear(weight, bias, dtype), f"use FBGEMM's {weight.bits}-bit CPU kernel, in float32"
    reason = not_bag if torch.device(device).type == "cpu" else not_int4
    return PackedLinear(weight, bias, dtype), f"are dequantized at each call, because {reason}"


def load_packed(
    checkpoint: Checkpoint,
    method: str,
    device: str,
    dtype: torch.dtype,
    progress: Progress,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model on the device and a sentence for each kernel in use; `options` go to transformers' `from_config`.

    Raises SourceError where weights and model do not belong together.
    """
    model = empty_model(checkpoint, dtype, trust_remote_code, **options)
    packed = PackedCheckpoint(checkpoint, method)
    unfuse_experts_(model, stored_parameters(model, checkpoint))
    layers = _layers_by_module(model, packed)
    names = match_tensors(model, _with_float_weights(model, packed, layers))
    kernels: Counter[str] = Counter()
    with progress.task("open", len(layers), "layers") as task:
        for name, layer in layers.items():
            bias = packed.bias(layer)
            moved = None if bias is None else checkpoint.read(bias).to(device, copy=True)
            weight = packed.read(layer, device)
            built, phrase = packed_layer(weight, moved, dtype, device)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, built.requires_grad_(False).eval())
            kernels[f"int{weight.bits}: {{count}} of {len(layers)} layers {phrase}"] += 1
            task.advance(note=name)
    _load_rest_(model, checkpoint, names, device, dtype)
    return model, [sentence.format(count=count) for sentence, count in kernels.items()]


def _layers_by_module(model: PreTrainedModel, packed: PackedCheckpoint) -> dict[str, str]:
    """Return module of the model -> layer of the checkpoint."""
    modules = {f"{name}.weight": name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    weights = {f"{layer}.weight": layer for layer in packed.layers}
    found: dict[str, str] = {}
    for weight, renamed in renamed_tensors(model, weights).items():
        place = with_base_prefix(renamed, model.base_model_prefix, set(modules))
        if place not in modules:
            raise SourceError(
                f"{weights[weight]} is packed, and {type(model).__name__} has no linear layer of that name",
                where=str(packed.checkpoint.directory),
                remedy="See that config.json and the weights belong together",
            )
        found[modules[place]] = weights[weight]
    return found


def _with_float_weights(model: PreTrainedModel, packed: PackedCheckpoint, layers: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint as it would be unpacked, to match its names and shapes to the model's; its weights cannot be read."""
    view = copy.copy(packed.checkpoint)
    view.tensors = dict(packed.checkpoint.tensors)
    for name, layer in layers.items():
        for tensor in packed.tensors_of(layer):
            del view.tensors[tensor]
        shape = packed.shape(layer)
        module = model.get_submodule(name)
        view.tensors[f"{layer}.weight"] = TensorInfo("F32", shape[::-1] if isinstance(module, Conv1D) else shape)
        bias = packed.bias(layer)
        if bias and getattr(module, "bias", None) is None:
            del view.tensors[bias]
    return view


def _load_rest_(model: PreTrainedModel, checkpoint: Checkpoint, names: Mapping[str, str], device: str, dtype: torch.dtype) -> None:
    """Put every parameter and buffer that is not packed on the device; tied ones stay one."""
    kept = planned_dtypes(model, dtype)
    loaded: dict[tuple[str, torch.dtype], nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, (Int4Linear, BagLinear, PackedLinear)):
            continue
        for leaf, parameter in list(module._parameters.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if parameter is not None:
                key = (names[name], kept.get(name, parameter.dtype))
                if key not in loaded:
                    loaded[key] = nn.Parameter(checkpoint.read(key[0]).to(device, key[1], copy=True), requires_grad=False)
                module._parameters[leaf] = loaded[key]
        for leaf, buffer in list(module._buffers.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if buffer is not None:
                module._buffers[leaf] = (checkpoint.read(names[name]).to(buffer.dtype) if name in names else buffer).to(device)
