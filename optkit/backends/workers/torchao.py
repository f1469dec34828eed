"""Worker of torchao 0.18: rounding to nearest by its IntxWeightOnlyConfig.

Its own int4 tensors depend on the device that they were made for and nothing but torchao opens
them. So its codes and scales are packed as compressed-tensors has them (pack-quantized, 0.19).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerAxis, PerGroup, quantize_

if TYPE_CHECKING:
    from optkit.backends.workers.launch import Job


def quantize(job: Job) -> dict[str, Any]:
    """Quantize and save; returns nothing of note."""
    model = job.load_model()
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    job.start("torchao rtn", len(job.layers), "layers")
    for name, scheme in job.layers.items():
        del state[f"{name}.weight"]
        state |= {
            f"{name}.{leaf}": tensor for leaf, tensor in _packed(model.get_submodule(name), scheme, job.device).items()
        }
        job.advance(name)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in state.items()},
        job.target / "model.safetensors",
        {"format": "pt"},
    )
    (job.target / "config.json").write_text(json.dumps({"quantization_config": job.quantization}))
    return {}


def _packed(linear: torch.nn.Module, scheme: dict[str, Any], device: str) -> dict[str, Tensor]:
    """Return the tensors of one layer, its weight float [out, in]."""
    bits, size = scheme["bits"], scheme["group_size"]
    mapping = MappingType.SYMMETRIC if scheme["symmetric"] else MappingType.ASYMMETRIC
    granularity = PerGroup(size) if size > 0 else PerAxis(0)
    holder = torch.nn.Sequential(linear).to(device)
    quantize_(holder, IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), granularity, mapping))
    made: Any = holder[0].weight
    half = 1 << (bits - 1)
    shape = torch.tensor(linear.weight.shape, dtype=torch.int64)
    packed = {"weight_packed": _words(made.qdata + half, bits), "weight_scale": made.scale.cpu(), "weight_shape": shape}
    if not scheme["symmetric"]:
        packed["weight_zero_point"] = _words((made.zero_point.to(torch.int32) + half).T, bits).T
    return packed


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack int [rows, columns] of `bits` bits each into int32 words along the rows.
    The first code is lowest, and none lies across words.
    """
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.cpu().to(torch.int64), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (codes.reshape(codes.shape[0], -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
