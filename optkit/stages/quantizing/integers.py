"""What the quantizers of integer weights share (`rtn`, `gptq`, `awq`).
That is bits, groups, overrides and the packed formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import field_validator, model_validator

from optkit.common.field_types import CodeBits, GroupSize
from optkit.errors import StageError
from optkit.model.linear_layers import Layer, Selection, refuse_unmatched
from optkit.model.output_layer import HEAD
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.gptq import GPTQ, GPTQ_GROUP_SIZES, GptqPacked
from optkit.packed_tensors.integers import BytesQuantized, PackedFormat, PackQuantized
from optkit.stages.quantizing.fitting import (
    exceptions_for_vllm,
    experts_for_gpus,
    in_whole_bytes,
    joined_differently,
    refuse_unfit,
)
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.overrides import KEEP, Override, Overrides, override_of
from optkit.stages.quantizing.streaming import LayerQuantizer

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.algorithms.grid import Grid, QuantizedWeight


class WeightQuantizer(LayerQuantizer):
    """Round the weights of linear layers to a few bits each and store them packed."""

    bits: CodeBits = 4
    """Bits of a weight."""
    group_size: GroupSize | None = 64
    """Inputs that share a scale; it must divide the inputs of every layer. null (or -1): one scale
    per output channel.
    """
    symmetric: bool = True
    """Without zero points, which the fastest kernels ask for. false: one zero point per group, a
    little better and a little larger.
    """
    format: Literal["compressed-tensors", "gptq"] = "compressed-tensors"
    """`compressed-tensors` (pack-quantized) or `gptq` (of AutoGPTQ and gptqmodel, symmetric; the
    one for GPT-2's Conv1D layers; experts in it are opened by vLLM on GPUs alone)."""
    lm_head: bool = False
    """Quantize lm_head too; one that is tied to the embedding becomes a matrix of its own, and the
    embedding stays as it is.
    """
    overrides: Overrides = {}
    """What is different for some layers: glob pattern on full names -> `bits`, `group_size`,
    `symmetric` or `method: rtn`. `keep` leaves them as they are. The longest pattern that matches a
    layer decides."""

    @property
    def grid(self) -> Mapping[str, Any]:
        return {"type": "int", "bits": self.bits, "group_size": self.group_size, "symmetric": self.symmetric}

    @field_validator("group_size", mode="before")
    @classmethod
    def _per_channel(cls, value: Any) -> Any:
        return None if value == -1 else value

    @model_validator(mode="after")
    def _openable(self) -> Self:
        if self.format != GPTQ:
            return self
        if "vision" in self.towers:
            raise ValueError(
                "this format is opened in the decoder's blocks alone: take vision out of towers, or "
                "format: compressed-tensors"
            )
        changes = [each for each in self.overrides.values() if isinstance(each, Override)]
        if not self.symmetric or any(each.symmetric is False for each in changes):
            raise ValueError(
                "gptqmodel and vLLM open zero points in this format only from gptqmodel: set symmetric: true, "
                "or format: compressed-tensors"
            )
        if odd := next((bits for bits in (self.bits, *(each.bits for each in changes)) if bits in (5, 6)), None):
            raise ValueError(
                f"gptqmodel and vLLM open 2, 3, 4 and 8 bits in this format, not {odd}: take one, or "
                "format: compressed-tensors"
            )
        asked = (self.group_size, *(each.group_size for each in changes))
        wrong = next((size for size in asked if size not in (None, -1, *GPTQ_GROUP_SIZES)), None)
        if wrong is not None:
            sizes = ", ".join(str(size) for size in GPTQ_GROUP_SIZES)
            raise ValueError(
                f"gptqmodel opens group sizes {sizes} and null, not {wrong}: take one, or format: compressed-tensors"
            )
        return self

    @property
    def packing(self) -> str:
        """The format that is written."""
        return self.format

    def select_layers(self, layers: Mapping[str, Layer], outside: Mapping[str, Layer]) -> Selection:
        layers, outside = self.with_towers(layers, outside)
        if self.lm_head:
            if HEAD not in outside:
                raise StageError(
                    "the model has no layer lm_head", where=f"{self.kind}.lm_head", remedy="Set lm_head: false"
                )
            layers = {**layers, HEAD: outside[HEAD]}
            outside = {name: layer for name, layer in outside.items() if name != HEAD}
        refuse_unmatched(f"{self.kind}.overrides", tuple(self.overrides), layers, tuple(outside))
        selection = super().select_layers(layers, outside)
        if self.lm_head and selection.skipped.get(HEAD) == "not included":
            raise StageError(
                "lm_head is not included",
                where=f"{self.kind}.lm_head",
                remedy="Add lm_head to `include`, or set lm_head: false",
            )
        kept = {name: "kept by overrides" for name in selection.layers if self._override(name) == KEEP}
        return selection.without(kept, self.kind)

    def layer_format(self, layer: Layer) -> PackedFormat:
        bits, group_size, symmetric = self.bits, self.group_size, self.symmetric
        override = self._override(layer.name)
        if isinstance(override, Override):
            bits = override.bits or bits
            symmetric = symmetric if override.symmetric is None else override.symmetric
            if override.group_size is not None:
                group_size = None if override.group_size == -1 else override.group_size
        if self.packing == GPTQ:
            return GptqPacked(bits, group_size)
        return (BytesQuantized if layer.whole_bytes else PackQuantized)(bits, group_size, symmetric)

    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        refuse_unfit(selection, formats, self.kind)

    def deployment_notes(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> list[str]:
        return [
            *joined_differently(selection, formats),
            *exceptions_for_vllm(selection, formats),
            *experts_for_gpus(formats),
            *in_whole_bytes(formats),
        ]

    def _override(self, name: str) -> Override | Literal["keep"] | None:
        return override_of(name, self.overrides, self.kind)

    def _rounds_to_nearest(self, name: str) -> bool:
        """Say whether `overrides` wants a layer rounded to nearest."""
        override = self._override(name)
        return isinstance(override, Override) and override.method == "rtn"

    def write_model_config(self, job: QuantizationJob, target: Path) -> None:
        super().write_model_config(job, target)
        if self.packing == GPTQ:
            config = json.loads((target / "config.json").read_text(encoding="utf-8"))["quantization_config"]
            (target / "quantize_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        for quantized in self.quantized_weights(job):
            output = BlockOutput(self._packed(job, quantized))
            del quantized  # unpacked codes are twice as large, and the next block has its own
            yield output
            del output  # before the next block's is made

    def quantized_weights(self, job: QuantizationJob) -> Iterator[Mapping[str, QuantizedWeight]]:
        """Yield the quantized layers of each block, in order."""
        raise NotImplementedError

    def _packed(self, job: QuantizationJob, quantized: Mapping[str, QuantizedWeight]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of quantized layers as they are written."""
        grids = {name: packed_grid(job, name) for name in quantized}
        return {
            name: packed_format(job, name).pack(weight, grids[name].scale_dtype) for name, weight in quantized.items()
        }


def put_back_(job: QuantizationJob, index: int, output: BlockOutput) -> dict[str, QuantizedWeight]:
    """Put the quantized layers of a block, packed or `unpacked`, into its loaded modules, and return them."""
    from optkit.algorithms.grid import QuantizedWeight
    from optkit.model.skeleton_layers import put_weight_

    found = {}
    for name, module in job.modules(index).items():
        form, tensors = packed_format(job, name), output.layers[name]
        weight = QuantizedWeight(**tensors, bits=form.bits) if "codes" in tensors else form.unpack(tensors)
        found[name] = replace(weight, scales=weight.scales.float())
        put_weight_(module, found[name].dequantize())
    return found


def packed_format(job: QuantizationJob, name: str) -> PackedFormat:
    """Return the form of a layer."""
    form: Any = job.formats[name]
    return form  # type: ignore[no-any-return]


def packed_grid(job: QuantizationJob, name: str) -> Grid:
    """Return the grid that the weights of a layer are rounded to."""
    from optkit.algorithms.grid import Grid
    from optkit.model.empty_model import TORCH_DTYPES

    form = packed_format(job, name)
    stored = job.skeleton.checkpoint.tensors[job.weight(name)].dtype
    return Grid(form.bits, form.group_size, form.symmetric, TORCH_DTYPES[form.scale_dtype(stored)])
