"""The unmodified model beside the quantized one, so that layers make up for what was rounded before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from optkit.algorithms.earlier_errors import Mismatch, equal_counts
from optkit.algorithms.hessian import Hessian
from optkit.model.blocks import BlockInputs, Call
from optkit.model.linear_layers import EXPERTS
from optkit.model.memory import room_for_states
from optkit.model.replaced_forward import hooked
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import float_weight, put_weight_
from optkit.stages.quantizing.hessians import collect_hessians, refuse_infinite
from optkit.stages.quantizing.input_ranges import FEW_TOKENS
from optkit.stages.quantizing.pruned_zeros import held_zeros


class EarlierErrors:
    """Moves the weights of each layer by a share of what would make up for the errors before it.

    Each layer sees its inputs in both models. Outputs that are added to the hidden states make up
    for what these lack too. Experts see other tokens in each model, and stay, as do layers that are
    rounded to nearest.
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
        self.skeleton, self.share, self.damping = skeleton, share, damping
        self.equal_tokens, self.keep_zeros, self.stays = equal_tokens, keep_zeros, stays
        self.hidden = room_for_states(inputs.hidden, inputs.hidden.shape).copy_(inputs.hidden)
        """What the unmodified model has in front of the block that was entered, or behind it once it was left."""
        self._weights: dict[nn.Module, Tensor] = {}
        self._sums: dict[str, nn.Module | None] = {}
        self._left = 0

    def enter_(self, index: int, inputs: BlockInputs, modules: Mapping[str, nn.Module]) -> None:
        """Keep the float weights of a loaded block. Blocks that a run before this one finished run again."""
        for finished in range(self._left, index):
            with self.skeleton.loaded(self.skeleton.blocks[finished], str(self.hidden.device), ""):
                self.skeleton.advance_(finished, inputs, self.hidden)
        self._weights = {module: float_parameter(module).detach().clone() for module in modules.values()}
        batch = inputs.batches[0]
        self._sums = added_to(self.skeleton, index, self.hidden[batch.rows], batch.calls[index], modules)
        self._left = index

    def move_(self, index: int, inputs: BlockInputs, layers: Mapping[str, nn.Module]) -> dict[str, Hessian]:
        """Move the weights of layers whose inputs do not depend on each other, and return their Hessians."""
        alone = {name: module for name, module in layers.items() if EXPERTS in name or self.stays(name)}
        moving = {name: module for name, module in layers.items() if name not in alone}
        found: dict[str, Mismatch] = {}
        for batch in inputs.batches if moving else ():
            call, hidden, unmodified = batch.calls[index], inputs.hidden[batch.rows], self.hidden[batch.rows]
            given, sums = self._seen(index, hidden, call, moving)
            with self._unmodified():
                wanted, wanted_sums = self._seen(index, unmodified, call, moving)
            first: dict[int, str] = {}
            for name, rows in given.items():
                added = name in self._sums
                owner = name if added else first.setdefault(id(rows), name)
                if owner != name:
                    found[name] = found[owner]
                    continue
                total = found.setdefault(name, Mismatch(rows.shape[-1], rows.device))
                counts = self._counts(wanted_sums[name] if added else rows)
                lacking = (wanted_sums[name].float() - sums[name].float()).flatten(0, -2) if added else None
                total.add_pair(rows.flatten(0, -2), wanted[name].flatten(0, -2), counts, lacking)
        for name, total in found.items():
            refuse_infinite(total.matrix(), name, self.skeleton)
            if total.tokens < FEW_TOKENS:
                continue
            weight = float_weight(layers[name])
            moved = total.moved(weight, self.share, self.damping)
            zeros = held_zeros([weight], self.keep_zeros or "auto")
            put_weight_(layers[name], moved if zeros is None else moved.masked_fill(zeros, 0))
        return {**found, **collect_hessians(self.skeleton, index, inputs, alone, self.equal_tokens)}

    def leave_(self, index: int, inputs: BlockInputs) -> None:
        """Run the unmodified block. The modules have to compute with plain weights meanwhile."""
        with self._unmodified():
            self.skeleton.advance_(index, inputs, self.hidden)
        self._left = index + 1

    def _counts(self, rows: Tensor) -> Tensor:
        flat = rows.flatten(0, -2)
        return equal_counts(flat) if self.equal_tokens else flat.new_ones(len(flat), 1).float()

    def _seen(
        self, index: int, hidden: Tensor, call: Call, layers: Mapping[str, nn.Module]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what each layer is given, and what its outputs are added to."""
        sources = {name: self._sums[name] for name in layers if name in self._sums}
        given: dict[nn.Module, Tensor] = {}
        watched = {*layers.values(), *(source for source in sources.values() if source)}
        with hooked(module.register_forward_pre_hook(_keep(given)) for module in watched):
            self.skeleton.run_block(index, hidden, call)
        sums = {name: given[source] if source else hidden for name, source in sources.items()}
        return {name: given[module] for name, module in layers.items() if module in given}, sums

    @contextmanager
    def _unmodified(self) -> Iterator[None]:
        now = {module: float_parameter(module).data for module in self._weights}
        try:
            for module, weight in self._weights.items():
                float_parameter(module).data = weight
            yield
        finally:
            for module, weight in now.items():
                float_parameter(module).data = weight


def float_parameter(module: nn.Module) -> Tensor:
    """Return the weight of a layer as it lies in the module."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


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


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
