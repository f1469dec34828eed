"""One run of a quantizer, and what it leaves of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optkit.model.kept_blocks import KeptBlocks
from optkit.model.linear_layers import Selection
from optkit.model.output_layer import HEAD
from optkit.model.reading_ahead import ReadAhead
from optkit.model.together import Together
from optkit.packed_tensors.base import LayerFormat
from optkit.progress import Task
from optkit.stage import Context

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.model.blocks import BlockInputs
    from optkit.model.skeleton import Skeleton


@dataclass(frozen=True)
class BlockOutput:
    """What a quantizer leaves of one decoder block.
    Every other tensor of the block is passed on as it is.
    """

    layers: Mapping[str, Mapping[str, Tensor]]
    """Layer -> last name -> tensor: these take the place of the layer's weight."""
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the checkpoint with another value (a norm that scales were folded into), by their
    full names; new names are added.
    """

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return what `flat` made flat."""
        layers: dict[str, dict[str, Tensor]] = {}
        for name in tensors:
            layer, packed, leaf = name.partition("|")
            if packed:
                layers.setdefault(layer, {})[leaf] = tensors[name]
        return cls(layers, {name: tensor for name, tensor in tensors.items() if "|" not in name})

    def flat(self) -> dict[str, Tensor]:
        """Return all tensors by one name each."""
        packed = {f"{name}|{leaf}": each for name, layer in self.layers.items() for leaf, each in layer.items()}
        return {**self.replaced, **packed}


@dataclass
class QuantizationJob:
    """One run of a quantizer: what it works on, and what it finds on the way."""

    skeleton: Skeleton
    source: Path
    selection: Selection
    formats: Mapping[str, LayerFormat]
    """The form of each selected layer."""
    context: Context
    task: Task
    """The bar, one step per block."""
    kept: KeptBlocks
    together: Together
    """The processes that do it, each with a share of the text."""
    reading: Future[Any] | None = None
    """Gives what it is calibrated on."""
    details: dict[str, Any] = field(default_factory=dict)
    """Goes into the report."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the scorecard."""
    calibrated_on: tuple[Mapping[str, str], ...] = ()
    text: Any = None
    """What is calibrated on: tokens, int64 [sequences, sequence_length], or prompts with images."""
    inputs: BlockInputs | None = None
    """What the last block returned on the calibration text, for the output layer."""
    ahead: ReadAhead = field(default_factory=partial(ReadAhead, 3))
    """Reads what is rounded without a text, or is only passed on, while a GPU works."""

    def weight(self, name: str) -> str:
        """Return the tensor of the checkpoint that holds the weight of a layer.
        Of lm_head it may be that of the embedding.
        """
        own = f"{name}.weight"
        return own if own in self.skeleton.checkpoint.tensors else self.skeleton.tensor_name(own)

    def read(self, tensor: str) -> Tensor:
        """Return a tensor of the checkpoint; raises SourceError for weights that are NaN or Inf."""
        return self.ahead.take(tensor, partial(self.skeleton.checkpoint.read_finite, tensor))

    def read_ahead(self, passed_on: Iterable[str], rounded: Sequence[str]) -> None:
        """Begin to read tensors that will be asked for, in this order."""
        stored = self.skeleton.checkpoint
        reads = {name: partial(stored.read_finite, name) for name in passed_on}
        for_gpu = {name: partial(stored.read_finite, name, pinned=True) for name in rounded}
        sizes = {name: stored.tensors[name].size_bytes for name in rounded}
        self.ahead.begin({**reads, **for_gpu}, {**dict.fromkeys(reads, 0), **sizes})

    @property
    def head(self) -> str | None:
        """The name of the output layer if it is quantized too."""
        return HEAD if HEAD in self.selection.layers else None

    def resume(self, inputs: BlockInputs, less_memory: str, advance: Callable[[int, BlockOutput], object]) -> range:
        """Return which blocks are left to do, with the inputs in front of the first of them.
        From here on finished blocks are kept; what is in `details` and `notes` is kept with them.
        `advance` brings the inputs behind a loaded block, as the stage does, with what was made of it.
        """
        facts = {"details": self.details, "notes": self.notes}

        def replay(index: int, tensors: Mapping[str, Tensor]) -> None:
            from optkit.model.skeleton_layers import put_tensors_

            output = BlockOutput.of({name: each.to(self.context.device) for name, each in tensors.items()})
            with self.skeleton.loaded(self.skeleton.blocks[index], self.context.device, less_memory):
                put_tensors_(self.skeleton, index, output.replaced)
                advance(index, output)

        return self.kept.resume(len(self.skeleton.blocks), inputs, facts, replay, bool(self.head))

    def advance_(
        self,
        inputs: BlockInputs,
        opened: Callable[[nn.Module, Mapping[str, Tensor]], nn.Module],
        index: int,
        output: BlockOutput,
    ) -> None:
        """Bring inputs behind a loaded block whose layers compute as they will when the model is opened.
        `opened` makes that of a layer and its tensors.
        """
        from optkit.model.replaced_forward import replaced_forward

        modules = self.modules(index)
        built = {modules[name]: opened(modules[name], each).forward for name, each in output.layers.items()}
        with replaced_forward(built):
            self.skeleton.advance_(index, inputs)

    def counted(self, outputs: Iterable[BlockOutput]) -> Iterator[BlockOutput]:
        """Yield outputs, each told as done: what waits for all of them would not tell before the last."""
        for block, output in zip(self.skeleton.blocks, outputs, strict=True):
            self.task.advance(note=block.name)
            yield output

    def modules(self, index: int) -> dict[str, nn.Module]:
        """Return the layers to quantize of a block."""
        linears = self.skeleton.linears(self.skeleton.blocks[index])
        return {name: module for name, module in linears.items() if name in self.selection.layers}

    def is_read(self, index: int) -> bool:
        """Say whether what a block returns is looked at: by layers behind it, or by the output layer."""
        return bool(self.head) or any(map(self.modules, range(index + 1, len(self.skeleton.blocks))))
