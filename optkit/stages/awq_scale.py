"""Stage `awq_scale`: fold the input scales of AWQ into a model, for `gptq` or `rtn` to round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.field_types import CodeBits, GroupSize
from optkit.common.out_of_resources import out_of_memory
from optkit.devices.enough import refuse_devices
from optkit.errors import StageError
from optkit.model.calibration_memory import less_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.linear_layers import Layer, layers_of, select
from optkit.model.shape import ModelShape
from optkit.model.together import together
from optkit.model.writer import copy_companions, write_blocks
from optkit.packed_tensors.microscaled import BLOCKS
from optkit.stage import Context, Cost, Report
from optkit.stages.quantizing.fitting import refuse_uneven_groups
from optkit.stages.quantizing.input_scaling import BlockScaler, InputScaling, ScaledBlock

if TYPE_CHECKING:
    from torch import Tensor

STAGE = "awq_scale"
LESS_MEMORY = less_memory(STAGE)


class AwqScale(InputScaling):
    """Fold the input scales of AWQ (arXiv:2306.00978) into norms and linear layers.
    Nothing is rounded: the model computes what it did.

    A quantizer after it rounds the weights that matter most more finely; `gptq` with few bits gains
    the most. The grid that the scales are searched for has to be the quantizer's: recipes with another
    are refused. In front of `mx` that is `type`, and inputs that are rounded too lose less.
    """

    kind: ClassVar[str] = "awq_scale"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- awq_scale: {bits: 3}\n- gptq: {bits: 3}"
    version: ClassVar[int] = 7

    type: Literal["int", "nvfp4", "mxfp4"] = Field(default="int", exclude_if=lambda value: value == "int")
    """What the weights are going to be: integers, or floats of `mx`."""
    activations: Literal["none", "dynamic"] = Field(default="none", exclude_if=lambda value: value == "none")
    """Whether `mx` is going to have inputs rounded as well."""
    bits: CodeBits = 4
    """Bits that the weights are going to have."""
    group_size: GroupSize | None = 64
    """Inputs that are going to share a scale; null: one scale per output channel."""
    symmetric: bool = True
    """Whether they are going to have no zero points."""
    rounding: Literal["gptq", "nearest"] = "gptq"
    """How they are going to be rounded: `gptq` by that stage, `nearest` by `rtn`; both by `mx`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unread = (
            ("activations",)
            if self.type == "int"
            else ("bits", "group_size", "symmetric", "grid_points", "equal_tokens")
        )
        if named := self.set_among(*unread):
            raise ValueError(f"{named[0]} would not be read with type: {self.type}. Leave it out")
        return self

    @property
    def prepares(self) -> Mapping[str, Any]:
        fields = ("bits", "group_size", "symmetric") if self.type == "int" else ("activations",)
        return {name: getattr(self, name) for name in ("type", *fields, "rounding")}

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Scale block by block, from safetensors to safetensors.

        Raises StageError if no input can be scaled, SourceError for weights that are NaN or Inf,
        ResourceError when memory runs out.
        """
        from optkit.model.skeleton import Skeleton
        from optkit.model.skeleton_layers import advance_with
        from optkit.stages.quantizing.hessians import details_of_sums, read_text

        if report := self.launched(source, target, context):
            return report
        processes = together(self.devices)
        started = time.monotonic()
        skeleton = Skeleton(Checkpoint(source), trust_remote_code=context.trust_remote_code)
        layers, refused = self._layers(skeleton.checkpoint.shape)
        details: dict[str, Any] = {"gains": {}, **details_of_sums(context.device, skeleton.dtype, self.equal_tokens)}
        changed: list[str] = []
        size = skeleton.checkpoint.shape.size_bytes
        kept = KeptBlocks(context.workspace, context.device, context.progress, STAGE, size, processes)

        def scaled_blocks() -> Iterator[dict[str, Tensor]]:
            with out_of_memory("in front of the first block", context.device, LESS_MEMORY):
                tokens = read_text(skeleton, self.calibration, context, STAGE)
                scaler = BlockScaler(skeleton, tokens, context.device, self, processes)
            facts = {"details": details, "refused": refused, "changed": changed}

            replay = partial(advance_with, skeleton, scaler.inputs, context.device, LESS_MEMORY)
            for index in kept.resume(len(skeleton.blocks), scaler.inputs, facts, replay):
                with skeleton.loaded(skeleton.blocks[index], context.device, LESS_MEMORY):
                    names = [name for name in skeleton.linears(skeleton.blocks[index]) if name in layers]
                    scaled = self._scaled(scaler, index, names)
                    scaled.hessians.clear()
                    if index + 1 < len(skeleton.blocks):
                        skeleton.advance_(index, scaler.inputs)
                details["gains"].update(scaled.gains)
                refused.update(scaled.refused)
                changed.extend(scaled.changed)
                yield scaled.changed
                del scaled  # before the next block's is made

        with context.progress.task(STAGE, len(skeleton.blocks), "blocks") as task:
            write_blocks(skeleton, target, kept.each(scaled_blocks(), task), task, processes)
        if not processes.first:
            return Report(changed=0)
        copy_companions(source, target, context.trust_remote_code, skeleton.checkpoint.config)
        details["seconds"] = round(time.monotonic() - started, 2)
        return Report(
            len(set(changed)), {**refused, **skeleton.fused}, details, calibrated_on=(self.calibration.identity(),)
        )

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the same tensors; the memory is an estimate."""
        refuse_devices(self.devices, device, self.kind)
        layers, _ = self._layers(shape)
        work = self.working_bytes(shape, layers, self.rounding, device, smooths=self.type != "int")
        return work.cost(shape, shape, device), shape

    def _layers(self, shape: ModelShape) -> tuple[Mapping[str, Layer], dict[str, str]]:
        """Return the layers, and why others are left out."""
        layers = select(layers_of(shape), (), ("*",), (), STAGE).layers
        if self.type == "int":
            refuse_uneven_groups(tuple(layers.values()), self.group_size, STAGE)
            return layers, {}
        block = BLOCKS[self.type]
        whole = {name: layer for name, layer in layers.items() if layer.inputs % block == 0}
        if not whole:
            raise StageError(
                f"no layer's inputs are a multiple of {block}",
                where=f"{STAGE}.type",
                why=f"Blocks of {self.type} are {block} inputs wide",
                remedy="Take awq_scale out of the recipe",
            )
        left = layers.keys() - whole.keys()
        return whole, {name: f"its {layers[name].inputs} inputs are no multiple of {block}" for name in sorted(left)}

    def _scaled(self, scaler: BlockScaler, index: int, names: Sequence[str]) -> ScaledBlock:
        from optkit.algorithms.grid import Grid
        from optkit.algorithms.smoothing import OF_FLOATS

        if self.type == "int":
            grid = Grid(self.bits, self.group_size, self.symmetric)
            return scaler.scale_(index, dict.fromkeys(names, grid), self.rounding, STAGE)
        return scaler.smooth_(index, names, OF_FLOATS[self.type], self.activations, self.rounding, STAGE)
