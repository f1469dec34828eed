"""Run one decoder block on the calibration tokens and sum each layer's Hessian.
Layers with the same input share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from optkit.algorithms.hessian import Hessian, fits_tensor_cores
from optkit.common.grouping import grouped
from optkit.environment import cpu_has
from optkit.errors import StageError
from optkit.kernels.cpu.native import why_not_native
from optkit.model.blocks import BlockInputs
from optkit.model.calibration_memory import hessian_turns, no_such_experts
from optkit.model.experts import experts_in, seeing_all
from optkit.model.linear_layers import EXPERTS
from optkit.model.output_layer import HEAD
from optkit.model.replaced_forward import hooked
from optkit.model.shape import without_indices
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import inputs_of, weight_of
from optkit.model.together import Together
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.quantizing.calibration_products import in_bfloat16, in_cpp
from optkit.stages.quantizing.job import QuantizationJob


class Sum(Protocol):
    """What is kept of the inputs of a layer."""

    tokens: int

    def add(self, inputs: Tensor) -> None:
        """Take in float [..., in]."""

    def add_up_(self, together: Together, tokens: int) -> None:
        """Become what all processes took, so many tokens."""


S = TypeVar("S", bound=Sum)


class _Tokens:
    """Keeps of inputs how many they were."""

    tokens = 0

    def add(self, inputs: Tensor) -> None:
        self.tokens += inputs[..., 0].numel()

    def add_up_(self, together: Together, tokens: int) -> None:
        self.tokens = tokens


class AllSeenError(Exception):
    """Ends the run of a block once every layer has its input: nothing after the last one is needed."""


def load_kernels(device: str) -> None:
    """Load what sums and rounds on a CPU, if need be compile it. Whoever sums does so before, so that the first
    block of a process has the kernels of all others: a run that goes on gives the same bytes.
    """
    if device == "cpu":
        why_not_native()


def collect_hessians(
    skeleton: Skeleton, index: int, inputs: BlockInputs, layers: Mapping[str, nn.Module], equal_tokens: bool
) -> dict[str, Hessian]:
    """Return the Hessian of each layer of a loaded block that saw a token.
    The order is that in which they were first called.

    The very same Hessian is returned for layers that were given the same tensor (q, k and v;
    gate and up).
    """
    load_kernels(inputs.device.type)

    def start(given: Tensor) -> Hessian:
        return Hessian(given.shape[-1], given.device, equal_tokens, rounded=True)

    with in_bfloat16(layers), in_cpp(skeleton, index, inputs):
        return watch_inputs(skeleton, index, inputs, layers, start)


def in_turns(skeleton: Skeleton, layers: Mapping[str, nn.Module]) -> list[dict[str, nn.Module]]:
    """Return layers of a loaded block in turns whose Hessians there is room for, as `hessian_turns` does.
    Experts that see all tokens share theirs.
    """
    inputs = {name: inputs_of(layer) for name, layer in layers.items()}
    turns = [list(layers)] if skeleton.experts_see_all else hessian_turns(inputs)
    return [{name: layers[name] for name in turn} for turn in turns]


def details_of_sums(device: str, dtype: torch.dtype, equal_tokens: bool) -> dict[str, str]:
    """Return for the report what the fields, and so the key, do not say: that the device rounds what
    Hessians of a model in `dtype` are summed of. A CPU does so with a compiler or without.
    """
    if device == "cpu":
        rounds = cpu_has("avx512_bf16")
    else:
        rounds = equal_tokens and fits_tensor_cores(torch.empty(0, dtype=dtype, device=device))
    return {"hessians_of": "bfloat16"} if rounds else {}


def read_text(
    skeleton: Skeleton, text: Calibration, context: Context, stage: str, begun: Future[Any] | None = None
) -> Tensor | Any:
    """Return what a stage is calibrated on, as `Calibration.inputs` does, while the first weights are read.
    `begun`: both are being read. Let every expert see all of it if the text says so. Raises StageError if the model
    has none that can.
    """
    if not begun:
        skeleton.read_first(context.device)
    skeleton.experts_see_all = text.experts == "all"
    if skeleton.experts_see_all and not experts_in(skeleton.model):
        raise no_such_experts(f"{stage}.calibration.experts", next(iter(skeleton.fused.values()), "It is dense"))
    if begun:
        return begun.result()
    return text.inputs(skeleton.checkpoint.directory, context.data, context.trust_remote_code)


def tokens_of_experts(layers: Iterable[str], seen: Mapping[str, Hessian]) -> dict[str, list[int]]:
    """Return the tokens that each expert saw, by what holds the experts, of the layers of a block."""
    found: dict[str, dict[str, int]] = {}
    for name in layers:
        holder, experts, rest = name.partition(EXPERTS)
        if experts:
            tokens = seen[name].tokens if name in seen else 0
            found.setdefault(f"{holder}{EXPERTS}".rstrip("."), {}).setdefault(rest.partition(".")[0], tokens)
    return {holder: list(each.values()) for holder, each in found.items()}


def turns_of(skeleton: Skeleton, index: int, inputs: BlockInputs, layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the layers of a loaded block in the order of true-sequential GPTQ.
    Those whose input does not depend on each other are together.

    Experts stand side by side, so layers whose names differ by an index alone have the same turn.
    """
    first = watch_inputs(skeleton, index, replace(inputs, batches=inputs.batches[:1]), layers, lambda _: _Tokens())
    shared: dict[int, str] = {}
    turn_of = {}
    for name, seen in first.items():
        turn_of[without_indices(name)] = shared.setdefault(id(seen), without_indices(name))

    def turn(name: str) -> str:
        key = turn_of.get(without_indices(name), "")
        return turn_of.get(key, key)

    return list(grouped((*first, *(name for name in layers if name not in first)), turn).values())


