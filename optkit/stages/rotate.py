"""Stage `rotate`: the same model in a rotated basis.
Its weights have no outliers there and quantize better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from optkit.errors import StageError
from optkit.model.calibration_memory import refuse_unchained
from optkit.model.checkpoint import Checkpoint, all_finite
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.output_layer import tied_embedding, with_own_head
from optkit.model.shape import DTYPE_BITS, ModelShape
from optkit.model.task import STREAM, refuse_multi_modal
from optkit.model.unrotated import refuse_unrotated
from optkit.model.writer import SHARD_BYTES, CheckpointWriter, add_blocks, copy_companions
from optkit.stage import Context, Cost, Report, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.algorithms.hadamard import Rotation
    from optkit.model.blocks import BlockInputs
    from optkit.model.skeleton import Skeleton

TOKENS = 32
"""Tokens that run through the model to find its parts and to compare them before and after."""
LM_HEAD = "lm_head.weight"


@dataclass
class _Job:
    """One run: the model, its rotation, and what is found on the way."""

    skeleton: Skeleton
    writer: CheckpointWriter
    rotation: Rotation
    context: Context
    changed: list[str] = field(default_factory=list)
    """Tensors of the checkpoint."""
    unrotated_heads: dict[str, str] = field(default_factory=dict)
    differences: list[float] = field(default_factory=list)


class Rotate(Transform):
    """Rotate the residual stream and the heads of the values by randomized Hadamard matrices.
    After QuaRot, arXiv:2404.00456.

    The model computes what it did. Rotations are folded into the weights, so nothing is left to do
    when it runs; those of SpinQuant (arXiv:2405.16406) that are called R1 and R2, without learning.
    The weights of the norms are folded into the layers that read them, which unties `lm_head` from
    the embedding. The signs are drawn from the recipe's seed. Each block is run before and after.
    """

    finds_parts: ClassVar[bool] = True
    kind: ClassVar[str] = "rotate"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- rotate: {residual: false}\n- gptq: {bits: 3}"
    version: ClassVar[int] = 2

    residual: bool = True
    """Rotate the residual stream (R1). It evens out the activations, for stages that quantize these
    too; for weights alone (GPTQ, 3 bits, groups of 64) it cost SmolLM2-135M more than it gave;
    `heads` alone helped.
    """
    heads: bool = True
    """Rotate the heads of the values against the output projection of the attention (R2). Alone it
    leaves norms and `lm_head` as they are, whatever these are."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.residual or self.heads):
            raise ValueError("nothing is left to rotate: set residual or heads to true")
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Rotate block by block, in float32, from safetensors to safetensors.

        Raises StageError if the architecture does not commute with a rotation or a block
        computes something else afterwards, SourceError for weights that are NaN or Inf.
        """
        import torch

        from optkit.algorithms.hadamard import random_rotation
        from optkit.model.skeleton import Skeleton

        started = time.monotonic()
        checkpoint = Checkpoint(source)
        skeleton = Skeleton(checkpoint, torch.float32, trust_remote_code=context.trust_remote_code)
        if self.residual:
            _refuse_fused(skeleton)
        config = skeleton.model.config.get_text_config(decoder=True)
        rotation = random_rotation(config.hidden_size, context.seed).to(context.device)
        if shared := skeleton.shared_between:
            raise StageError(
                f"{len(shared)} blocks share weights ({shared[0]}, ...)",
                where=self.kind,
                why="Each block is rotated and compared alone, and theirs would be rotated twice",
                remedy="Take rotate out for this architecture",
            )
        untied = self.residual and skeleton.tensor_names.get(LM_HEAD) == skeleton.tensor_name(_embedding(skeleton))
        with (
            context.progress.task("rotate", len(skeleton.blocks) + 2, "parts") as task,
            CheckpointWriter(target) as writer,
            torch.no_grad(),
        ):
            job = _Job(skeleton, writer, rotation, context)
            inputs = skeleton.capture_inputs(_tokens(job), context.device)
            if self.residual:
                _rotate_embedding(job, inputs.hidden)
            task.advance(note="embedding")
            kept = KeptBlocks(
                context.workspace, context.device, context.progress, "rotate", checkpoint.shape.size_bytes
            )
            add_blocks(writer, skeleton, kept.each(self._rotated_blocks(job, inputs, kept), task), task)
            if self.residual:
                _rotate_head(job, inputs.hidden)
            else:
                for name in skeleton.outside_tensors:
                    _write(job, name, None)
            task.advance(note="lm_head")
        if not job.changed:
            why = next(iter(job.unrotated_heads.values()))
            raise StageError(
                "no block has heads that can be rotated",
                where="rotate",
                why=why,
                remedy="Take rotate out of the recipe",
            )
        config = with_own_head(checkpoint.config) if self.residual else checkpoint.config
        copy_companions(source, target, context.trust_remote_code, config)
        lm_head_bytes = checkpoint.tensors[skeleton.tensor_name(LM_HEAD)].size_bytes if untied else 0
        details: dict[str, Any] = {
            "largest_difference": max(job.differences),
            "seconds": round(time.monotonic() - started, 2),
        }
        if self.residual:
            details["residual_rotation"] = (
                "Hadamard" if rotation.is_hadamard else f"Hadamard x random ({len(rotation.small)})"
            )
            details["untied_lm_head_bytes"] = lm_head_bytes
        notes = (
            (f"lm_head is no longer tied to the embedding, which takes {lm_head_bytes:,} bytes more",) if untied else ()
        )
        return Report(changed=len(set(job.changed)), skipped=job.unrotated_heads, details=details, notes=notes)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact tensors that it leaves: a tied model gets an `lm_head` of its own."""
        refuse_unchained(shape, "rotate")
        tensors, config = dict(shape.tensors), shape.config
        if self.residual:
            refuse_multi_modal(config, "rotate.residual", STREAM, "Set rotate.residual to false")
            refuse_unrotated(shape)
        if self.residual and LM_HEAD not in tensors:
            embedding = tied_embedding(shape)
            if not embedding:
                raise StageError(
                    "the model has neither lm_head nor an embedding that was found",
                    where="rotate",
                    remedy="Set residual: false",
                )
            tensors[LM_HEAD] = tensors[embedding]
        config = with_own_head(config) if self.residual else config
        left = ModelShape(config=config, tensors=tensors)
        widest = max(32 // DTYPE_BITS[info.dtype] for info in tensors.values() if info.dtype in ("F32", "BF16", "F16"))
        work = 2 * widest * max(shape.block_bytes, shape.outside_bytes)
        gpu = work if device.startswith("cuda") else 0
        return Cost(disk_bytes=left.size_bytes, ram_bytes=work + min(left.size_bytes, SHARD_BYTES), gpu_bytes=gpu), left

    def _rotated_blocks(self, job: _Job, inputs: BlockInputs, kept: KeptBlocks) -> Iterator[dict[str, Tensor]]:
        """Yield the rotated tensors of each block that is not kept.
        The inputs become those behind it, not rotated.
        """
        blocks, remedy = job.skeleton.blocks, "Use a device with more memory: a block is there twice, in float32"
        facts = {"changed": job.changed, "unrotated": job.unrotated_heads, "differences": job.differences}
        for index in kept.resume(len(blocks), inputs, facts, last_is_read=self.residual):
            with job.skeleton.loaded(blocks[index], job.context.device, remedy):
                rotated = self._rotate_block(job, index, inputs)
            job.changed.extend(rotated)
            yield rotated
            del rotated  # before the next block's is made

    def _rotate_block(self, job: _Job, index: int, inputs: BlockInputs) -> dict[str, Tensor]:
        import torch

        from optkit.algorithms.hadamard import random_rotation
        from optkit.model.residual_rotation import (
            find_heads,
            fold_norms_,
            refuse_difference,
            rotate_heads_,
            rotate_stream_,
        )
        from optkit.model.residual_stream import stream_parts

        skeleton, block, hidden = job.skeleton, job.skeleton.blocks[index], inputs.hidden
        run = partial(skeleton.run_block, index, call=inputs.batches[0].calls[index])
        output: Tensor = run(hidden=hidden)
        modules = dict(block.module.named_modules(prefix=block.name))
        changed: set[str] = set()
        basis = job.rotation.apply if self.residual else torch.clone

        def compare(remedy: str = "") -> None:
            given, expected = run(hidden=basis(hidden)), basis(output)
            difference = refuse_difference(block.name, expected, given, basis(output - hidden), remedy)
            job.differences.append(difference)

        if self.residual:
            parts = stream_parts(modules, job.rotation.size, lambda: run(hidden=hidden), block.name)
            changed |= {*fold_norms_(parts), *rotate_stream_(parts, job.rotation)}
            compare()
        if self.heads:
            heads = find_heads(block.module, skeleton.model.config.get_text_config(decoder=True), index)
            if isinstance(heads, str):
                job.unrotated_heads[block.name] = f"the heads stay as they are: {heads}"
            else:
                rotate_heads_(heads, random_rotation(heads.size, job.context.seed + 1 + index).to(job.context.device))
                touched = {heads.values, heads.outputs}
                changed |= {f"{name}.weight" for name, module in modules.items() if module in touched}
                changed |= {
                    f"{name}.bias"
                    for name, module in modules.items()
                    if module is heads.values and heads.values.bias is not None
                }
                compare("Set rotate.heads to false")
        names = {skeleton.tensor_name(name): name for name in changed}
        parameters = dict(block.module.named_parameters(prefix=block.name))
        inputs.hidden = output
        own = (tensor for tensor in skeleton.block_tensors(block) if tensor in names)
        return {tensor: _stored(job, tensor, parameters[names[tensor]]) for tensor in own}


def _tokens(job: _Job) -> Tensor:
    """Return int64 [1, tokens], drawn from the vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(job.context.seed)
    vocabulary = job.skeleton.model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (1, TOKENS), generator=generator)


def _rotate_embedding(job: _Job, hidden: Tensor) -> None:
    """Write the embedding rotated.
    Before that it is seen that what enters the first block is its rows, up to a factor.
    """
    import torch

    skeleton = job.skeleton
    tensor = skeleton.tensor_name(_embedding(skeleton))
    stored = skeleton.checkpoint.read_finite(tensor)
    rows = stored[_tokens(job)].float().to(job.context.device)
    plain = rows.shape == hidden.shape
    if plain:
        scale = float((hidden * rows).sum() / rows.pow(2).sum())
        plain = torch.allclose(hidden, scale * rows, rtol=1e-3, atol=1e-5)
    if not plain:
        raise StageError(
            "what enters the first block is not the embedding of the tokens, up to a factor",
            where=f"rotate: {tensor}",
            why="Positions or norms in front of the blocks do not commute with a rotation",
            remedy="Set rotate.residual to false",
        )
    _write(job, tensor, job.rotation.apply(stored.to(job.context.device)))


def _rotate_head(job: _Job, hidden: Tensor) -> None:
    """Write the last norm folded into lm_head, and lm_head rotated.
    Everything else outside the blocks is written as it is.
    """
    from optkit.model.head import logits_behind
    from optkit.model.residual_rotation import fold_norms_, refuse_difference, rotate_stream_
    from optkit.model.residual_stream import stream_parts

    skeleton, embedding = job.skeleton, _embedding(job.skeleton)
    inside = f"{skeleton.blocks[0].name.rpartition('.')[0]}."
    modules = {name: module for name, module in skeleton.model.named_modules() if not f"{name}.".startswith(inside)}
    run = partial(logits_behind, skeleton.model, skeleton.blocks)
    skeleton.load_outside_(job.context.device)
    logits = run(hidden)
    parts = stream_parts(modules, job.rotation.size, lambda: run(hidden), "lm_head")
    changed = [*fold_norms_(parts), *rotate_stream_(parts, job.rotation)]
    job.differences.append(refuse_difference("lm_head", logits, run(job.rotation.apply(hidden)), logits))
    written = {skeleton.tensor_name(embedding)}
    parameters = dict(skeleton.model.named_parameters(remove_duplicate=False))
    for name in dict.fromkeys(changed):
        tensor = LM_HEAD if name == LM_HEAD else skeleton.tensor_name(name)
        _write(job, tensor, parameters[name], like=skeleton.tensor_name(name))
        written.add(tensor)
    for tensor in skeleton.outside_tensors:
        if tensor not in written:
            _write(job, tensor, None)
    skeleton.release_outside_()


def _write(job: _Job, tensor: str, rotated: Tensor | None, like: str | None = None) -> None:
    """Write a tensor of the checkpoint: what it became, or as it is.
    It has the dtype that it (or `like`) is stored in.
    """
    if rotated is None:
        job.writer.add(tensor, job.skeleton.checkpoint.read_finite(tensor))
    else:
        job.writer.add(tensor, _stored(job, tensor, rotated, like))
        job.changed.append(tensor)


def _stored(job: _Job, tensor: str, rotated: Tensor, like: str | None = None) -> Tensor:
    """Return a rotated tensor as it is written. Raises StageError if its dtype has no room for it."""
    stored = job.skeleton.stored_dtype(like or tensor)
    cast = rotated.detach().to("cpu", stored, copy=True)
    if not all_finite(cast):
        raise StageError(
            f"rotated weights of up to {float(rotated.abs().max()):,.0f} do not fit "
            f"{str(stored).removeprefix('torch.')}",
            where=f"rotate: {tensor}",
            remedy="Put `- cast: {dtype: bfloat16}` in front of this stage",
        )
    return cast


def _embedding(skeleton: Skeleton) -> str:
    """Return the name of the parameter that tokens are looked up in."""
    table = skeleton.model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in skeleton.model.named_modules() if module is table)


def _refuse_fused(skeleton: Skeleton) -> None:
    """Raise StageError for weights that would stay in the old basis.
    They are fused experts, and parts that the language model does not read.
    """
    for name, reason in skeleton.fused.items():
        raise StageError("the experts cannot be rotated", where=f"rotate: {name}", why=reason)
    read = set(skeleton.tensor_names.values())
    unread = [name for name, info in skeleton.checkpoint.tensors.items() if name not in read and len(info.shape) > 1]
    if unread:
        raise StageError(
            f"{len(unread):,} matrices belong to no part of the language model ({', '.join(unread[:3])})",
            where="rotate",
            why="They may read the residual stream or write to it, and would be left in the old basis",
            remedy="Set rotate.residual to false, or use a checkpoint of the language model alone",
        )
