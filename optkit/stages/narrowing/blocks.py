"""Write a narrower model block by block, each fitted to the outputs of those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint, all_finite
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.narrowing import Left, is_norm
from optkit.model.skeleton import Skeleton
from optkit.model.width import Axis
from optkit.model.writer import CheckpointWriter
from optkit.progress import Task
from optkit.stages.narrowing.choice import WidthChooser


@dataclass
class NarrowerBlocks:
    """A model whose blocks become narrower, one in memory at a time."""

    chooser: WidthChooser
    names: Mapping[str, str]
    """Tensor -> its name in what is written; those that are not here are left out."""
    device: str
    compensate: bool
    less_memory: str
    """What to lower if memory runs out."""
    hidden: Tensor | None = None
    """int64: channels of the hidden states that are left; None if they all are."""
    choices: list[dict[str, Any]] = field(default_factory=list)
    """What is left of each block that was written, as JSON values."""

    @property
    def skeleton(self) -> Skeleton:
        return self.chooser.skeleton

    @property
    def lefts(self) -> list[Left]:
        """What is left of each block that was written."""
        return [self._left(**choice) for choice in self.choices]

    def _left(self, ffn: list[int] | None, heads: list[int] | None, pools: list[list[int]] | None) -> Left:
        return Left(
            self.chooser.before,
            self.chooser.after,
            self.hidden,
            None if ffn is None else torch.tensor(ffn),
            None if heads is None else tuple(heads),
            None if pools is None else tuple(map(tuple, pools)),
        )

    def write(self, kept: Sequence[int], writer: CheckpointWriter, task: Task, finished: KeptBlocks) -> None:
        """Write these of the blocks and everything outside; those that are finished are not made again.
        Raises StageError for weights that no longer fit their dtype.
        """
        outside = Left(self.chooser.before, self.chooser.after, self.hidden)
        for tensor in filter(self.names.__contains__, self.skeleton.outside_tensors):
            writer.add(self.names[tensor], self._left_of(tensor, self.skeleton.checkpoint.read_finite(tensor), outside))
        if self.hidden is not None and self.chooser.inputs:
            self.chooser.inputs.hidden = only(self.chooser.inputs.hidden, self.hidden)
        for index, tensors in zip(kept, finished.each(self._narrowed(kept, finished), task), strict=True):
            for name, narrowed in tensors.items():
                writer.add(name, narrowed)
            task.advance(note=self.skeleton.blocks[index].name)

    def masked_(self, skeleton: Skeleton, target: Checkpoint, index: int, number: int) -> None:
        """Put what was written of a block into the loaded block of another skeleton of the source.
        0 takes the place of what was removed.
        """
        left = self._left(**self.choices[number])
        self._put_(skeleton, index, left, target.read, norms=True)

    def _put_(
        self, skeleton: Skeleton, index: int, left: Left, read: Callable[[str], Tensor], norms: bool = False
    ) -> None:
        """Put what is left of a block's tensors into its parameters, 0 in the place of what was removed.
        Without `norms` these stay as they are: only the rounding of what is left of them differs.
        """
        prefix = f"{skeleton.blocks[index].name}."
        for name, tensor in skeleton.tensor_names.items():
            axes = self._axes(tensor) or ()
            if name.startswith(prefix) and left.touches(axes) and (norms or not is_norm(tensor)):
                parameter, written = skeleton.model.get_parameter(name), read(self.names[tensor])
                whole = left.whole_norm(written) if is_norm(tensor) else left.spread(written.to(parameter), axes)
                parameter.data.copy_(whole)

    def _narrowed(self, kept: Sequence[int], finished: KeptBlocks) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each block that is not finished by their new names."""

        def replay(number: int, tensors: Mapping[str, Tensor]) -> None:
            skeleton, index, inputs = self.skeleton, kept[number], self.chooser.inputs
            assert inputs
            with skeleton.loaded(skeleton.blocks[index], self.device, self.less_memory):
                self._put_(skeleton, index, self.lefts[number], tensors.__getitem__)
                skeleton.advance_(index, inputs)

        for number in finished.resume(len(kept), self.chooser.inputs, {"choices": self.choices}, replay):
            block = self.skeleton.blocks[kept[number]]
            with out_of_memory(block.name, self.device, self.less_memory):
                tensors = self._narrowed_block(kept[number])
            yield tensors
            del tensors  # before the next block's is made

    def _narrowed_block(self, index: int) -> dict[str, Tensor]:
        skeleton, block, inputs = self.skeleton, self.skeleton.blocks[index], self.chooser.inputs
        if inputs:
            skeleton.load_(block.name, self.device)
        left, readers = self.chooser.choose(index, self.hidden)
        made = {f"{reader.name}.weight": reader.making_up(left) for reader in readers if self.compensate}
        ffn = None if left.ffn is None else left.ffn.tolist()
        self.choices.append({"ffn": ffn, "heads": left.heads, "pools": left.pools})
        tensors = {}
        for tensor in skeleton.block_tensors(block):
            whole = made.get(tensor)
            stored = skeleton.checkpoint.read_finite(tensor) if whole is None else whole
            tensors[self.names[tensor]] = self._left_of(tensor, stored, left)
        if inputs:
            self._put_(skeleton, index, left, tensors.__getitem__)
            skeleton.advance_(index, inputs)
            skeleton.release_(block.name)
        return tensors

    def _left_of(self, tensor: str, stored: Tensor, left: Left) -> Tensor:
        """Return what is left of a tensor, in the dtype that the checkpoint has it in."""
        axes = self._axes(tensor)
        if not axes or not left.touches(axes):
            return stored
        narrowed = left.norm_weight(stored) if is_norm(tensor) else left.narrow(stored, axes)
        cast = narrowed.to("cpu", self.skeleton.stored_dtype(tensor))
        if not all_finite(cast):
            raise StageError(
                f"weights of up to {float(narrowed.abs().max()):,.0f} do not fit "
                f"{str(cast.dtype).removeprefix('torch.')}",
                where=f"prune_structured: {tensor}",
                why="They make up for what was removed",
                remedy="Set compensate: false, or put `- cast: {dtype: bfloat16}` in front of this stage",
            )
        return cast

    def _axes(self, tensor: str) -> tuple[Axis, ...] | None:
        return self.chooser.axes.get(tensor)


def only(hidden: Tensor, channels: Tensor) -> Tensor:
    """Return hidden states, float [..., hidden], with 0 in all channels but these."""
    mask = torch.zeros(hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    return hidden * mask.index_fill_(0, channels.to(hidden.device), 1)
