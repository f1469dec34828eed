"""Layers of packed integers, as compressed-tensors, GPTQ's and AWQ's tools write them.
See `optkit.algorithms.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from optkit.algorithms.packing import pack, unpack, unpack_awq, unsigned_codes
from optkit.errors import SourceError
from optkit.kernels.integer_kernels import BITS, IntegerLayer, bits_of, packed_weight
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.checkpoint import Checkpoint

AWQ_CODES_PER_WORD = 8


class PackQuantizedLayer(IntegerLayer):
    """A layer of integers packed along the inputs: compressed-tensors' format "pack-quantized"."""

    leaves = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    dtypes = frozenset({"I32"})

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs; reads 16 bytes."""
        outputs, inputs = (
            int(size) for size in self.read(("weight_shape",), "cpu", required=("weight_shape",))["weight_shape"]
        )
        return outputs, inputs

    def integers(self, device: str) -> PackedWeight:
        parts = self.read(self.leaves, device, required=("weight_scale", "weight_shape"))
        words, scales, packed = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
        outputs, inputs = self.shape
        bits = bits_of(words, scales, (outputs, inputs), self.where)
        zeros = None if packed is None else unpack(packed, bits, outputs, 0)
        return packed_weight(words, scales, zeros, parts.get("weight_g_idx"), bits, inputs)


class BytesLayer(IntegerLayer):
    """A layer of integers in a byte each: compressed-tensors' format "naive-quantized"."""

    leaves = ("weight", "weight_scale", "weight_zero_point")
    dtypes = frozenset({"I8"})

    @classmethod
    def reads_weights(cls, scheme: Mapping[str, Any]) -> bool:
        weights = scheme.get("weights") or {}
        known = weights.get("type") == "int" and weights.get("num_bits") in BITS
        return known and weights.get("strategy") in ("group", "channel")

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.checkpoint.tensors[f"{self.name}.weight"].shape
        return outputs, inputs

    def integers(self, device: str) -> PackedWeight:
        parts = self.read(self.leaves, device, required=("weight_scale",))
        bits, scales, zeros = self.scheme["weights"]["num_bits"], parts["weight_scale"], parts.get("weight_zero_point")
        words = pack(self._unsigned(parts["weight"], bits), bits, 1)
        bits_of(words, scales, self.shape, self.where)
        zeros = None if zeros is None else self._unsigned(zeros, bits)
        return packed_weight(words, scales, zeros, None, bits, self.shape[1])

    def _unsigned(self, codes: Tensor, bits: int) -> Tensor:
        found = unsigned_codes(codes, bits)
        if (found > (1 << bits) - 1).any():
            raise SourceError(
                f"codes do not fit the {bits} bits that config.json says",
                where=self.where,
                remedy="See that config.json and the weights belong together",
            )
        return found


def gptq_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[GptqLayer] | None:
    """Return the layers if `quant_method` is gptq, None if packed for one kernel alone (Marlin)."""
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        return None
    return GptqLayer.all_of(checkpoint, config)


class GptqLayer(IntegerLayer):
    """A layer in GPTQ's format, as AutoGPTQ and gptqmodel write it."""

    leaves = ("qweight", "qzeros", "scales", "g_idx")

    @property
    def shape(self) -> tuple[int, int]:
        words, outputs = self.checkpoint.tensors[f"{self.name}.qweight"].shape
        if order := self.info("g_idx"):
            return outputs, order.shape[0]
        return outputs, words * 32 // int(self.scheme["bits"])

    def integers(self, device: str) -> PackedWeight:
        parts = self.read(self.leaves, device, required=("qzeros", "scales"))
        words, scales = parts["qweight"].T.contiguous(), parts["scales"].T.contiguous()
        outputs, inputs = self.shape
        bits = bits_of(words, scales, (outputs, inputs), self.where)
        below = 0 if self.scheme.get("checkpoint_format") == "gptq_v2" else 1
        zeros = unpack(parts["qzeros"], bits, outputs, 1).T.contiguous() + below
        return packed_weight(words, scales, zeros, parts.get("g_idx"), bits, inputs)


def awq_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[AwqLayer] | None:
    """Return the layers if `quant_method` is awq, None for another layout (GEMV, Marlin)."""
    if str(config.get("version", "gemm")).lower() != "gemm" or config.get("bits", 4) != 4:
        return None
    return AwqLayer.all_of(checkpoint, config)


class AwqLayer(IntegerLayer):
    """A layer in AutoAWQ's GEMM layout."""

    leaves = ("qweight", "qzeros", "scales")

    @property
    def shape(self) -> tuple[int, int]:
        inputs, words = self.checkpoint.tensors[f"{self.name}.qweight"].shape
        return words * AWQ_CODES_PER_WORD, inputs

    def integers(self, device: str) -> PackedWeight:
        parts = self.read(self.leaves, device, required=("qzeros", "scales"))
        outputs, inputs = self.shape
        groups = len(parts["scales"])
        expected = {"scales": [groups, outputs], "qzeros": [groups, outputs // AWQ_CODES_PER_WORD]}
        wrong = next((leaf for leaf, shape in expected.items() if list(parts[leaf].shape) != shape), None)
        if wrong or not groups or inputs % groups:
            leaf = wrong or "scales"
            raise SourceError(
                f"{leaf} {list(parts[leaf].shape)} do not fit a weight [{outputs}, {inputs}] of 4 bits",
                where=self.where,
                remedy="Make the artifact again",
            )
        weight = unpack_awq(parts)
        return packed_weight(pack(weight.codes, weight.bits, 1), weight.scales, weight.zeros, None, weight.bits, inputs)
