"""Which layers read the output of another one, seen by multiplying it by powers of two.

The output of the layer in question, the producer, is replaced by random numbers, once as they are
and then multiplied channel by channel. The factors are powers of two, which no float format rounds.
A layer whose input comes out multiplied by powers of two too, channel by channel, is a consumer,
and its input is divided again on the spot; so when the outputs of the part are as before, nothing
else depends on the producer. Any other change means that something in between is not linear. The
powers spell the number of the producer's channel in base 8, a digit a run, so that permutations and
repetitions (grouped-query attention) are read off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.pytorch_utils import Conv1D

from optkit.errors import StageError
from optkit.model.blocks import Block
from optkit.model.experts import Experts
from optkit.model.replaced_forward import hooked

BASE = 8
LOWEST = -3
"""Exponent of the digit 0: factors go from 1/8 to 16."""


@dataclass(frozen=True)
class Found:
    """The layers that read the output of a producer, all with the same channels of it."""

    consumers: tuple[nn.Module, ...]
    rows: Tensor | None
    """int64 [in]: the producer's output that each input channel is made of; None if input i is
    output i.
    """


@dataclass(frozen=True)
class Refusal:
    """Why a producer's outputs cannot be scaled.
    It says how they reach the layers at which that showed, the last of them most clearly.
    """

    reason: str
    readers: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Scope:
    """A module with what it was called with, and the layers right below it that may take scales."""

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    producers: tuple[nn.Module, ...]

    def run(self) -> list[Tensor]:
        """Return the float tensors that the module returns."""
        output = self.module(*tree_map(_copied, self.arguments), **tree_map(_copied, dict(self.keywords)))
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def output_of(self, module: nn.Module) -> Tensor:
        """Return what a module below returns."""
        outputs: list[Tensor] = []
        with module.register_forward_hook(lambda _module, _arguments, output: outputs.append(output)):
            self.run()
        return outputs[0]


def close(tensor: Tensor, reference: Tensor) -> bool:
    """Whether two tensors are the same but for rounding that differs from run to run."""
    tolerance = max(1e-4, 4 * torch.finfo(reference.dtype).eps)
    return bool((tensor.float() - reference.float()).norm() <= tolerance * reference.float().norm())


def scopes(module: nn.Module, run: Callable[[], object]) -> list[Scope]:
    """Run once; return the module and those below it whose children hold candidates for producers.
    They are in the order in which they ran.
    """
    calls: dict[nn.Module, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
    returned: dict[nn.Module, object] = {}

    def before(called: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls.setdefault(called, []).append((tree_map(_copied, arguments), tree_map(_copied, keywords)))

    def after(called: nn.Module, _arguments: tuple[Any, ...], output: object) -> None:
        returned[called] = output

    handles = [part.register_forward_pre_hook(before, with_kwargs=True) for part in module.modules()]
    handles += [part.register_forward_hook(after) for part in module.modules()]
    with hooked(handles):
        run()
    once = {called: seen[0] for called, seen in calls.items() if len(seen) == 1}
    found = []
    for called, (arguments, keywords) in once.items():
        children = set(called.children())
        producers = tuple(child for child in once if child in children and _may_produce(child, returned[child]))
        if producers:
            found.append(Scope(called, arguments, keywords, producers))
    return found


def probe(scope: Scope, producer: nn.Module) -> Found | Refusal:
    """Find out who reads the output of a producer, or why it cannot be scaled."""
    signal = _Signal(scope, producer)
    result = signal.follow(range(signal.channels))
    if isinstance(result, Refusal) and result.readers and columns(producer):
        inputs = columns(result.readers[-1])
        # of joined q, k, v or gate, up: the last part; k and v may have fewer heads
        for size in (inputs, (signal.channels - inputs) // 2):
            if 0 < size < signal.channels:
                part = signal.follow(range(signal.channels - size, signal.channels))
                if isinstance(part, Found):
                    return part
    return result


def columns(module: nn.Module) -> int:
    """Return how many input channels a layer's own weight has, 0 for a module that has no matrix."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return 0
    return int(weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1])


