"""What surrounds the training of `learn: blocks`: which layers learn, and the memory that it takes.
Finished blocks wait unpacked until their scales have learned too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from optkit.common.out_of_resources import out_of_memory
from optkit.model.calibration_memory import Text, Work, calibration_bytes, float_bytes, hessian_bytes
from optkit.model.linear_layers import EXPERTS, Layer, by_block
from optkit.model.shape import ModelShape
from optkit.model.text_config import text_config
from optkit.stages.quantizing.integers import packed_grid
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.pruned_zeros import count_zeros, held_zeros
from optkit.training.predicted_memory import LOGIT_BYTES, vocabulary_of

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.algorithms.grid import QuantizedWeight
    from optkit.model.blocks import BlockInputs
    from optkit.training.block_learning import BlockLearner
    from optkit.training.fake_quantization import Coded

LEARNING_BYTES = 38
"""Of a weight of a block that learns: in float32 the weight itself, what it was, its mean over steps,
its rounded form, two gradients, two moments of AdamW, and what the gradient of its scale needs.
"""
SCALING_BYTES = 14
"""Of a weight of a block whose scales learn: in float32 its steps, the weight and its gradient, in 16
bits what is multiplied with.
"""
SCALE_BYTES = 20
"""Of a scale: in float32 itself, its growth, its gradient and two moments."""
LEARNING_BATCHES = 4
"""Activations that lie between the forward and the backward pass, in those of a forward pass alone; in
16 bits they take half of it.
"""
DRAWN_LOGITS = 4
"""Float32 tensors of logits that are held while tokens of copies are drawn."""
LEAVES = ("codes", "scales", "zeros")


def block_learner(job: QuantizationJob, inputs: BlockInputs, steps: int) -> BlockLearner:
    """Return what teaches the blocks behind `inputs`."""
    from optkit.training.block_learning import BlockLearner

    job.details["block_losses"] = {}
    return BlockLearner(job.skeleton, inputs, steps, job.context.seed, partial(job.task.advance, 0))


def with_copies(job: QuantizationJob, text: Any, copies: int, batch_size: int, less_memory: str) -> Any:
    """Return a text with `redrawn` copies behind it; prompts with images as they are."""
    import torch

    from optkit.training.redrawn_text import redrawn

    if not isinstance(text, torch.Tensor):
        return text
    context = job.context

    def made() -> list[list[int]]:
        with (
            context.progress.task("copies of the text", len(job.skeleton.blocks), "blocks") as task,
            out_of_memory("the copies of the text", context.device, less_memory),
        ):
            how = context.device, batch_size, context.seed, less_memory
            found = redrawn(job.skeleton, text, copies, *how, task.advance)
        return found.tolist()  # type: ignore[no-any-return]

    return torch.cat([text, torch.tensor(job.kept.measured("copies", made))])


def learned_block(
    job: QuantizationJob,
    learner: BlockLearner,
    index: int,
    inputs: BlockInputs,
    quantized: Mapping[str, Coded],
    stay: Collection[str],
    keep_zeros: bool | Literal["auto"],
) -> dict[str, QuantizedWeight]:
    """Return the learned codes of a block; those of layers that `stay` are left out."""
    starts = {name: coded for name, coded in quantized.items() if name not in stay}
    held = [name for name in starts if held_zeros([learner.weights[name]], keep_zeros) is not None]
    learned, losses = learner.learn_(index, inputs, job.modules(index), starts, held)
    job.details["block_losses"][job.skeleton.blocks[index].name] = list(losses)
    for name, weight in {**{name: coded.weight for name, coded in quantized.items()}, **learned}.items():
        count_zeros(job, learner.weights[name], weight.dequantize())
    return learned


def coded_integers(job: QuantizationJob, name: str, weight: QuantizedWeight) -> Coded:
    """Return a layer of integer codes."""
    from optkit.training.fake_quantization import Coded

    return Coded(weight, packed_grid(job, name))


def unpacked(quantized: Mapping[str, QuantizedWeight]) -> BlockOutput:
    """Return a block whose layers are not packed yet."""
    return BlockOutput({name: {leaf: getattr(each, leaf) for leaf in LEAVES} for name, each in quantized.items()})


def with_learned_scales(
    job: QuantizationJob,
    outputs: Iterable[BlockOutput],
    batch_size: int,
    steps: int,
    coded: Callable[[str, Mapping[str, Tensor]], Coded],
    packed: Callable[[str, Coded], Mapping[str, Tensor]],
    less_memory: str,
    fixed: Callable[[str], bool] = lambda _: False,
) -> Iterator[BlockOutput]:
    """Yield all blocks packed, once their scales have learned through the whole model.
    `coded` makes a layer of the tensors that were made of it, and `packed` the tensors that are written of it;
    scales of `fixed` layers stay. Raises ResourceError without memory.
    """
    from optkit.training.scale_learning import ScaleLearner

    blocks, device = list(outputs), job.context.device
    with (
        out_of_memory("behind the last block", device, less_memory),
        ScaleLearner(job.skeleton, job.skeleton.capture_inputs(job.text, device, batch_size)) as learner,
        job.context.progress.task("scales", steps, "steps") as task,
    ):
        while blocks:
            layers = blocks.pop(0).layers
            learner.put({name: coded(name, tensors) for name, tensors in layers.items()}, fixed)
        job.details["divergence"] = list(learner.learn_(steps, job.context.seed, task.advance))
    for block in learner.layers:
        yield BlockOutput({name: packed(name, layer.learned()) for name, layer in block.items()})


def with_unmodified(work: Work, shape: ModelShape, layers: Mapping[str, Layer], text: Text, batch: int) -> Work:
    """Return what it takes if layers make up for earlier errors too, of what it takes without.
    The unmodified model's hidden states, what both models' attention and its feed-forward layers add to
    them, a block's float weights, and two sums as large as the Hessians, but experts', are kept.
    """
    moved = {name: layer for name, layer in layers.items() if EXPERTS not in name}
    hidden, _ = calibration_bytes(shape, layers, text, batch)
    largest = max(layer.outputs * layer.inputs for layer in layers.values())
    kept = 4 * hidden + shape.block_bytes + 2 * hessian_bytes(shape, moved, at_once=True) + 4 * 3 * largest
    return replace(work, block=work.block + kept, streams=2)


def with_learning(
    work: Work,
    shape: ModelShape,
    layers: Mapping[str, Layer],
    text: Text,
    batch: int,
    copies: int,
    scales: int,
    device: str,
) -> Work:
    """Return what it takes if blocks learn too, of what it takes without; `scales`: how many learn behind the
    last block. `text` has the copies.
    """
    hidden, running = calibration_bytes(shape, layers, text, batch)
    counts = [sum(layers[name].outputs * layers[name].inputs for name in block) for block in by_block(shape, layers)]
    running = running * LEARNING_BATCHES * min(4, float_bytes(shape)) // 4
    block = shape.block_bytes + LEARNING_BYTES * max(counts) + running
    samples, length = text.size
    states = hidden * min(batch, samples) // samples * ((shape.block_count or 0) + 1)
    positions = 4 * min(batch, samples) * length * vocabulary_of(shape)
    logits = min(LOGIT_BYTES[device.partition(":")[0]], positions)
    drawing = shape.outside_bytes + DRAWN_LOGITS * logits if copies else 0
    through = shape.block_bytes + SCALING_BYTES * max(counts) + SCALE_BYTES * scales + states + running
    scaling = shape.outside_bytes + logit_tensors(shape.config) * logits + through if scales else 0
    held = sum(counts) if scales else 0
    learning = hidden + max(block, drawing, scaling)
    return replace(work, block=hidden + max(work.block, learning), streams=2, held=held)


def logit_tensors(config: Mapping[str, Any]) -> int:
    """Return how many float32 tensors of logits are held at once: those of both models, and what the divergence
    makes of them. Their gradient takes the place of a part of it; a cap's tanh stays for it (Gemma 2).
    """
    return 7 if text_config(config).get("final_logit_softcapping") else 6
