"""A causal language model without its weights.
It is built on the meta device, with the real weights of one part of it at a time.

skeleton = Skeleton(Checkpoint(directory))
inputs = skeleton.capture_inputs(tokens, "cpu", batch_size=8)
for index, block in enumerate(skeleton.blocks):
    with skeleton.loaded(block, "cpu", "Take a machine with more memory"):
        skeleton.advance_(index, inputs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optkit.common.grouping import by_key
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import SourceError, StageError
from optkit.model.blocks import Block, BlockInputs, Call, find_chains
from optkit.model.checkpoint import Checkpoint, all_finite
from optkit.model.empty_model import TORCH_DTYPES, empty_model, stored_dtype
from optkit.model.entering import entering
from optkit.model.experts import unfuse_experts_
from optkit.model.head import given_to_head
from optkit.model.memory import return_freed_memory
from optkit.model.names import compute_missing_, match_tensors, planned_dtypes, stored_parameters
from optkit.model.packed_floats import refuse_unsaid_codes
from optkit.model.prompts import Prompts, longest_of, refuse_images
from optkit.model.reading_ahead import ReadAhead
from optkit.model.together import ALONE, Together

Projection: TypeAlias = "nn.Linear | Conv1D"
UNRETURNED_BYTES, UNRETURNED_SHARE = 1 << 28, 0.1
"""Of released weights, and of the model, until the system gets what was freed: the pages that are asked for
again take a tenth of the time of GPTQ on a CPU.
"""


@dataclass(frozen=True)
class _Slot:
    """A place of a parameter or buffer: its full name, the module that has it, and the name there."""

    name: str
    owner: nn.Module
    leaf: str


class Skeleton:
    """A model on the meta device; `load_` and `release_` put parameters there and take them."""

    experts_see_all = False
    """Every expert sees every token if the inputs of layers are watched."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None = None,
        attention: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Build the model in `dtype` (None: the checkpoint's own), experts unfused; read no weight.

        `attention` is transformers' `attn_implementation`; None is sdpa if the architecture has
        it and loses nothing by it, else eager.

        Raises SourceError for a quantized checkpoint, an architecture that is not supported, and
        weights that do not fit the model.
        """
        if checkpoint.quantization:
            method = checkpoint.quantization.get("quant_method", "unknown method")
            raise SourceError(
                f"the model is quantized already ({method})",
                where=str(checkpoint.directory),
                why="Its float weights are gone",
                remedy="Put `- dequantize` before the stage, or make an artifact with that stage alone",
            )
        refuse_unsaid_codes(checkpoint.shape, str(checkpoint.directory))
        self.checkpoint = checkpoint
        options = {"attn_implementation": attention} if attention else {}
        self.model = empty_model(checkpoint, dtype or stored_dtype(checkpoint), trust_remote_code, **options)
        self.dtype: torch.dtype = self.model.dtype
        self.fused: Mapping[str, str] = unfuse_experts_(self.model, stored_parameters(self.model, checkpoint))
        """Experts that could not be taken apart into Linears: module name -> the reason."""
        self.chains = find_chains(self.model)
        """Lists of blocks: an encoder's is in front of its decoder's."""
        self.blocks: tuple[Block, ...] = sum(self.chains, ())
        self.tensor_names: Mapping[str, str] = match_tensors(self.model, checkpoint)
        """Parameter or persistent buffer of the model -> tensor of the checkpoint."""
        compute_missing_(self.model, self.tensor_names)
        self._dtypes = planned_dtypes(self.model, self.dtype)
        self._ahead = ReadAhead(2)
        self._last = -1
        """The block that was loaded last: if blocks are loaded in order, the next one is read ahead."""
        self._unreturned = 0
        self._real: WeakValueDictionary[tuple[str, str, torch.dtype], nn.Parameter] = WeakValueDictionary()

    def tensor_name(self, parameter: str) -> str:
        """Return the tensor of the checkpoint that holds a parameter of the model.
        For example `model.layers.0.mlp.up_proj.weight`.
        """
        return self.tensor_names[parameter]

    def block_tensors(self, block: Block) -> tuple[str, ...]:
        """Return the tensors of the checkpoint that a block is made of, and no block before it."""
        return tuple(tensor for tensor, owners in self._owners.items() if owners[0] == block.name)

    @property
    def shared_between(self) -> tuple[str, ...]:
        """The blocks that are partly made of the same tensors (Zamba)."""
        return tuple(dict.fromkeys(name for owners in self._owners.values() if len(owners) > 1 for name in owners))

    @property
    def outside_tensors(self) -> tuple[str, ...]:
        """The tensors that belong to no block, even those that are never read; to be passed on."""
        return tuple(name for name in self.checkpoint.tensors if name not in self._owners)

    @cached_property
    def _owners(self) -> dict[str, list[str]]:
        """The blocks that each tensor inside of blocks belongs to, in order."""
        named = ((each.name, part) for each in self.blocks for part in self.tensor_names.items())
        return by_key((tensor, block) for block, (name, tensor) in named if name.startswith(f"{block}."))

    def linears(self, block: Block) -> dict[str, Projection]:
        """Return the Linear and Conv1D modules of a block by their names on disk, in order.
        Those that a block before it has too are left out.
        """
        named = block.module.named_modules(prefix=block.name)
        kinds = nn.Linear, Conv1D
        found = {self.tensor_name(f"{name}.weight"): module for name, module in named if isinstance(module, kinds)}
        own = {tensor: module for tensor, module in found.items() if self._owners[tensor][0] == block.name}
        return {tensor.removesuffix(".weight"): module for tensor, module in own.items()}

    def load_(self, module_name: str, device: str | torch.device) -> None:
        """Put the real weights of a module and all below it on the device, in the model's dtype.

        Raises SourceError for weights that are NaN or Inf, in the file or after the cast to the
        model's dtype.
        """
        self._load(self._slots(module_name), device)

    def release_(self, module_name: str) -> None:
        """Put a module and all below it back to the meta device."""
        self._release(self._slots(module_name))

    @contextmanager
    def loaded(self, block: Block, device: str, less_memory: str) -> Iterator[None]:
        """Have the weights of a block on the device for a while; raises as `load_` does.
        Without memory it raises ResourceError, which says what to lower.
        """
        with out_of_memory(block.name, device, less_memory):
            self.load_(block.name, device)
            self._read_next(block, device)
            yield
            self.release_(block.name)

    def _read_next(self, block: Block, device: str) -> None:
        before, self._last = self._last, next(index for index, each in enumerate(self.blocks) if each is block)
        if device.startswith("cuda") and before + 1 == self._last < len(self.blocks) - 1:
            self._ahead.begin(self._reads(self._slots(self.blocks[self._last + 1].name), device, pinned=True))

    def read_first(self, device: str) -> None:
        """Begin to read what `capture_inputs` and the first block take."""
        if device.startswith("cuda"):
            outside = self._reads(self._outside_but_head(), device, pinned=False)
            self._ahead.begin(outside | self._reads(self._slots(self.blocks[0].name), device, pinned=True))

    def _reads(self, slots: Iterable[_Slot], device: str, pinned: bool) -> dict[str, Callable[[], Tensor]]:
        return {slot.name: partial(self._read, slot, pinned) for slot in slots if self._is_apart(slot, device)}

    def _is_apart(self, slot: _Slot, device: str) -> bool:
        """Whether a slot takes a tensor of the checkpoint that no other block has on the device."""
        if slot.name not in self.tensor_names or slot.leaf in slot.owner._buffers:
            return False
        return self._key(slot, device) not in self._real

    def load_outside_(self, device: str | torch.device) -> None:
        """Put everything outside the blocks on the device; raises as `load_` does."""
        self._load(self._outside(), device)

    def release_outside_(self) -> None:
        """Put everything outside the blocks back to the meta device."""
        self._release(self._outside())

    def capture_inputs(
        self, prompts: Tensor | Prompts, device: str | torch.device, batch_size: int = 8, together: Together = ALONE
    ) -> BlockInputs:
        """Return what prompts are before the blocks, and their calls.
        They are int64 [sequences, sequence_length], or such with images, which run one by one. Of several
        processes each takes its share.

        All outside the blocks, the vision tower too, is on the device while this runs, without
        lm_head. Raises StageError for tokens that the model has no embedding or position for and for
        images that it does not take, SourceError if the blocks cannot be run one by one,
        ResourceError as `room_for_states`.
        """
        self._check_prompts(prompts)
        return entering(self, prompts, device, batch_size, together)

    def run_block(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        """Run one loaded block alone: float [batch, sequence, hidden] -> the same shape."""
        return call.run(self.blocks[index].module, hidden)

    def advance_(self, index: int, inputs: BlockInputs, hidden: Tensor | None = None) -> None:
        """Replace hidden states by what a loaded block makes of them.
        They are float [sequences, sequence_length, hidden]; None: those of the inputs.
        """
        if hidden is None and inputs.settle:
            inputs.settle()
        inputs.replace_(lambda batch, given: self.run_block(index, given, batch.calls[index]), hidden)
        if hidden is None and inputs.following and index == len(self.chains[0]) - 1:
            inputs.following()

    def stored_dtype(self, tensor: str) -> torch.dtype:
        return TORCH_DTYPES[self.checkpoint.tensors[tensor].dtype]

    def head_inputs(self, inputs: BlockInputs, device: str | torch.device) -> Iterator[Tensor]:
        """Yield what lm_head is given for each batch, once `inputs.hidden` left the last block.

        Everything outside the blocks but the output layer is on the device meanwhile. Raises
        SourceError if it cannot be run alone.
        """
        with self.outside_but_head(device):
            for _, hidden in inputs.each():
                yield given_to_head(self.model, self.blocks, hidden)

    @contextmanager
    def outside_but_head(self, device: str | torch.device) -> Iterator[None]:
        """Have everything outside the blocks but the output layer on the device for a while."""
        slots = self._outside_but_head()
        self._load(slots, device)
        try:
            yield
        finally:
            self._release(slots)

    def _check_prompts(self, prompts: Tensor | Prompts) -> None:
        config, where = self.model.config.get_text_config(decoder=True), str(self.checkpoint.directory)
        length = longest_of(prompts)
        refuse_images(self.model, prompts, where)
        positions = getattr(config, "max_position_embeddings", None)
        if positions and 0 < positions < length:
            raise StageError(
                f"sequences of {length:,} tokens, and the model was built for {positions:,}",
                where=where,
                remedy=f"Use a sequence_length of at most {positions:,}",
            )
        if isinstance(prompts, Tensor) and len(prompts) and (largest := int(prompts.max())) >= config.vocab_size:
            raise StageError(
                f"the text holds token {largest:,} and the vocabulary ends at {config.vocab_size - 1:,}",
                where=where,
                remedy="See that the tokenizer belongs to this model",
            )

    def _slots(self, module_name: str) -> Iterator[_Slot]:
        for name, owner in self.model.get_submodule(module_name).named_modules(
            prefix=module_name, remove_duplicate=False
        ):
            for leaf in (*owner._parameters, *owner._buffers):
                if getattr(owner, leaf) is not None:
                    yield _Slot(f"{name}.{leaf}" if name else leaf, owner, leaf)

    def _outside(self) -> list[_Slot]:
        inside = tuple({block.name.rpartition(".")[0] + "." for block in self.blocks})
        return [slot for slot in self._slots("") if not slot.name.startswith(inside)]

    def _outside_but_head(self) -> list[_Slot]:
        head = self.model.get_output_embeddings()
        return [slot for slot in self._outside() if slot.owner is not head]

    def _load(self, slots: Iterable[_Slot], device: str | torch.device) -> None:
        for slot in slots:
            if slot.name not in self.tensor_names:
                _move_(slot, device)
            elif slot.leaf in slot.owner._buffers:
                setattr(slot.owner, slot.leaf, self._read(slot).to(device))
            else:
                key = self._key(slot, device)
                parameter = self._real.get(key)
                if parameter is None:
                    read = self._ahead.take(slot.name, partial(self._read, slot))
                    parameter = nn.Parameter(read.to(device, non_blocking=True), requires_grad=False)
                    self._real[key] = parameter
                slot.owner._parameters[slot.leaf] = parameter

    def _release(self, slots: Iterable[_Slot]) -> None:
        for slot in slots:
            held = getattr(slot.owner, slot.leaf)
            if slot.name not in self.tensor_names:
                _move_(slot, "cpu")
            elif slot.leaf in slot.owner._buffers:
                setattr(slot.owner, slot.leaf, held.to("meta"))
            else:
                slot.owner._parameters[slot.leaf] = nn.Parameter(held.detach().to("meta"), requires_grad=False)
            self._unreturned += held.nbytes
        if self._unreturned >= min(UNRETURNED_BYTES, UNRETURNED_SHARE * self.checkpoint.shape.size_bytes):
            return_freed_memory()
            self._unreturned = 0

    def _key(self, slot: _Slot, device: str | torch.device) -> tuple[str, str, torch.dtype]:
        return self.tensor_name(slot.name), str(device), self._dtype(slot)

    def _dtype(self, slot: _Slot) -> torch.dtype:
        return self._dtypes.get(slot.name) or getattr(slot.owner, slot.leaf).dtype

    def _read(self, slot: _Slot, pinned: bool = False) -> Tensor:
        tensor = self.tensor_name(slot.name)
        stored = self.checkpoint.read_finite(tensor, pinned=pinned)
        dtype = self._dtype(slot)
        if not stored.is_floating_point() or stored.dtype == dtype:
            return stored
        cast = stored.to(dtype)
        if not all_finite(cast):
            raise SourceError(
                f"weights of up to {float(stored.abs().max()):.4g} do not fit {str(dtype).removeprefix('torch.')}",
                where=f"{self.checkpoint.files[tensor]}: {tensor}",
                why=f"Its largest number is {torch.finfo(dtype).max:.4g}",
                remedy="Open the model in bfloat16 or float32",
            )
        return cast


def _move_(slot: _Slot, device: str | torch.device) -> None:
    """Put what the model's code computed on a device."""
    held = slot.owner._parameters if slot.leaf in slot.owner._parameters else slot.owner._buffers
    moved = getattr(slot.owner, slot.leaf).to(device)
    held[slot.leaf] = nn.Parameter(moved, requires_grad=False) if held is slot.owner._parameters else moved
