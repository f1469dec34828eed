"""Make a packed checkpoint out of a float one, and the float checkpoint that it stands for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import pack, pack_compressed_tensors, pack_gptq
from optkit.kernels.packed_linear import PackedWeight
from tests.support.changes import change_json

FORMATS = {
    "compressed-tensors": {"format": "pack-quantized", "quantization_status": "compressed"},
    "gptq": {"checkpoint_format": "gptq"},
}


def random_grid(
    shape: tuple[int, int], bits: int, group_size: int, symmetric: bool, order: Tensor | None = None
) -> tuple[QuantizedWeight, Tensor]:
    """Return codes on a random grid, and the float32 weight; with an `order`, input order[i] takes
    the scale of group i // group_size.
    """
    outputs, inputs = shape
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group_size) + 0.5) / (1 << bits) / inputs**0.5 * 4
    middle = 1 << (bits - 1)
    zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
    if not symmetric:
        zeros = torch.randint(max(1, middle - 2), middle + 2, scales.shape, dtype=torch.uint8)
    group = torch.arange(inputs) // group_size
    if order is not None:
        group[order] = torch.arange(inputs) // group_size
    weight = (codes.float() - zeros[:, group].float()) * scales[:, group]
    return QuantizedWeight(codes, scales, zeros, bits), weight


def random_packed(
    outputs: int, inputs: int, group_size: int, bits: int = 4, symmetric: bool = True, shuffled: bool = False
) -> tuple[PackedWeight, Tensor]:
    """Return a packed weight on a random grid, and the float32 weight."""
    torch.manual_seed(outputs + inputs + bits)
    order = torch.randperm(inputs) if shuffled else None
    grid, dense = random_grid((outputs, inputs), bits, group_size, symmetric, order)
    group = torch.arange(inputs) // group_size
    if order is not None:
        group[order] = torch.arange(inputs) // group_size
    zeros = None if symmetric else grid.zeros
    return PackedWeight(pack(grid.codes, bits, 1), grid.scales, zeros, group if shuffled else None, bits, inputs), dense


def save_packed(
    source: Path,
    packed: Path,
    plain: Path,
    *,
    method: str = "compressed-tensors",
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    activation_order: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Put the matrices of all blocks (routers excepted) on random grids: packed in `packed`, float
    in `plain`.
    """
    torch.manual_seed(bits)
    transposed = json.loads((source / "config.json").read_text())["model_type"] == "gpt2"
    stored, dense = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer, _, leaf = name.rpartition(".")
        if (
            tensor.dim() != 2
            or leaf != "weight"
            or "gate.weight" in name
            or not any(part.isdigit() for part in name.split("."))
        ):
            stored[name] = dense[name] = tensor.to(dtype)
            continue
        shape = tuple(tensor.T.shape if transposed else tensor.shape)
        order = torch.randperm(shape[1]) if activation_order else None
        weight, value = random_grid(shape, bits, group_size, symmetric, order)
        scale_dtype = torch.float16 if method == "gptq" else dtype
        exact = QuantizedWeight(weight.codes, weight.scales.to(scale_dtype).float(), weight.zeros, bits)
        parts = pack_gptq(exact) if method == "gptq" else pack_compressed_tensors(exact, symmetric, dtype)
        group = torch.arange(shape[1], dtype=torch.int32) // group_size
        if order is not None:
            group[order] = torch.arange(shape[1], dtype=torch.int32) // group_size
            parts["g_idx" if method == "gptq" else "weight_g_idx"] = group
        value = (exact.codes.float() - exact.zeros[:, group].float()) * exact.scales[:, group]
        stored |= {f"{layer}.{part}": held for part, held in parts.items()}
        dense[name] = (value.T if transposed else value).contiguous().to(dtype)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    if activation_order:
        weights["actorder"] = "group"
    described: dict[str, Any] = {"quant_method": method, **FORMATS[method]}
    if method == "gptq":
        described |= {"bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": activation_order}
    else:
        described |= {"ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    for directory, tensors, extra in ((packed, stored, {"quantization_config": described}), (plain, dense, {})):
        shutil.copytree(source, directory)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        change_json(directory / "config.json", dtype=str(dtype).removeprefix("torch."), **extra)


def rewritten(source: Path, target: Path, change: Callable[[str, Tensor], dict[str, Tensor]], **config: Any) -> Path:
    """Write a checkpoint whose block's matrices are changed, and what config.json says of them."""
    shutil.copytree(source, target)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        coded = tensor.dim() > 1 and "layers" in name
        tensors |= change(name, tensor) if coded else {name: tensor.bfloat16()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    change_json(target / "config.json", dtype="bfloat16", quantization_config=config)
    return target


def fp8(name: str, weight: Tensor, tile: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """Return random E4M3 weights of a shape, with a scale for each tile, as DeepSeek has them."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, tile, strict=True))
    codes = (torch.randn(weight.shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": torch.rand(rows, columns) / 1000 + 1e-4}