def watch_inputs(
    skeleton: Skeleton, index: int, inputs: BlockInputs, layers: Mapping[str, nn.Module], start: Callable[[Tensor], S]
) -> dict[str, S]:
    """Run a loaded block on all batches, and return the sums of the inputs of its layers.
    `start` begins them with a layer's first input; a layer that saw no token has none.

    The very same sum is kept for layers that were given the same tensor, one after another or in
    experts that see all tokens. A run ends once every layer was called.
    """
    sums: dict[str, S] = {}
    experts = experts_in(skeleton.blocks[index].module)
    with seeing_all(experts if skeleton.experts_see_all else ()):
        for batch, hidden in inputs.each() if layers else ():
            run = partial(skeleton.run_block, index, hidden, batch.calls[index])
            _watch_run(run, layers, sums, start, others_are_zero=not experts)
    return sums if inputs.together.count == 1 else _added_up(sums, layers, start, inputs)


def _added_up(
    sums: Mapping[str, S], layers: Mapping[str, nn.Module], start: Callable[[Tensor], S], inputs: BlockInputs
) -> dict[str, S]:
    """Return the sums over what all processes saw, for each layer that one of them called.
    Layers share a sum if they do so in every process.
    """
    together = inputs.together
    numbers = {id(each): number for number, each in enumerate(sums.values())}
    told = together.gather({name: (numbers[id(each)], each.tokens) for name, each in sums.items()})

    def key(name: str) -> tuple[int | None, ...]:
        return tuple(each[name][0] if name in each else None for each in told)

    found: dict[str, S] = {}
    used: set[int] = set()
    for names in grouped((name for each in told for name in each if name in layers), key).values():
        name = names[0]
        total = sums.get(name)
        if total is None:
            device = weight_of(layers[name]).device
            total = start(inputs.hidden.new_empty(0, inputs_of(layers[name]), device=device))
        elif id(total) in used:
            total = deepcopy(total)
        used.add(id(total))
        found |= dict.fromkeys(names, total)
    for name, total in {id(each): (name, each) for name, each in found.items()}.values():
        total.add_up_(together, sum(each[name][1] for each in told if name in each))
    return found


def _watch_run(
    run: Callable[[], Any],
    layers: Mapping[str, nn.Module],
    sums: dict[str, S],
    start: Callable[[Tensor], S],
    others_are_zero: bool,
) -> None:
    """Run a block once. `others_are_zero`: each of its experts is given the tokens of others as zeros."""
    seen: set[str] = set()
    latest: dict[str, tuple[Tensor, S]] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        alike = without_indices(name) if EXPERTS in name else ""

        def observe(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            inputs: Tensor = arguments[0]
            for given, total in (latest[key] for key in ("", alike) if key in latest):
                if given is inputs and sums.get(name, total) is total:
                    sums[name] = total
                    break
            else:
                if name not in sums:
                    sums[name] = start(inputs)
                sums[name].add(inputs[inputs.any(-1)] if alike and others_are_zero else inputs)
            latest[""] = latest[alike] = (inputs, sums[name])
            seen.add(name)
            if len(seen) == len(layers):
                raise AllSeenError

        return observe

    watched = hooked(module.register_forward_pre_hook(hook(name)) for name, module in layers.items())
    with watched, suppress(AllSeenError):
        run()


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
    device, together = job.context.device, job.together
    load_kernels(device)  # a run that goes on behind the last block has collected nothing
    hessian = Hessian(job.selection.layers[HEAD].inputs, device, equal_tokens, rounded=True)
    inputs, job.inputs = job.inputs, None
    if inputs is not None:
        for given in job.skeleton.head_inputs(inputs, device):
            hessian.add(given)
    hessian.add_up_(together, sum(together.gather(hessian.tokens)))
    return hessian
