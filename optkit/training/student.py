"""A checkpoint as a float32 model that can be trained, and the way back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from optkit.errors import StageError
from optkit.model.blocks import find_blocks
from optkit.model.checkpoint import Checkpoint, all_finite
from optkit.model.skeleton import Skeleton
from optkit.model.writer import CheckpointWriter, copy_companions

SPARSE = 0.25
"""Share of zeros from which a weight counts as pruned."""


@dataclass(frozen=True)
class Student:
    """A model to be trained, and which tensor of its checkpoint holds which of its parameters."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    tensor_names: Mapping[str, str]
    """Parameter or buffer of the model -> tensor of the checkpoint; tied parameters have the same."""


def open_student(directory: Path, device: str, trust_remote_code: bool = False) -> Student:
    """Open a checkpoint on the device with float32 weights that all want a gradient.
    It has no dropout, and its experts are unfused.

    Raises SourceError for a quantized checkpoint, NaN, Inf, and weights that do not fit the model.
    """
    skeleton = Skeleton(Checkpoint(directory), torch.float32, trust_remote_code=trust_remote_code)
    skeleton.load_("", device)
    _tie_(skeleton.model)
    skeleton.model.requires_grad_(True)
    return Student(skeleton.model, skeleton.checkpoint, skeleton.tensor_names)


def _tie_(model: PreTrainedModel) -> None:
    """Let lm_head be the embedding if config.json says so and the checkpoint holds both, alike:
    transformers opens them as one then.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    whole = getattr(model.config, "tie_word_embeddings", False)
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", whole) or not isinstance(
        head, nn.Linear
    ):
        return
    if isinstance(embedding, nn.Embedding) and torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight


def write_student(student: Student, target: Path, trusted: bool = False) -> int:
    """Write a student as a checkpoint with the dtypes of the one that it was.
    Returns how many tensors are others now.

    Raises StageError if a weight does not fit its dtype, ResourceError on a full disk.
    """
    trained: dict[str, Tensor] = {}
    for name, tensor in student.model.state_dict(keep_vars=True).items():
        if name in student.tensor_names:
            trained.setdefault(student.tensor_names[name], tensor.detach())
    changed, places = 0, set[int]()
    with CheckpointWriter(target) as writer:
        for name in student.checkpoint.tensors:
            before = student.checkpoint.read(name)
            after = cast_back(name, trained[name], before) if name in trained else before
            changed += not torch.equal(before, after)
            writer.add(name, after.clone() if after is before or after.data_ptr() in places else after)
            places.add(after.data_ptr())
    copy_companions(student.checkpoint.directory, target, trusted, student.checkpoint.config)
    return changed


def cast_back(name: str, tensor: Tensor, before: Tensor) -> Tensor:
    """Return a trained tensor on the CPU in its former dtype; StageError if it is not finite there."""
    cast = tensor.to("cpu", before.dtype)
    if cast.is_floating_point() and not all_finite(cast):
        raise StageError(
            f"trained weights of up to {float(tensor.abs().max()):.4g} do not fit "
            f"{str(before.dtype).removeprefix('torch.')}",
            where=name,
            remedy="Lower the learning rate, or put `- cast: {dtype: bfloat16}` in front of the stage",
        )
    return cast


@dataclass(frozen=True)
class ZerosStay:
    """A hook on the gradient of a weight."""

    weight: nn.Parameter

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the gradient, 0 for weights of 0."""
        return gradient.masked_fill(self.weight.detach() == 0, 0)


def keep_zeros_(model: nn.Module, share: float = SPARSE) -> list[str]:
    """Let zeros stay zeros in trainable matrices of which at least `share` is zero, as pruning leaves it.
    They get no gradient, so AdamW never moves them. Returns the weights' names.
    """
    names = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() >= 2 and float((parameter == 0).float().mean()) >= share:
            parameter.register_hook(ZerosStay(parameter))
            names.append(name)
    return names


def compile_blocks_(model: PreTrainedModel) -> None:
    """torch.compile each block; all of one form share the compilation of one of them."""
    for block in find_blocks(model):
        block.module.compile()


def checkpoint_activations_(model: PreTrainedModel) -> None:
    """Let the blocks compute their activations again on the way back; dropout stays off."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    modules = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_evaluated, layer, layer._gradient_checkpointing_func)
    for module in layers or modules:
        module.training = True


def _evaluated(layer: nn.Module, checkpoint: Callable[..., Any], compute: Callable[..., Any], *inputs: Any) -> Any:
    """Run a layer that has to be in training mode to be computed again. It drops nothing inside."""

    def evaluate(*given: Any) -> Any:
        layer.training = False
        try:
            return compute(*given)
        finally:
            layer.training = True

    return checkpoint(evaluate, *inputs)
