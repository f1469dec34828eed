"""Stage `mx`: 4-bit floats in small scaled blocks, MXFP4 or NVFP4; no calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.calibration_memory import Work
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Layer, Selection, layers_of
from optkit.model.shape import DTYPE_BITS, ModelShape
from optkit.model.task import WEIGHTS_ALONE, Task
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.microscaled import BLOCKS, Microscaled
from optkit.stage import Context, Cost, Report
from optkit.stages.quantizing.fitting import EXPERTS, refuse_conv1d, refuse_layers, refuse_some_experts
from optkit.stages.quantizing.streaming import BlockOutput, LayerQuantizer, QuantizationJob

if TYPE_CHECKING:
    from torch import Tensor

WORK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""What rounding holds beside the weights and their codes; it works on a few rows at a time."""


class Mx(LayerQuantizer):
    """Store weights as 4-bit floats in small blocks with a scale each (NVFP4 or MXFP4).
    Activations stay as they are.
    """

    kind: ClassVar[str] = "mx"
    example: ClassVar[str] = "- bf16\n- mx: {type: nvfp4}"
    for_tasks: ClassVar[frozenset[Task]] = WEIGHTS_ALONE

    type: Literal["nvfp4", "mxfp4"] = "nvfp4"
    """`nvfp4`: blocks of 16 with scales of 8 bits, 4.5 bits a weight. `mxfp4`: blocks of 32 with
    powers of two, 4.25 bits a weight.
    """
    scale_search: Literal["minmax", "mse"] = "mse"
    """`mse`: the scale of each block with the least squared rounding error. `minmax`: the one that
    reaches every weight of it.
    """

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Quantize block by block.
        Raises what every quantizer raises, and StageError if the model is not in bfloat16.
        """
        _refuse_other_dtypes(Checkpoint(source).shape, self.kind)
        return super().run(source, target, context)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact tensors that it leaves; the memory is an estimate."""
        _refuse_other_dtypes(shape, self.kind)
        return super().predict(shape, device)

    def layer_format(self, layer: Layer) -> Microscaled:
        return Microscaled(self.type)

    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        layers = tuple(selection.layers.values())
        refuse_conv1d(layers, self.kind, "Use the stage nf4, or gptq with format: gptq")
        refuse_some_experts(selection, formats, self.kind)
        refuse_layers(
            [layer.name for layer in layers if EXPERTS in layer.name and self.type == "nvfp4"],
            "belong to experts",
            where=f"{self.kind}.type",
            why="transformers opens experts in nvfp4 without their global scales, which is wrong",
            remedy="Set type: mxfp4",
        )
        block = BLOCKS[self.type]
        wrong = [layer for layer in layers if layer.inputs % block]
        refuse_layers(
            [layer.name for layer in wrong],
            f"have columns ({wrong[0].inputs if wrong else 0}) that are not a multiple of {block}",
            where=f"{self.kind}.type",
            why=f"Blocks of {self.type} are {block} inputs wide",
            remedy="Exclude them"
            + ("" if any(layer.inputs % BLOCKS["nvfp4"] for layer in layers) else ", or set type: nvfp4"),
        )

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        for index in range(len(job.skeleton.blocks)):
            layers: dict[str, Mapping[str, Tensor]] = {}
            # Kernels that fuse layers (q, k and v; gate and up) hold one global scale for them:
            # those of one module share it.
            for _, names in groupby(
                sorted(job.modules(index), key=lambda name: name.rpartition(".")[::2]), key=_parent
            ):
                layers |= self.rounded_layers(job, list(names))
            yield BlockOutput(layers)

    @property
    def needs_no_text(self) -> bool:
        return True

    def rounded_layers(self, job: QuantizationJob, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        from optkit.algorithms.microscaling import (
            exact_nvfp4_scale,
            nvfp4_global_scale,
            pack,
            quantize_mxfp4,
            quantize_nvfp4,
        )

        job.task.advance(0, note=names[0])
        search = self.scale_search == "mse"
        with out_of_memory(names[0], job.context.device, "Use a machine with more memory"):
            weights = {
                name: job.skeleton.checkpoint.read_finite(f"{name}.weight").to(job.context.device) for name in names
            }
            if self.type == "mxfp4":
                return {name: pack(quantize_mxfp4(weight, search)) for name, weight in weights.items()}
            exact = exact_nvfp4_scale(weights.values())
            if exact is not None:
                job.details["layers_without_error"] = job.details.get("layers_without_error", 0) + len(names)
            shared = nvfp4_global_scale(weights.values()) if exact is None else exact
            search = search or exact is not None
            return {name: pack(quantize_nvfp4(weight, shared, search)) for name, weight in weights.items()}

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        modules: Counter[str] = Counter()
        for name, layer in layers.items():
            bits = DTYPE_BITS[shape.tensors[f"{name}.weight"].dtype]
            modules[_parent(name)] += layer.outputs * layer.inputs * (bits + 8) // 8
        return Work(max(modules.values()) + WORK_BYTES[device.partition(":")[0]])


def _refuse_other_dtypes(shape: ModelShape, stage: str) -> None:
    dtypes = sorted(
        {shape.tensors[f"{name}.weight"].dtype for name, layer in layers_of(shape).items() if not layer.router}
        - {"BF16"}
    )
    if dtypes:
        raise StageError(
            f"the model has weights in {', '.join(dtypes)}",
            where=stage,
            why="compressed-tensors dequantizes 4-bit floats to bfloat16 alone, and transformers cannot "
            "mix it with another dtype",
            remedy="Put `- bf16` before it",
        )


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
