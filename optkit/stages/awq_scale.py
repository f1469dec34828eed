"""Stage `awq_scale`: fold the input scales of AWQ into a model, for `gptq` or `rtn` to round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from optkit.common.field_types import CodeBits, GroupSize
from optkit.common.out_of_resources import out_of_memory
from optkit.devices.enough import refuse_devices
from optkit.model.calibration_memory import less_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.linear_layers import Layer, layers_of, select
from optkit.model.shape import ModelShape
from optkit.model.together import together
from optkit.model.writer import copy_companions, write_blocks
from optkit.stage import Context, Cost, Report
from optkit.stages.quantizing.fitting import refuse_uneven_groups
from optkit.stages.quantizing.input_scaling import BlockScaler, InputScaling

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.skeleton import Skeleton

STAGE = "awq_scale"
LESS_MEMORY = less_memory(STAGE)


class AwqScale(InputScaling):
    """Fold the input scales of AWQ (arXiv:2306.00978) into norms and linear layers.
    Nothing is rounded: the model computes what it did.

    A quantizer after it rounds the weights that matter most more finely; `gptq` with few bits gains
    the most. The grid is the one that the scales are searched for: that of the quantizer.
    """

    kind: ClassVar[str] = "awq_scale"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- awq_scale: {bits: 3}\n- gptq: {bits: 3}"
    version: ClassVar[int] = 6

    bits: CodeBits = 4
    """Bits that the weights are going to have."""
    group_size: GroupSize | None = 64
    """Inputs that are going to share a scale; null: one scale per output channel."""
    symmetric: bool = True
    """Whether they are going to have no zero points."""
    rounding: Literal["gptq", "nearest"] = "gptq"
    """How they are going to be rounded: `gptq` by that stage, `nearest` by `rtn`."""

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
        layers = self._layers(skeleton.checkpoint.shape)
        details: dict[str, Any] = {"gains": {}, **details_of_sums(context.device, skeleton.dtype, self.equal_tokens)}
        refused: dict[str, str] = {}
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
                    scaled = scaler.scale_(index, self._grids(skeleton, index, layers), self.rounding, STAGE)
                    scaled.hessians.clear()
                    if index + 1 < len(skeleton.blocks):
                        skeleton.advance_(index, scaler.inputs)
                details["gains"].update(scaled.gains)
                refused.update(scaled.refused)
                changed.extend(scaled.changed)
                yield scaled.changed

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
        work = self.working_bytes(shape, self._layers(shape), self.rounding, device)
        return work.cost(shape, shape, device), shape

    def _layers(self, shape: ModelShape) -> Mapping[str, Layer]:
        layers = select(layers_of(shape), (), ("*",), (), STAGE).layers
        refuse_uneven_groups(tuple(layers.values()), self.group_size, STAGE)
        return layers

    def _grids(self, skeleton: Skeleton, index: int, layers: Mapping[str, Layer]) -> dict[str, Any]:
        from optkit.algorithms.grid import Grid

        grid = Grid(self.bits, self.group_size, self.symmetric)
        return {name: grid for name in skeleton.linears(skeleton.blocks[index]) if name in layers}
