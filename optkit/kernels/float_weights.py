"""Packed weights as floats, whatever packed them: for what computes with float weights alone.

Formats that optkit opens itself are read by their layers; here are those that transformers opens.

    fp8 (DeepSeek)      weight           float8 [out, in]
                        weight_scale_inv float: one, one for each output, or for each tile (`weight_block_size`)
                        NAME, NAME_scale_inv the same of experts in one tensor, float8 [experts, rows, columns]
    modelopt            weight           float8 [out, in], or uint8 [out, in / 2]: two codes a byte, the low half first
                        weight_scale     float32 of all, or float8 [out, in / 16]
                        weight_scale_2   float32, which the float8 scales are multiplied by
    mxfp4 (gpt-oss)     NAME_blocks      uint8 [experts, out, in / 32, 16]: two codes a byte, the low half first
                        NAME_scales      uint8 [experts, out, in / 32]: E8M0
                        which stand for NAME, float [experts, in, out]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from optkit.algorithms.eight_bit import dequantize
from optkit.algorithms.microscaling import exponent_scales
from optkit.errors import SourceError
from optkit.kernels.bitsandbytes_layers import four_bit_layers
from optkit.kernels.compressed_tensors_groups import BEYOND, FORMATS, groups_of, layers_in_groups
from optkit.kernels.eight_bit import FloatQuantizedLayer, IntQuantizedLayer
from optkit.kernels.integer_layers import BytesLayer, awq_layers, gptq_layers
from optkit.kernels.microscaled import MicroscaledLinear
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import CONV1D_MODELS
from optkit.model.output_layer import HEAD
from optkit.model.packed_floats import BLOCKS, SCALES, TILES, packed_floats, unreadable

TILE = (128, 128)
"""Outputs and inputs of a tile if config.json does not say."""
AT_ONCE = 1 << 24
"""Weights that are in float32 at once."""


class Packed(Protocol):
    """What stands for a float weight."""

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        """Return the float weight, computed in float32 and rounded once."""


@dataclass(frozen=True)
class Transposed:
    """A layer that the model has as a Conv1D, whose float weight is [in, out]."""

    layer: Packed

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        """Return float [in, out]."""
        return self.layer.dequantize(dtype, device).T


class TiledLayer(QuantizedLayer):
    """A layer of 8-bit floats with a scale for each tile: fp8, and mxfp8 of compressed-tensors."""

    leaves = ("weight", "weight_scale_inv", "weight_scale")
    dtypes = frozenset({"F8_E4M3", "F8_E5M2"})

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        parts = self.read(self.leaves, device)
        codes, scales = parts.pop("weight"), next(iter(parts.values()), None)
        outputs, inputs = codes.shape
        if scales is None:
            raise SourceError(f"there is no {' or '.join(self.leaves[1:])}", where=self.where)
        grid = (scales.shape[0], scales.shape[1]) if scales.dim() == 2 else (scales.numel(), 1)
        tiles = {(1, 1): (outputs, inputs), (outputs, 1): (1, inputs)}  # as many tiles as outputs are none of these
        rows, columns = tiles.get(grid, self._tile(grid, codes.shape))
        if grid != (-(-outputs // rows), -(-inputs // columns)):
            raise SourceError(
                f"scales {list(scales.shape)} are not those of tiles of {rows} x {columns} of a weight "
                f"[{outputs}, {inputs}]",
                where=self.where,
                remedy="See that config.json and the weights belong together",
            )
        steps = (exponent_scales(scales) if scales.dtype == torch.uint8 else scales.float()).view(*grid)
        floats = torch.empty(outputs, inputs, dtype=dtype, device=codes.device)
        several = max(1, AT_ONCE // (rows * inputs))
        split = codes.split(several * rows), steps.split(several), floats.split(several * rows)
        for code, step, place in zip(*split, strict=True):
            place.copy_(dequantize(code.float(), step, (rows, columns)))
        return floats

    def _tile(self, grid: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
        """Return the outputs and inputs of a tile."""
        weights = self.scheme.get("weights") or self.scheme
        if weights.get("group_size"):
            return 1, int(weights["group_size"])
        rows, columns = weights.get("block_structure") or weights.get("weight_block_size") or TILE
        return int(rows), int(columns)


class DoublyScaledLayer(QuantizedLayer):
    """A layer of NVFP4 as ModelOpt stores it."""

    leaves = ("weight", "weight_scale", "weight_scale_2")

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        parts = self.read(self.leaves, device, required=self.leaves)
        packed, scales = parts["weight"], parts["weight_scale"]
        if packed.shape[1] != 8 * scales.shape[1] or len(packed) != len(scales):
            raise SourceError(
                f"scales {list(scales.shape)} are not those of {list(packed.shape)} bytes in nvfp4", where=self.where
            )
        ones = torch.ones(scales.shape, device=device).to(torch.float8_e4m3fn)
        values = MicroscaledLinear(packed, ones, None, None, torch.float32).dequantize()
        return dequantize(values, scales.float() * parts["weight_scale_2"].float(), (1, 16)).to(dtype)


class NaiveLayer(QuantizedLayer):
    """naive-quantized of compressed-tensors: integers in groups, or float-quantized or int-quantized, as it says."""

    leaves = BytesLayer.leaves
    dtypes = FloatQuantizedLayer.dtypes | IntQuantizedLayer.dtypes
    classes: ClassVar[tuple[type[QuantizedLayer], ...]] = (BytesLayer, IntQuantizedLayer, FloatQuantizedLayer)

    @classmethod
    def reads_weights(cls, scheme: Mapping[str, Any]) -> bool:
        return any(each.reads_weights(scheme) for each in cls.classes)

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        kind = next(each for each in self.classes if each.reads_weights(self.scheme))
        return kind(self.checkpoint, self.name, self.scheme).dequantize(dtype, device)


class EightBitRowsLayer(QuantizedLayer):
    """A layer of bitsandbytes' 8-bit integers with the largest weight of each output."""

    leaves = ("SCB", "weight", "weight_format")

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        """Return float [out, in], in the order of bitsandbytes' own products."""
        parts = self.read(self.leaves, device, required=("weight",))
        if int(parts.get("weight_format", torch.zeros(1)).flatten()[0]):
            raise SourceError("its 8-bit weights do not lie row after row", where=self.where)
        return (parts["weight"].float() * parts["SCB"].float().view(-1, 1) * (1 / 127)).to(dtype)


