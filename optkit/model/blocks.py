"""The decoder blocks of a model: finding them, recording their calls, and running one alone.

The base model decides per block what it passes (a sliding or a full attention mask, local or global
rotary embeddings). So the arguments of every block are recorded, by running the model with blocks
that hand their input on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optkit.errors import SourceError
from optkit.model.memory import room_for_states
from optkit.model.passage import Passage
from optkit.model.replaced_forward import replaced_forward
from optkit.model.together import ALONE, Together

Found = TypeVar("Found")
Beside: TypeAlias = Mapping[int, Callable[..., Any]] | tuple[None, ...] | None
"""What a block returns beside hidden states: what the first of its list makes, by the index of that;
a tuple, or no tuple at all.
"""
Compute = Callable[[int, Tensor, "Call"], Tensor]
"""What a block with an index makes of hidden states, and what it is called with beside them."""
Between = Callable[[int, Tensor, Tensor], None]
"""Looks at what a block with an index is given, behind what the one before it left."""
CHANGED = "the hidden states that enter a block are not those that the block before it returned"


@dataclass(frozen=True)
class Block:
    """One decoder block: its module and the name of it in the model, e.g. `model.layers.3`."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Call:
    """What a block is called with beside the hidden states."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    hidden_keyword: str | None = None
    """The keyword of the hidden states if the model passes them by one; None if they are the
    first argument.
    """
    added: Tensor | None = None
    """What the model adds to them in front of the block (features of images); None if nothing."""

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """float [batch, sequence, hidden] -> float [batch, sequence, hidden], without gradients."""
        with torch.no_grad():
            return self.graph(module, hidden)

    def graph(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """float [batch, sequence, hidden] -> float [batch, sequence, hidden].
        Gradients flow if torch records them.
        """
        hidden = hidden if self.added is None else hidden + self.added
        if self.hidden_keyword is None:
            output = module(hidden, *self.arguments, **self.keywords)
        else:
            output = module(*self.arguments, **{self.hidden_keyword: hidden}, **self.keywords)
        result: Tensor = output[0] if isinstance(output, (tuple, list)) else output
        return result


@dataclass(frozen=True)
class Batch:
    """Some of the sequences, and what each block is called with for them."""

    rows: tuple[slice, slice]
    """Which of the sequences, and which of their places: none behind the end of a shorter prompt."""
    calls: tuple[Call, ...]
    """One for each block."""


@dataclass
class BlockInputs:
    """What goes into the first block, and what each block is called with."""

    hidden: Tensor
    """float [sequences, sequence_length, hidden]; what no batch has in its `rows` means nothing."""
    batches: tuple[Batch, ...]
    following: Callable[[], None] | None = None
    """Puts what goes into the decoder's first block in their place, once they left the encoder's last;
    None without a decoder behind.
    """
    encoded: Tensor | None = None
    """What left the encoder's last block, once it was followed."""
    settle: Callable[[], None] | None = None
    """Waits until nobody reads the hidden states any more; called before they change."""
    together: Together = ALONE
    """The processes that have a share of the sequences each."""
    passage: Passage | None = None
    """Brings hidden states to a GPU that has no room for all of them; None if they lie where they are worked on."""

    @property
    def device(self) -> torch.device:
        """What the blocks compute on."""
        return self.passage.device if self.passage else self.hidden.device

    def copied(self) -> Tensor:
        """Return hidden states of their own, that wait where these do."""
        gpu = self.passage.device if self.passage else None
        return room_for_states(self.hidden, self.hidden.shape, gpu).copy_(self.hidden)

    def at(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Return the hidden states of a batch on the device. Here and below they are this text's; None: these."""
        return self._begin((self.hidden if hidden is None else hidden)[batch.rows])()

    def each(self, hidden: Tensor | None = None) -> Iterator[tuple[Batch, Tensor]]:
        """Yield batches and their hidden states on the device; the next ones come meanwhile."""
        states = self.hidden if hidden is None else hidden
        begun = (self._begin(states[batch.rows]) for batch in self.batches)
        following = next(begun, None)
        try:
            for batch in self.batches:
                given, following = following, next(begun, None)
                assert given
                yield batch, given()
        finally:  # its memory goes, and others would get it that are written before the copy is done
            if following:
                following()

    def replace_(self, made: Callable[[Batch, Tensor], Tensor], hidden: Tensor | None = None) -> None:
        """Put what is made of the hidden states of each batch in their place."""
        states = self.hidden if hidden is None else hidden
        put_ = self.passage.put_ if self.passage else Tensor.copy_
        for batch, given in self.each(states):
            put_(states[batch.rows], made(batch, given))
        if self.passage:
            self.passage.end()

    def _begin(self, held: Tensor) -> Callable[[], Tensor]:
        return self.passage.begin(held) if self.passage else lambda: held


def find_chains(model: PreTrainedModel) -> tuple[tuple[Block, ...], ...]:
    """Return the lists of blocks through which hidden states pass: an encoder-decoder has two.
    Raises SourceError as `find_blocks` does.
    """
    if not model.config.is_encoder_decoder:
        return (find_blocks(model),)
    names = {module: name for name, module in model.named_modules()}
    return tuple(_largest_list(part, names[part]) for part in (model.get_encoder(), model.get_decoder()))


def _largest_list(part: nn.Module, prefix: str) -> tuple[Block, ...]:
    lists = [(name, module) for name, module in part.named_modules(prefix=prefix) if isinstance(module, nn.ModuleList)]
    name, blocks = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
    return tuple(Block(f"{name}.{index}", block) for index, block in enumerate(blocks))


def find_blocks(model: PreTrainedModel) -> tuple[Block, ...]:
    """Return the blocks, in order, an encoder's before its decoder's.
    Raises SourceError without a list as long as config.json says.
    """
    if model.config.is_encoder_decoder:
        return sum(find_chains(model), ())
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [(name, module) for name, module in lists if len(module) == count and len(set(module)) == count]
    decoder = set(model.get_decoder().modules())
    fitting = [each for each in fitting if each[1] in decoder] or fitting
    outermost = [
        (name, module) for name, module in fitting if not any(name.startswith(f"{other}.") for other, _ in fitting)
    ]
    if not outermost:
        seen = ", ".join(f"{name} with {len(module)}" for name, module in lists[:3]) or "none at all"
        why = f"A torch.nn.ModuleList of num_hidden_layers = {count} modules was looked for; there is {seen}"
        raise _unsupported(model, f"no list of {count} decoder blocks", why)
    name, blocks = max(outermost, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
    return tuple(Block(f"{name}.{index}", block) for index, block in enumerate(blocks))


@dataclass(frozen=True)
class Encoded:
    """What the blocks of an encoder left."""

    blocks: Sequence[Block]
    hidden: Tensor
    """float [batch, sequence, hidden]"""


class OtherFormError(Exception):
    """The model takes the output of a block for something else than what it was given."""


class _AllRecordedError(Exception):
    """Raised by the last block to end the run: nothing after it is needed."""


def _unchanged(_index: int, left: Tensor, entering: Tensor) -> None:
    if entering is not left:
        raise OtherFormError(CHANGED)


def record_calls(
    model: PreTrainedModel, blocks: Sequence[Block], inputs: Mapping[str, Tensor], encoded: Encoded | None = None
) -> tuple[Tensor, tuple[Call, ...]]:
    """Run the model up to its blocks; return the first's hidden states and all calls.
    `inputs`: `input_ids`, int64 [batch, sequence], and what else it is called with. With what its
    encoder's blocks left, the blocks are those of the decoder.

    What the model adds between two blocks is what it makes of zeros; it has to add the same to other
    hidden states. Raises SourceError if it changes them otherwise, or passes more than them from one
    block to the next.
    """
    added: dict[int, Tensor] = {}
    held: list[Tensor] = []
    before = len(encoded.blocks) if encoded else 0

    def find(index: int, left: Tensor, entering: Tensor) -> None:
        if entering.shape != left.shape:
            raise OtherFormError(CHANGED)
        if index == before + 1:  # another form of blocks is tried
            added.clear()
        if entering is not left or entering.any():
            added[index - before] = entering

    def check(index: int, _left: Tensor, entering: Tensor) -> None:
        if not torch.equal(entering, held[-1] + added.get(index - before, 0)):
            raise OtherFormError(CHANGED)

    def keep(hidden: Tensor) -> Tensor:
        held[:] = [hidden]
        return hidden.clone()

    first, calls = _record(model, blocks, inputs, encoded, torch.zeros_like, find)
    if added:
        _record(model, blocks, inputs, encoded, keep, check)
    return first, tuple(replace(call, added=added.get(index)) for index, call in enumerate(calls))


def _record(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    inputs: Mapping[str, Tensor],
    encoded: Encoded | None,
    leave: Callable[[Tensor], Tensor],
    between: Between,
) -> tuple[Tensor, tuple[Call, ...]]:
    """Return what `record_calls` does, of blocks that `leave` something of their hidden states."""
    calls: list[Call] = []
    entered: list[Tensor] = []
    before = len(encoded.blocks) if encoded else 0

    def record(index: int, hidden: Tensor, call: Call) -> Tensor:
        if encoded and index < before:
            return encoded.hidden if index == before - 1 else leave(hidden)
        if not calls:
            entered.append(hidden)
        calls.append(call)
        if len(calls) == len(blocks):
            raise _AllRecordedError
        return leave(hidden)

    def run() -> tuple[Tensor, tuple[Call, ...]]:
        calls.clear()
        entered.clear()
        try:
            with suppress(_AllRecordedError), torch.no_grad():
                model(**inputs, use_cache=False)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise _unsupported(model, impossible, "it reads weights of blocks that are not running") from error
        if len(calls) < len(blocks):
            raise _unsupported(model, impossible, f"only {len(calls)} of {len(blocks)} blocks were called")
        tokens = inputs.get("decoder_input_ids" if encoded else "input_ids")
        if tokens is not None and entered[0].shape[:-1] != tokens.shape:
            why = f"the hidden states are {list(entered[0].shape)} for tokens {list(tokens.shape)}"
            raise _unsupported(model, impossible, why)
        return entered[0], tuple(calls)

    impossible = "its blocks cannot be run one by one"
    every = (*(encoded.blocks if encoded else ()), *blocks)
    return run_with_blocks(model, every, record, run, impossible, before, between)


def run_with_blocks(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    compute: Compute,
    run: Callable[[], Found],
    impossible: str,
    decoder: int = 0,
    between: Between = _unchanged,
) -> Found:
    """Return what `run` returns if the blocks `compute` something else, of index, hidden states and call.
    At the index `decoder` a list of blocks begins that is given other hidden states. `between` looks at
    what left a block and what enters the next one.

    Blocks may return a tensor, or a tuple with it alone or beside the weights of attention: each is
    tried. The first block of a list may also make something for the others (T5's bias of positions);
    it is called if its weights are there. Raises SourceError, which says what is `impossible`, if
    `run` raises with all of them.
    """
    reason = ""
    firsts = {index: blocks[index].module.forward for index in {0, decoder}}
    for beside in (None, (), (None,), firsts):
        forward = _checked(compute, beside, decoder, between)
        with replaced_forward({block.module: forward for block in blocks}):
            try:
                return run()
            except (OtherFormError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
                reason = reason or str(error).partition("\n")[0]
    raise _unsupported(model, impossible, reason)


def _unsupported(model: PreTrainedModel, what: str, why: str) -> SourceError:
    return SourceError(
        f"unsupported architecture {type(model).__name__}: {what}", where=model.config.model_type, why=why
    )


def _checked(compute: Compute, beside: Beside, decoder: int, between: Between) -> Callable[..., Any]:
    called = 0
    left: Any = None  # of the last block alone: those of all are gigabytes
    made: tuple[Any, ...] = ()

    def forward(*arguments: Any, **keywords: Any) -> Any:
        nonlocal called, left, made
        keyword = None if arguments else "hidden_states"
        if isinstance(beside, Mapping) and (first := beside.get(called)):
            made = first(*arguments, **keywords)[1:]
        hidden = keywords.pop(keyword) if keyword else arguments[0]
        if called not in (0, decoder):
            between(called, left, hidden)
        left = compute(called, hidden, Call(arguments[1:], keywords, keyword))
        called += 1
        return left if beside is None else (left, *(made if isinstance(beside, Mapping) else beside))

    return forward
