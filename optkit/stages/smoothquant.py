"""Stage `smoothquant`: weights and activations as 8-bit integers (W8A8).
Outliers of activations are moved into the weights before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from optkit.errors import StageError
from optkit.model.linear_layers import Layer, scaled_together
from optkit.packed_tensors.eight_bit import Number, Scales
from optkit.source.calibration import Calibration
from optkit.stages.quantizing.eight_bits import EightBitQuantizer, Preparation
from optkit.stages.quantizing.input_scaling import PROBE, SEARCH_ROWS, searched_smoothing, smoothing_bytes
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.blocks import BlockInputs
    from optkit.model.prompts import Prompts
    from optkit.model.wiring import FoldGroup
    from optkit.stages.quantizing.input_ranges import InputRange

WEIGHT_COPIES_OF_FOLDING = 2
"""Float32 copies of weights that folding scales holds at once."""


class SmoothQuant(EightBitQuantizer):
    """Store weights as 8-bit integers, and round activations to 8 bits as well.
    Each output channel has one scale (W8A8, arXiv:2211.10438).

    Outliers of the activations are first moved into the weights. Input channels of a layer are
    divided by scales, which are folded into what makes them, a norm or a linear layer. The
    embedding in front and lm_head behind stay as they are.
    """

    kind: ClassVar[str] = "smoothquant"
    prepares_whole_blocks: ClassVar[bool] = True
    example: ClassVar[str] = "- smoothquant: {alpha: search, calibration: {dataset: c4}}"
    version: ClassVar[int] = 9
    number: ClassVar[Number] = "int"
    scales: ClassVar[Scales] = "channel"

    alpha: Annotated[float, Field(ge=0, le=1)] | Literal["search"] = "search"
    """How much of the outliers moves into the weights: 0 none to speak of, 1 all of it, 0.5 in the
    paper. `search`: the best alpha for each norm or layer that takes scales, and then each scale
    for itself. The outputs of the rounded layers are then as near as can be.
    """
    folding: Literal["all", "norms"] = "all"
    """What takes the scales: `norms` alone, as in the paper, or linear layers too, if one makes
    the input (up_proj, v_proj).
    """
    activations: Literal["dynamic", "static"] = "dynamic"
    """`dynamic`: rounded with a scale for each token. `static`: with one calibrated scale for all;
    a little faster and clearly worse.
    """
    calibration: Calibration = Calibration(dataset="c4")
    """The text whose activations decide what is an outlier."""

    @property
    def sampled_rows(self) -> int:
        return SEARCH_ROWS if self.alpha == "search" else 0

    def preparation_bytes(
        self, blocks: Sequence[Sequence[str]], layers: Mapping[str, Layer], compensating: int
    ) -> tuple[int, int]:
        if self.sampled_rows:
            return smoothing_bytes(blocks, layers, self.calibration, compensating)
        folded = max(
            sum(layers[name].outputs * layers[name].inputs for stack in group for name in stack)
            for block in blocks
            for group in scaled_together(block)
        )
        return 0, 4 * WEIGHT_COPIES_OF_FOLDING * folded

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        yield from self._calibrated_blocks(job, self.calibration)
        if unsmoothed := job.details["unsmoothed"]:
            name, reason = next(iter(unsmoothed.items()))
            job.notes.append(f"{len(unsmoothed):,} layers are rounded without smoothing ({name}: {reason})")

    def preparation(self, job: QuantizationJob, tokens: Tensor | Prompts) -> Preparation:
        from optkit.model.prompts import few_of

        job.details |= {"smoothing": {}, "unsmoothed": {}}
        probe = job.skeleton.capture_inputs(few_of(tokens, *PROBE), job.context.device)
        return _Smoothing(self, job, probe)


@dataclass
class _Smoothing:
    """Smooths one loaded block after another."""

    stage: SmoothQuant
    job: QuantizationJob
    probe: BlockInputs
    """A few tokens in front of the first block."""

    def __call__(self, index: int, ranges: Mapping[str, InputRange]) -> dict[str, Tensor]:
        """Fold scales into a block.
        Returns the tensors of the checkpoint that changed and are not rounded afterwards.
        """
        from optkit.model.wiring import fold_groups

        skeleton, details = self.job.skeleton, self.job.details
        wiring = fold_groups(skeleton, index, self.probe.hidden, self.probe.batches[0].calls[index])
        groups = [group for group in wiring.groups if self.stage.folding == "all" or group.kind == "norm"]
        smoothed = {name for group in groups for name in group.consumers}
        reasons = {
            name: wiring.refused.get(name, "a linear layer makes its input, and folding: norms leaves it alone")
            for name in ranges
            if name not in smoothed
        }
        if index == 0 and len(reasons) == len(ranges):
            name, reason = next(iter(reasons.items()))
            raise StageError(
                f"no layer of the first block can be smoothed, {name} for one: {reason}",
                where="smoothquant",
                why="Scales of its input channels have nowhere to go",
                remedy="Use fp8, or a weight-only stage such as gptq",
            )
        details["unsmoothed"] |= reasons
        replaced: dict[str, Tensor] = {}
        for group in groups:
            replaced |= self._fold_(group, ranges)
        return {name: tensor for name, tensor in replaced.items() if name.removesuffix(".weight") not in ranges}

    def _fold_(self, group: FoldGroup, ranges: Mapping[str, InputRange]) -> dict[str, Tensor]:
        """Smooth the layers of a group that are rounded.
        Returns the tensors of the checkpoint that changed.
        """
        import torch

        from optkit.algorithms.smoothing import smoothing_scales
        from optkit.model.skeleton_layers import float_weight
        from optkit.model.wiring import fold_

        skeleton, alpha = self.job.skeleton, self.stage.alpha
        readers = {name: skeleton.model.get_submodule(group.places[name]) for name in group.consumers if name in ranges}
        if not readers:
            return {}
        if alpha == "search":
            chosen, found = searched_smoothing(readers, group, ranges, self.stage.activations)
            assert found
            scales = found.scales
        else:
            input_amax = torch.stack([ranges[name].amax for name in readers]).amax(0)
            weight_amax = torch.stack([float_weight(each).abs().amax(0) for each in readers.values()]).amax(0)
            same = None if group.rows is None else group.rows.to(input_amax.device)
            chosen, scales = f"alpha {alpha}", smoothing_scales(input_amax, weight_amax, alpha, same)
        chosen, scales = self.job.together.tell((chosen, scales.cpu()))  # a sum's last bit may decide
        self.job.details["smoothing"][group.producer] = chosen
        if chosen == "none":
            return {}
        changed = fold_(skeleton, group, scales)
        for each in {id(ranges[name]): ranges[name] for name in readers}.values():
            each.divide_(scales.to(each.amax.device))
        return {tensor: self._value(group, tensor) for tensor in changed}

    def _value(self, group: FoldGroup, tensor: str) -> Tensor:
        """Return a changed tensor of the checkpoint, in the dtype that the file has it in."""
        name, _, leaf = tensor.rpartition(".")
        held: Tensor = getattr(self.job.skeleton.model.get_submodule(group.places[name]), leaf)
        return held.detach().to(self.job.skeleton.stored_dtype(tensor)).cpu().clone()
