"""The unmodified model beside the quantized one, so that layers make up for what was rounded before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Literal

from torch import Tensor, nn

from optkit.algorithms.earlier_errors import Mismatch
from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.algorithms.hessian import Hessian, mean_square
from optkit.model.blocks import Batch, BlockInputs, Call
from optkit.model.linear_layers import EXPERTS
from optkit.model.replaced_forward import hooked, replaced_forward
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import float_weight, put_weight_, weight_of
from optkit.stages.quantizing.calibration_products import bfloat16_forwards
from optkit.stages.quantizing.hessians import AllSeenError, collect_hessians, load_kernels, refuse_infinite, turns_of
from optkit.stages.quantizing.pruned_zeros import held_zeros

Forwards = dict[nn.Module, Callable[[Tensor], Tensor]]


class EarlierErrors:
    """Moves the weights of each layer by a share of what would make up for the errors before it.

    Each layer sees its inputs in both models. Outputs that are added to the hidden states make up
    for what these lack too. Experts see other tokens in each model, and stay, as do layers that are
    rounded to nearest. On CPUs that multiply bfloat16 faster, products in the unmodified model are of
    bfloat16, and so its hidden states, each layer's target, are rounded.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        inputs: BlockInputs,
        share: float,
        damping: float,
        equal_tokens: bool,
        keep_zeros: bool | Literal["auto"],
        stays: Callable[[str], bool],
    ) -> None:
        """`inputs`: what goes into the first block of both models; `stays`: whether a layer is to be
        rounded to nearest, as it is.
        """
        load_kernels(inputs.device.type)
        self.skeleton, self.share, self.damping = skeleton, share, damping
        self.equal_tokens, self.keep_zeros, self.stays = equal_tokens, keep_zeros, stays
        self.hidden = inputs.copied()
        """What the unmodified model has in front of the block that was entered, or behind it once it was left."""
        self._weights: dict[nn.Module, Tensor] = {}
        self._forwards: Forwards = {}
        self._sums: dict[str, nn.Module | None] = {}
        self._parts: dict[nn.Module, set[str]] = {}
        self._moved: set[str] = set()
        self._ran: dict[bool, dict[tuple[nn.Module, int], Any]] = {}
        self._left = 0

    def enter_(self, index: int, inputs: BlockInputs, modules: Mapping[str, nn.Module]) -> None:
        """Keep the float weights of a loaded block. Blocks that a run before this one finished run again."""
        for finished in range(self._left, index):
            with self.skeleton.loaded(self.skeleton.blocks[finished], str(inputs.device), ""):
                self._begin(finished, {})
                self.leave_(finished, inputs)
        self._begin(index, modules)
        batch = inputs.batches[0]
        self._sums = added_to(self.skeleton, index, inputs.at(batch, self.hidden), batch.calls[index], modules)

    def _begin(self, index: int, modules: Mapping[str, nn.Module]) -> None:
        block = self.skeleton.blocks[index]
        self._weights = {module: weight_of(module).detach().clone() for module in modules.values()}
        self._forwards = self._now(index)
        layers = set(modules.values())
        inside = {part: layers.intersection(part.modules()) for part in block.module.children() if part not in layers}
        names = {module: name for name, module in modules.items()}
        self._parts = {part: {names[each] for each in held} for part, held in inside.items() if held}
        self._moved, self._ran = set(), {True: {}, False: {}}

    def turns(self, index: int, inputs: BlockInputs, modules: Mapping[str, nn.Module]) -> list[list[str]]:
        """Return the layers of a block in the order in which they are rounded: those that stay are together."""
        found = turns_of(self.skeleton, index, inputs, modules)
        moving = [[name for name in turn if not self._stays(name)] for turn in found]
        return [turn for turn in (*moving, [name for turn in found for name in turn if self._stays(name)]) if turn]

    def move_(self, index: int, inputs: BlockInputs, layers: Mapping[str, nn.Module]) -> dict[str, Hessian]:
        """Move the weights of layers whose inputs do not depend on each other, and return their Hessians."""
        alone = {name: module for name, module in layers.items() if self._stays(name)}
        moving = {name: module for name, module in layers.items() if name not in alone}
        found: dict[str, Mismatch] = {}
        forwards = self._now(index)
        both = zip(inputs.each(), inputs.each(self.hidden), strict=True) if moving else ()
        for number, ((batch, hidden), (_, unmodified)) in enumerate(both):
            call = batch.calls[index]
            with replaced_forward(forwards):
                given, sums = self._seen(index, number, hidden, call, moving)
            with self._unmodified():
                wanted, wanted_sums = self._seen(index, number, unmodified, call, moving, unmodified=True)
            first: dict[int, str] = {}
            for name, rows in given.items():
                added = name in self._sums
                owner = name if added else first.setdefault(id(rows), name)
                if owner != name:
                    found[name] = found[owner]
                    continue
                decides = (wanted_sums[name] if added else rows).flatten(0, -2)
                sizes = mean_square(decides) if self.equal_tokens else None
                lacking = (wanted_sums[name].float() - sums[name].float()).flatten(0, -2) if added else None
                total = found.setdefault(name, Mismatch(rows.shape[-1], rows.device))
                total.add_pair(rows.flatten(0, -2), wanted[name].flatten(0, -2), sizes, lacking)
        for name, total in found.items():
            refuse_infinite(total.matrix(), name, self.skeleton)
            if total.tokens < FEW_TOKENS:
                continue
            weight = float_weight(layers[name])
            moved = total.moved(weight, self.share, self.damping)
            zeros = held_zeros([weight], self.keep_zeros or "auto")
            put_weight_(layers[name], moved if zeros is None else moved.masked_fill(zeros, 0))
        self._moved |= set(layers)
        return {**found, **collect_hessians(self.skeleton, index, inputs, alone, self.equal_tokens)}

    def leave_(self, index: int, inputs: BlockInputs) -> None:
        """Run what is left to run of the unmodified block. The modules have to compute with plain weights meanwhile."""
        numbers = count()

        def run(batch: Batch, hidden: Tensor) -> Tensor:
            with self._skipping(next(numbers), unmodified=True):
                return self.skeleton.run_block(index, hidden, batch.calls[index])

        with self._unmodified():
            inputs.replace_(run, self.hidden)
        self._ran = {}
        self._left = index + 1

    def _now(self, index: int) -> Forwards:
        """Return what the layers compute by with the weights that they have now, if not by their own means."""
        return bfloat16_forwards(self.skeleton.linears(self.skeleton.blocks[index]).values())

    def _stays(self, name: str) -> bool:
        return EXPERTS in name or self.stays(name)

    def _seen(
        self,
        index: int,
        number: int,
        hidden: Tensor,
        call: Call,
        layers: Mapping[str, nn.Module],
        unmodified: bool = False,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what each layer is given of a batch with a number, and what its outputs are added to.

        Nothing behind that runs, and no part of the block runs again whose layers do not change any more:
        in the unmodified model those of this turn neither.
        """
        sources = {name: self._sums[name] for name in layers if name in self._sums}
        given: dict[nn.Module, Tensor] = {}
        watched = {*layers.values(), *(source for source in sources.values() if source)}
        ran, final = self._ran[unmodified], self._moved.union(layers if unmodified else ())
        ending = {part for part, names in self._parts.items() if names <= final and (part, number) not in ran}
        waiting = watched | (ending if unmodified else set())

        def arrive(module: nn.Module) -> None:
            waiting.discard(module)
            if not waiting:
                raise AllSeenError

        def enter(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and isinstance(arguments[0], Tensor):
                given[module] = arguments[0]
                arrive(module)

        def end(module: nn.Module, _: Any, output: Any) -> None:
            ran[module, number] = output
            arrive(module)

        handles = [module.register_forward_pre_hook(enter) for module in watched]
        handles += [part.register_forward_hook(end) for part in ending]
        with self._skipping(number, unmodified), hooked(handles), suppress(AllSeenError):
            self.skeleton.run_block(index, hidden, call)
        sums = {name: given[source] if source else hidden for name, source in sources.items()}
        return {name: given[module] for name, module in layers.items() if module in given}, sums

    def _skipping(self, number: int, unmodified: bool) -> AbstractContextManager[None]:
        """Let parts of the block that ran on a batch return what they did."""
        ran = {part: left for (part, which), left in self._ran[unmodified].items() if which == number}
        return replaced_forward({part: partial(_returned, left) for part, left in ran.items()})

    @contextmanager
    def _unmodified(self) -> Iterator[None]:
        now = {module: weight_of(module).data for module in self._weights}
        try:
            for module, weight in self._weights.items():
                weight_of(module).data = weight
            with replaced_forward(self._forwards):
                yield
        finally:
            for module, weight in now.items():
                weight_of(module).data = weight


def added_to(
    skeleton: Skeleton, index: int, hidden: Tensor, call: Call, layers: Mapping[str, nn.Module]
) -> dict[str, nn.Module | None]:
    """Return the layers of a loaded block whose outputs are added to the hidden states, and as which
    module's input these stand before the sum; None: as the block's.

    Found by running the block: the sum is what the block returns, or what another module is given.
    """
    given: dict[nn.Module, Tensor] = {}
    made: dict[str, Tensor] = {}
    names = {module: name for name, module in layers.items()}

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape == hidden.shape:
            made[names[module]] = output

    handles = [module.register_forward_hook(keep) for module in layers.values()]
    handles += [each.register_forward_pre_hook(_keep(given)) for each in skeleton.blocks[index].module.modules()]
    with hooked(handles):
        left = skeleton.run_block(index, hidden, call)
    found: dict[str, nn.Module | None] = {}
    stream, source = hidden if call.added is None else hidden + call.added, None
    for name, output in made.items():
        total = stream + output
        behind = next((module for module, seen in given.items() if _same(seen, total)), None)
        if behind is not None or _same(left, total):
            found[name], stream, source = source, total, behind
    return found if call.added is None else {}


def _keep(given: dict[nn.Module, Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def observe(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            given[module] = arguments[0]

    return observe


def _returned(output: Any, *_: Any, **__: Any) -> Any:
    return output


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
