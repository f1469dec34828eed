"""Stage `prune_structured`: a smaller model of the same architecture.
Engines of the larger one open it (but see `notes_on_heads`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from optkit.common.field_types import Amount, BatchSize, Distinct
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.attention_choice import eager_bytes
from optkit.model.calibration_memory import float_bytes, less_memory, refuse_unchained, waiting_in_main_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.depth import (
    block_count,
    dropped_parts,
    hidden_size,
    losable,
    refuse_without_attention,
    shallower_config,
    shallower_tensors,
)
from optkit.model.fewer_experts import with_fewer_experts
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.memory import return_freed_memory
from optkit.model.shape import ModelShape
from optkit.model.text_config import text_config
from optkit.model.vllm_heads import notes_on_heads
from optkit.model.width import Role, axes_of, changing, narrower_config, narrower_tensors
from optkit.model.writer import SHARD_BYTES, CheckpointWriter, copy_companions
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Report, Transform
from optkit.stages.narrowing.fields import KIND, WidthFields
from optkit.stages.narrowing.told import Planned, note, sizes, widths_told

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.blocks import BlockInputs
    from optkit.model.skeleton import Skeleton
    from optkit.stages.narrowing.blocks import NarrowerBlocks
    from optkit.stages.narrowing.importance import Chosen

POSITIONS_AT_ONCE = 256
"""Positions whose logits are held together if perplexity says what matters."""
MOST_BLOCKS = 100_000
"""No model has more."""
LESS_MEMORY = less_memory(KIND)


class PruneStructured(WidthFields, Transform):
    """Remove the parts of the model that matter least on a text: blocks, heads, channels.
    A smaller plain checkpoint is left.

    Whole decoder blocks, channels of the feed-forward layers, heads of the attention, heads of keys
    and values, channels of the hidden states, experts. Nothing is retrained, so a stage that distills
    belongs behind this one. What was written is opened anew and compared, block by block, with the
    parts that it was made of.
    """

    finds_parts: ClassVar[bool] = True
    kind: ClassVar[str] = "prune_structured"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- prune_structured: {remove_layers: 0.2, calibration: {dataset: c4}}"
    version: ClassVar[int] = 4

    remove_layers: float | int | Distinct[Amount] | None = None
    """Decoder blocks to remove: how many, a fraction of all below 1, or a list of their indices,
    which count from 0.
    """
    layer_importance: Literal["block_influence", "perplexity"] = "block_influence"
    """`block_influence`: 1 - cos between the hidden states in front of a block and behind it
    (ShortGPT, arXiv:2403.03853), one pass over the text. `perplexity`: of the model without the
    block (Minitron, arXiv:2407.14679), half as many passes as there are blocks."""
    layer_search: Literal["at_once", "one_by_one", "contiguous"] = "at_once"
    """`at_once`: the lowest of one scoring. `one_by_one`: the lowest goes, then the others are
    scored anew without it. `contiguous`: the run of neighbouring blocks that does least."""
    calibration: Calibration = Calibration(dataset="c4", samples=32)
    """The text on which it is measured what matters."""
    batch_size: BatchSize = 8
    """Sequences that run through a block at once."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.remove_layers is None and not self.narrows and self.experts is None:
            raise ValueError(
                "nothing is asked: set remove_layers, intermediate_size, attention_heads, kv_heads, hidden_size or "
                "experts"
            )
        if self.experts is not None and (self.narrows or self.remove_layers is not None):
            raise ValueError("experts go by themselves: remove other parts in a prune_structured of its own behind it")
        if self.experts is not None and (unread := self.set_among("compensate", "multiple_of")):
            raise ValueError(f"{' and '.join(unread)} would not be read: whole experts go, and no other changes")
        if self.merge and self.experts is None:
            raise ValueError("merge says what becomes of experts: set experts too")
        if self.remove_layers is None and self.set_among("layer_importance", "layer_search"):
            raise ValueError("layer_importance and layer_search choose blocks to remove: set remove_layers too")
        if self.kv_method and self.kv_heads is None:
            raise ValueError("kv_method says how kv_heads are made: set kv_heads too")
        return self

    @model_validator(mode="after")
    def _layers(self) -> Self:
        removed = self.remove_layers
        if isinstance(removed, tuple):
            if not removed:
                raise ValueError("remove_layers: the list is empty. Name at least one block, or leave the field out")
            if self.set_among("layer_importance", "layer_search"):
                raise ValueError(
                    "layer_importance and layer_search choose blocks, and remove_layers names them: give one of the two"
                )
        elif isinstance(removed, float) and not 0 < removed < 1:
            raise ValueError(
                f"remove_layers: {removed:g} is no fraction between 0 and 1. Write a whole number to say how many"
            )
        elif isinstance(removed, int) and not 1 <= removed <= MOST_BLOCKS:
            raise ValueError(
                f"remove_layers: {removed} is {'less than 1' if removed < 1 else f'more than {MOST_BLOCKS:,}'}"
            )
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Measure what matters, write what is left, and compare it with what it was made of.

        Raises StageError for parts that the model does not have or cannot lose, SourceError for
        weights that are NaN or Inf and texts that are too short, ResourceError when memory or disk
        runs out.
        """
        from optkit.model.skeleton import Skeleton
        from optkit.stages.narrowing.experts import remove_experts
        from optkit.stages.narrowing.proof import prove, refuse_shared

        if self.experts is not None:
            return remove_experts(
                source, target, context, self.calibration, self.batch_size, self.experts_left, LESS_MEMORY, self.merge
            )
        started = time.monotonic()
        checkpoint = Checkpoint(source)
        planned = self._planned(checkpoint.shape)
        skeleton = Skeleton(checkpoint, trust_remote_code=context.trust_remote_code)
        reads = self._reads_text(planned)
        tokens = self.calibration.tokens(source, context.data, context.trust_remote_code) if reads else None
        saved = KeptBlocks(context.workspace, context.device, context.progress, KIND, checkpoint.shape.size_bytes)
        chosen = self._choose(skeleton, planned.count, tokens, context, saved)
        return_freed_memory()
        kept = [index for index in range(len(skeleton.blocks)) if index not in chosen.removed]
        names = shallower_tensors(checkpoint.shape, kept, planned.narrows)
        refuse_shared(skeleton, chosen.removed)
        resolved = skeleton.model.config.get_text_config(decoder=True).to_dict()
        config = shallower_config(checkpoint.config, kept, resolved)
        blocks = self._narrower(skeleton, planned, kept, names, tokens, context, saved) if planned.narrows else None
        with context.progress.task(KIND, len(kept), "blocks") as task, CheckpointWriter(target) as writer:
            if blocks:
                blocks.write(kept, writer, task, saved)
            else:
                for name, new in names.items():
                    writer.add(new, checkpoint.read_finite(name))
        left = narrower_config(config, planned.before, planned.after) if planned.narrows else config
        copy_companions(source, target, context.trust_remote_code, left)
        proof = prove(checkpoint, target, kept, context, *((blocks.masked_, blocks.hidden) if blocks else ()))
        before, after = sizes(checkpoint.shape), sizes(Checkpoint(target).shape)
        details: dict[str, Any] = {"before": before, "after": after, "largest_difference": proof}
        details |= self._told(chosen, [block.name for block in skeleton.blocks])
        details |= widths_told(planned, blocks) if blocks else {}
        details["seconds"] = round(time.monotonic() - started, 2)
        return Report(
            changed=len(chosen.removed) + (len(kept) if blocks else 0),
            details=details,
            notes=(note(before, after), *notes_on_heads(Checkpoint(target).config)),
            calibrated_on=() if tokens is None else (self.calibration.identity(),),
            dropped=dropped_parts(checkpoint.shape, kept, planned.narrows),
        )

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact size that it leaves, as if the last blocks went: a run alone knows which go."""
        refuse_unchained(shape, KIND)
        planned, blocks = self._planned(shape), block_count(shape.config)
        last = losable(reversed(range(blocks)), planned.count, partial(refuse_without_attention, shape.config))
        named = self.remove_layers if isinstance(self.remove_layers, tuple) else last
        kept = [index for index in range(blocks) if index not in named]
        tensors = {new: shape.tensors[name] for name, new in shallower_tensors(shape, kept, planned.narrows).items()}
        left = ModelShape(config=shallower_config(shape.config, kept), tensors=tensors)
        if planned.narrows:
            narrower = narrower_tensors(left, planned.before, planned.after)
            left = ModelShape(config=narrower_config(left.config, planned.before, planned.after), tensors=narrower)
        if self.experts is not None:
            left = with_fewer_experts(shape, self.experts_left)
        streams, states, beside = self._measuring_bytes(shape, planned)
        moved = streams * waiting_in_main_memory(states, device)
        work = max(streams * states - moved + beside, 4 * max(shape.block_bytes, shape.outside_bytes))
        ram, notes = moved + min(left.size_bytes, SHARD_BYTES), notes_on_heads(left.config)
        if device.startswith("cuda"):
            return Cost(disk_bytes=left.size_bytes, ram_bytes=ram, gpu_bytes=work, notes=notes), left
        return Cost(disk_bytes=left.size_bytes, ram_bytes=ram + work, notes=notes), left

    def _planned(self, shape: ModelShape) -> Planned:
        """Return what goes; raises StageError for what the model does not have or cannot lose."""
        count = 0 if self.remove_layers is None else self._count(shape)
        return Planned(count, *self.widths(shape))

    def _reads_text(self, planned: Planned) -> bool:
        narrows = planned.narrows and (
            not self.pools(planned.before) or changing(planned.before, planned.after) != {Role.KEY}
        )
        if narrows or self.experts is not None:
            return True
        return planned.count > 0 and not isinstance(self.remove_layers, tuple)

    def _narrower(
        self,
        skeleton: Skeleton,
        planned: Planned,
        kept: Sequence[int],
        names: Mapping[str, str],
        tokens: Tensor | None,
        context: Context,
        saved: KeptBlocks,
    ) -> NarrowerBlocks:
        """Return the blocks to be written, with the channels of the hidden states chosen."""
        import torch

        from optkit.stages.narrowing.blocks import NarrowerBlocks
        from optkit.stages.narrowing.choice import WidthChooser

        def inputs() -> BlockInputs | None:
            return None if tokens is None else skeleton.capture_inputs(tokens, context.device, self.batch_size)

        with out_of_memory(KIND, context.device, LESS_MEMORY):
            before, after = planned.before, planned.after
            axes = axes_of(skeleton.checkpoint.shape, before)
            chooser = WidthChooser(skeleton, inputs(), axes, before, after, self.pools(before))
            hidden = None
            if before.hidden != after.hidden:
                channels = saved.measured("hidden", lambda: chooser.hidden(kept, context.device).tolist())
                hidden = torch.tensor(channels)
                chooser.inputs = inputs()
        return NarrowerBlocks(chooser, names, context.device, self.compensate, LESS_MEMORY, hidden)

    def _count(self, shape: ModelShape) -> int:
        """Return how many blocks go.
        Raises StageError if the model has not so many or is left without one.
        """
        blocks, asked = block_count(shape.config), self.remove_layers
        where = f"{KIND}.remove_layers"
        if isinstance(asked, tuple):
            if beyond := [index for index in asked if index >= blocks]:
                raise StageError(
                    f"{', '.join(str(index) for index in beyond)}: no such block",
                    where=where,
                    why=f"The model has {blocks}, counted from 0 to {blocks - 1}",
                )
            count = len(asked)
        else:
            count = round(asked * blocks) if isinstance(asked, float) else asked or 0
        if count == 0:
            raise StageError(
                f"{asked:g} of {blocks} blocks is none",
                where=where,
                remedy=f"Take at least {1 / blocks:.3g}, or a whole number",
            )
        if count >= blocks:
            raise StageError(
                f"{count} of {blocks} blocks would leave none", where=where, remedy=f"Remove at most {blocks - 1}"
            )
        return count

    def _choose(
        self, skeleton: Skeleton, count: int, tokens: Tensor | None, context: Context, saved: KeptBlocks
    ) -> Chosen:
        from optkit.stages.narrowing.importance import BlockImportance, Chosen
        from optkit.stages.narrowing.proof import refuse_shared

        if tokens is None or count == 0 or isinstance(self.remove_layers, tuple):
            return Chosen(sorted(self.remove_layers) if isinstance(self.remove_layers, tuple) else [], [])
        with out_of_memory(KIND, context.device, LESS_MEMORY):
            importance = BlockImportance(
                skeleton, tokens, context.device, self.batch_size, POSITIONS_AT_ONCE, context.progress
            )
            resolved = skeleton.model.config.get_text_config(decoder=True).to_dict()

            def refuse(removed: Sequence[int]) -> None:
                refuse_shared(skeleton, removed)
                refuse_without_attention(resolved, removed)

            how = self.layer_importance, self.layer_search, refuse
            return Chosen(**saved.measured("chosen", lambda: asdict(importance.choose(count, *how))))

    def _told(self, chosen: Chosen, blocks: Sequence[str]) -> dict[str, Any]:
        told: dict[str, Any] = {"removed_layers": chosen.removed} if chosen.removed else {}
        if chosen.scores and self.layer_search == "contiguous":
            ends = blocks[len(chosen.removed) - 1 :]
            told["run_scores"] = {
                f"{first} - {last}": score for first, last, score in zip(blocks, ends, chosen.scores, strict=False)
            }
        elif chosen.scores:
            told["layer_scores"] = dict(zip(blocks, chosen.scores, strict=True))
        if chosen.perplexity is not None:
            told["calibration_perplexity"] = chosen.perplexity
        return told | ({"rounds": chosen.rounds} if chosen.rounds else {})

    def _measuring_bytes(self, shape: ModelShape, planned: Planned) -> tuple[int, int, int]:
        """Return how many models' hidden states are held, the bytes of one's, and of what is beside them:
        the largest part, and a batch in a block, Hessians or logits.
        """
        if not self._reads_text(planned):
            return 0, 0, 0
        width, blocks = hidden_size(shape.config), block_count(shape.config)
        tokens = self.calibration.samples * self.calibration.sequence_length
        streams = 1
        if planned.count and not isinstance(self.remove_layers, tuple):
            run = planned.count if self.layer_search == "contiguous" else 1
            streams += run if self.layer_importance == "block_influence" else blocks + 1 - run
        element = float_bytes(shape)
        widest = max(max(info.shape) for name, info in shape.tensors.items() if info.shape and shape.block(name))
        batch = self.batch_size * self.calibration.sequence_length * (6 * width + 3 * widest) * 4
        batch += eager_bytes(shape.config, self.batch_size, self.calibration.sequence_length)
        narrower = planned.narrows and planned.before.ffn != planned.after.ffn
        solving = (4 + 4 + 3 * 8) * planned.before.ffn**2 if narrower else 0
        logits = self._logit_bytes(shape, element) if planned.count and self.layer_importance == "perplexity" else 0
        beside = max(batch, solving, logits) + max(shape.block_bytes, shape.outside_bytes)
        return streams, tokens * width * element, beside

    def _logit_bytes(self, shape: ModelShape, element: int) -> int:
        """Return the bytes of logits as they come, and their logarithms of softmax.
        If the logits have another dtype, their float32 form counts too.
        """
        vocabulary = text_config(shape.config).get("vocab_size") or 0
        positions = min(POSITIONS_AT_ONCE, self.calibration.sequence_length)
        return positions * vocabulary * (8 if element == 4 else element + 8)
