"""Run one decoder block on the calibration tokens and sum each layer's Hessian.
Layers with the same input share it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from optkit.algorithms.hessian import Hessian
from optkit.errors import StageError
from optkit.model.output_layer import HEAD

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.model.blocks import Batch, BlockInputs
    from optkit.model.skeleton import Skeleton
    from optkit.stages.quantizing.streaming import QuantizationJob


class Sum(Protocol):
    """What is kept of the inputs of a layer."""

    def add(self, inputs: Tensor) -> None:
        """Take in float [..., in]."""
        ...


S = TypeVar("S", bound=Sum)


class _AllSeenError(Exception):
    """Ends the run of a block once every layer has its input: nothing after the last one is needed."""


class HessianCollector:
    """Sums the Hessians of some layers of a loaded block."""

    def __init__(self, skeleton: Skeleton, index: int, inputs: BlockInputs, equal_tokens: bool) -> None:
        self.skeleton, self.index, self.inputs, self.equal_tokens = skeleton, index, inputs, equal_tokens

    def collect(self, layers: Mapping[str, nn.Module], batches: Sequence[Batch] | None = None) -> dict[str, Hessian]:
        """Return the Hessian of each layer that saw a token.
        The order is that in which they were first called.

        The very same Hessian is returned for layers that were given the same tensor (q, k and v;
        gate and up).
        """
        hessians: dict[str, Hessian] = {}
        for batch in self.inputs.batches if batches is None else batches:
            self._observe(batch, layers, hessians)
        return hessians

    def turns(self, layers: Mapping[str, nn.Module]) -> list[list[str]]:
        """Return the layers in the order of true-sequential GPTQ.
        Those whose input does not depend on each other are together.

        Experts stand side by side, so layers whose names differ by an index alone have the same
        turn.
        """
        first = self.collect(layers, self.inputs.batches[:1])
        shared: dict[int, str] = {}
        turn_of = {}
        for name, hessian in first.items():
            turn_of[without_indices(name)] = shared.setdefault(id(hessian), without_indices(name))
        turns: dict[str, list[str]] = {}
        for name in (*first, *(name for name in layers if name not in first)):
            key = turn_of.get(without_indices(name), "")
            turns.setdefault(turn_of.get(key, key), []).append(name)
        return list(turns.values())

    def advance_(self) -> None:
        """Replace the inputs of the block by its outputs."""
        for batch in self.inputs.batches:
            self.inputs.hidden[batch.rows] = self.skeleton.run_block(
                self.index, self.inputs.hidden[batch.rows], batch.calls[self.index]
            )

    def _observe(self, batch: Batch, layers: Mapping[str, nn.Module], hessians: dict[str, Hessian]) -> None:
        watch_inputs(
            lambda: self.skeleton.run_block(self.index, self.inputs.hidden[batch.rows], batch.calls[self.index]),
            layers,
            hessians,
            lambda inputs: Hessian(inputs.shape[-1], inputs.device, self.equal_tokens),
        )


def watch_inputs(
    run: Callable[[], Any], layers: Mapping[str, nn.Module], sums: dict[str, S], start: Callable[[Tensor], S]
) -> None:
    """Run something and add the inputs of layers to their `sums`.
    `start` begins them with a layer's first input.

    The very same sum is kept for layers that were given the same tensor. The run ends once every
    layer was called.
    """
    seen: set[str] = set()
    last: list[tuple[Tensor, S]] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def observe(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            inputs: Tensor = arguments[0]
            if last and last[0][0] is inputs and sums.get(name, last[0][1]) is last[0][1]:
                sums[name] = last[0][1]
            else:
                if name not in sums:
                    sums[name] = start(inputs)
                sums[name].add(inputs)
                last[:] = [(inputs, sums[name])]
            seen.add(name)
            if len(seen) == len(layers):
                raise _AllSeenError

        return observe

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in layers.items()]
    try:
        run()
    except _AllSeenError:
        pass
    finally:
        for handle in handles:
            handle.remove()


def finite_matrix(hessian: Hessian, name: str, skeleton: Skeleton) -> Tensor:
    """Return the mean of x x^T of a layer's inputs, float32 [in, in]. Raises StageError if they
    were NaN or Inf.
    """
    matrix = hessian.matrix()
    refuse_infinite(matrix, name, skeleton)
    return matrix


def refuse_infinite(summed: Tensor, name: str, skeleton: Skeleton) -> None:
    """Raise StageError if what was summed of a layer's inputs is NaN or Inf."""
    if not summed.isfinite().all():
        raise StageError(
            "the inputs of the layer are NaN or Inf on the calibration text",
            where=name,
            why=f"Activations do not fit {str(skeleton.dtype).removeprefix('torch.')}",
            remedy="Put `- cast: {dtype: bfloat16}` in front of this stage",
        )


def head_hessian(job: QuantizationJob, equal_tokens: bool) -> Hessian:
    """Return the Hessian of the output layer's inputs, and release what the last block returned.
    It has no tokens if nothing was kept.
    """
    device = job.context.device
    hessian = Hessian(job.selection.layers[HEAD].inputs, device, equal_tokens)
    inputs, job.inputs = job.inputs, None
    if inputs is not None:
        for given in job.skeleton.head_inputs(inputs, device):
            hessian.add(given)
    return hessian


def without_indices(name: str) -> str:
    """Return a name that layers have in common which differ by an index alone: experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
