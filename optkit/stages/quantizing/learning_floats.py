"""`learn: blocks` of `mx`: its tensors as codes that learn, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from optkit.stages.quantizing.job import QuantizationJob
from optkit.stages.quantizing.learning import learned_block

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.blocks import BlockInputs
    from optkit.training.block_learning import BlockLearner
    from optkit.training.fake_quantization import Coded

SCALE_OF_INPUTS = "input_global_scale"


def coded_floats(tensors: Mapping[str, Tensor], rounds_inputs: bool, device: str) -> Coded:
    """Return a layer of the tensors that were packed of it; what all of its blocks share lies on the device."""
    from optkit.algorithms.microscaled_grid import InputRounding, MicroscaledGrid
    from optkit.algorithms.microscaling import unpack
    from optkit.training.fake_quantization import Coded

    shared, of_inputs = (tensors.get(leaf) for leaf in ("weight_global_scale", SCALE_OF_INPUTS))
    grid = MicroscaledGrid.of(None if shared is None else shared.to(device))
    rounding = InputRounding(None if of_inputs is None else of_inputs.to(device)) if rounds_inputs else None
    return Coded(grid.to_codes(unpack(tensors)), grid, rounding)


def packed_floats(_: str, coded: Coded) -> dict[str, Tensor]:
    """Return the tensors that are written of a layer."""
    from optkit.algorithms.microscaled_grid import InputRounding, MicroscaledGrid
    from optkit.algorithms.microscaling import pack

    assert isinstance(coded.grid, MicroscaledGrid)
    tensors = pack(coded.grid.from_codes(coded.weight))
    if isinstance(coded.round_inputs, InputRounding) and coded.round_inputs.global_scale is not None:
        tensors[SCALE_OF_INPUTS] = coded.round_inputs.global_scale.clone()
    return tensors


def learned_floats(
    job: QuantizationJob,
    learner: BlockLearner,
    index: int,
    inputs: BlockInputs,
    layers: Mapping[str, Mapping[str, Tensor]],
    rounds_inputs: bool,
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a block's layers that learned."""
    starts = {name: coded_floats(tensors, rounds_inputs, job.context.device) for name, tensors in layers.items()}
    stay = job.details.get("rounded_to_nearest", {})
    learned = learned_block(job, learner, index, inputs, starts, stay, "auto")
    return {name: packed_floats(name, replace(starts[name], weight=weight)) for name, weight in learned.items()}