@dataclass(frozen=True)
class ExpertsInCodes:
    """The weights of a layer of experts whose codes lie in one tensor."""

    checkpoint: Checkpoint
    name: str
    scheme: Mapping[str, Any]
    leaves: ClassVar[tuple[str, str]]
    """How the names of codes and scales end."""

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        """Return float [experts, rows, columns]. Raises as `expert`."""
        first = self.expert(0, dtype, device)
        floats = torch.empty(self._shapes[0][0], *first.shape, dtype=dtype)
        for index in range(len(floats)):
            floats[index] = self.expert(index, dtype, device) if index else first
        return floats

    def expert(self, index: int, dtype: torch.dtype, device: str) -> Tensor:
        """Return float [rows, columns] of one. Raises SourceError if its tensors do not fit each other."""
        if self._shapes[0][0] != self._shapes[1][0]:
            raise self._misfit()
        codes, scales = (self.checkpoint.read_member(f"{self.name}{leaf}", index).to(device) for leaf in self.leaves)
        return self._floats(codes, scales, dtype)

    def _floats(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [self.checkpoint.tensors[f"{self.name}{leaf}"].shape for leaf in self.leaves]

    def _misfit(self) -> SourceError:
        codes, scales = map(list, self._shapes)
        return SourceError(
            f"scales {scales} are not those of {self._form}{codes}",
            where=f"{self.checkpoint.directory}: {self.name}",
            remedy="See that config.json and the weights belong together",
        )

    @property
    def _form(self) -> str:
        return ""


class MicroscaledExperts(ExpertsInCodes):
    """Those in MXFP4, whose float weights are [in, out]."""

    leaves = (BLOCKS, SCALES)

    def _floats(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if codes.shape[:-1] != scales.shape:
            raise self._misfit()
        return MicroscaledLinear(codes.flatten(1), scales, None, None, dtype).dequantize().T.contiguous()


class TiledExperts(ExpertsInCodes):
    """Those in FP8."""

    leaves = ("", TILES)

    def _floats(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        rows, columns = self._tile
        if list(scales.shape) != [-(-codes.shape[0] // rows), -(-codes.shape[1] // columns)]:
            raise self._misfit()
        return dequantize(codes.float(), scales.float(), (rows, columns)).to(dtype)

    @property
    def _tile(self) -> tuple[int, int]:
        rows, columns = self.scheme.get("weight_block_size") or TILE
        return int(rows), int(columns)

    @property
    def _form(self) -> str:
        rows, columns = self._tile
        return f"tiles of {rows} x {columns} of "


def float_weights(checkpoint: Checkpoint) -> dict[str, Packed]:
    """Return tensor of the float checkpoint -> what stands for it in a packed one.

    Raises SourceError for a form that nobody here reads, and for a layer that config.json does not
    name.
    """
    config = checkpoint.quantization or {}
    found = READERS.get(str(config.get("quant_method")), lambda *_: None)(checkpoint, config)
    if not found:
        raise unreadable(config, str(checkpoint.directory))
    transposed = checkpoint.config.get("model_type") in CONV1D_MODELS
    named = {each.name if isinstance(each, ExpertsInCodes) else f"{each.name}.weight": each for each in found}
    return {name: Transposed(each) if transposed and name != f"{HEAD}.weight" else each for name, each in named.items()}


def _compressed_tensors(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Sequence[Any] | None:
    groups = groups_of(config)
    known = all(each["format"] in WEIGHTS and WEIGHTS[each["format"]].reads_weights(each) for each in groups)
    if not known or any(config.get(key) for key in BEYOND[1:]):
        return None
    return layers_in_groups(checkpoint, groups, WEIGHTS)


def _bitsandbytes(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Sequence[Any]:
    return [*four_bit_layers(checkpoint).values(), *EightBitRowsLayer.all_of(checkpoint, config)]


def _fp8(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Sequence[Any]:
    return [
        TiledLayer(checkpoint, name.removesuffix(".weight"), config)
        if name.endswith(".weight")
        else TiledExperts(checkpoint, name, config)
        for name in packed_floats(checkpoint.shape)
    ]


def _modelopt(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Sequence[Any]:
    kind = TiledLayer if config["quant_algo"] == "FP8" else DoublyScaledLayer
    return [kind(checkpoint, name.removesuffix(".weight"), {}) for name in packed_floats(checkpoint.shape)]


def _mxfp4(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Sequence[Any]:
    return [MicroscaledExperts(checkpoint, name, config) for name in packed_floats(checkpoint.shape)]


WEIGHTS: dict[str, type[QuantizedLayer]] = {**FORMATS, "mxfp8-quantized": TiledLayer, "naive-quantized": NaiveLayer}
"""Format of compressed-tensors -> its class."""
READERS: dict[str, Callable[[Checkpoint, Mapping[str, Any]], Sequence[Any] | None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "gptq": gptq_layers,
    "awq": awq_layers,
    "bitsandbytes": _bitsandbytes,
}
"""`quant_method` -> what returns the layers of a checkpoint, None for a form that is not known here."""