@contextmanager
def every_expert_called(block: Block) -> Iterator[None]:
    """Send tokens to the experts of a block in turn, whatever the router says."""

    def spread(experts: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, chosen, *rest = arguments
        count = len(list(experts.children()))
        if chosen.numel() < count:
            raise StageError(
                f"{chosen.numel():,} places for tokens and {count:,} experts",
                where=block.name,
                why="Each expert has to be seen at work to know what feeds it",
                remedy="Calibrate on longer sequences",
            )
        turns = torch.arange(chosen.numel(), device=chosen.device, dtype=chosen.dtype) % count
        return hidden, turns.view_as(chosen), *rest

    experts = [module for module in block.module.modules() if isinstance(module, Experts)]
    with hooked(module.register_forward_pre_hook(spread) for module in experts):
        yield


class _HaltedError(Exception):
    """Ends a run at the layer that showed that the producer cannot be scaled."""

    def __init__(self, reason: str, reader: nn.Module) -> None:
        super().__init__(reason)
        self.reason, self.reader = reason, reader


class _Signal:
    """Random numbers in place of the producer's output, and what they became without scaling."""

    def __init__(self, scope: Scope, producer: nn.Module) -> None:
        self.scope, self.producer = scope, producer
        real = scope.output_of(producer)
        self.channels = int(real.shape[-1])
        self.numbers = torch.randn(real.shape, generator=torch.Generator().manual_seed(0)).to(real)
        self.readers = [module for module in scope.module.modules() if module is not producer and columns(module)]
        self.inputs: dict[nn.Module, list[Tensor]] = {}
        self.outputs = self._run(self.numbers, self._record)

    def follow(self, rows: range) -> Found | Refusal:
        """Scale some of the producer's channels, and no others, and see where they come out."""
        found: dict[nn.Module, Tensor] = {}
        digits = 1
        while BASE**digits < len(rows):
            digits += 1
        for digit in range(digits):
            exponents = torch.zeros(self.channels, device=self.numbers.device)
            exponents[rows.start :] = (torch.arange(len(rows), device=exponents.device) // BASE**digit) % BASE + LOWEST
            read: dict[nn.Module, Tensor] = {}
            try:
                outputs = self._run(self.numbers * torch.exp2(exponents).to(self.numbers.dtype), self._divider(read))
            except _HaltedError as halted:
                return Refusal(halted.reason, (*found, halted.reader))
            if not all(close(new, old) for new, old in zip(outputs, self.outputs, strict=True)):
                return Refusal("and goes elsewhere too", tuple(read))
            if digit and read.keys() != found.keys():
                return Refusal("in parts", tuple(found | read))
            for reader, seen in read.items():
                found[reader] = found.get(reader, 0) + (seen - LOWEST) * BASE**digit
        if not found:
            return Refusal("nowhere")
        first, *others = found.values()
        if (
            any(not torch.equal(first, other) for other in others)
            or int(first.max()) >= len(rows)
            or int(first.min()) < 0
        ):
            return Refusal("and others in another order", tuple(found))
        number = first + rows.start
        in_order = len(number) == self.channels and torch.equal(
            number, torch.arange(self.channels, device=number.device)
        )
        return Found(tuple(found), None if in_order else number)

    def _run(self, numbers: Tensor, observe: Callable[[nn.Module, Tensor, int], Tensor | None]) -> list[Tensor]:
        times: dict[nn.Module, int] = {}

        def hook(reader: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not arguments or not isinstance(arguments[0], Tensor) or not arguments[0].is_floating_point():
                return None
            times[reader] = times.get(reader, -1) + 1
            changed = observe(reader, arguments[0], times[reader])
            return None if changed is None else (changed, *arguments[1:])

        handles = [reader.register_forward_pre_hook(hook) for reader in self.readers]
        handles.append(self.producer.register_forward_hook(lambda _module, _arguments, _output: numbers))
        with hooked(handles):
            return self.scope.run()

    def _record(self, reader: nn.Module, inputs: Tensor, _time: int) -> None:
        self.inputs.setdefault(reader, []).append(inputs.clone())

    def _divider(self, read: dict[nn.Module, Tensor]) -> Callable[[nn.Module, Tensor, int], Tensor | None]:
        def divide(reader: nn.Module, inputs: Tensor, time: int) -> Tensor | None:
            before = self.inputs[reader][time]
            if reader not in read and close(inputs, before):
                return None
            old, new = before.flatten(0, -2).float(), inputs.flatten(0, -2).float()
            exponents = ((old * new).sum(0) / old.square().sum(0)).log2().round()
            if not exponents.isfinite().all() or not close(new, old * torch.exp2(exponents)):
                raise _HaltedError("through something that is not linear", reader)
            if not torch.equal(read.setdefault(reader, exponents.long()), exponents.long()):
                raise _HaltedError("in more than one way", reader)
            return inputs / torch.exp2(exponents).to(inputs.dtype)

        return divide


def _may_produce(module: nn.Module, output: object) -> bool:
    """Whether a module has a weight whose outputs can be scaled.
    That is a linear layer, or a vector of one number for each output channel.
    """
    weight = module._parameters.get("weight")
    if weight is None or not isinstance(output, Tensor) or not output.is_floating_point():
        return False
    return isinstance(module, (nn.Linear, Conv1D)) or (weight.dim() == 1 and len(weight) == output.shape[-1])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
