"""Take fused experts apart.
transformers 5 holds the experts of a block in two 3-D parameters, checkpoints hold one matrix per
projection.

Quantizers work on `nn.Linear`, and inference engines expect the names of the checkpoint. So each
fused module becomes a list of experts made of Linears, named as on disk (`experts.3.w1` for
Mixtral, `experts.3.gate_proj` for Qwen and most others). The names are those that transformers
itself fuses from (`transformers.conversion_mapping`); the arithmetic is that of its eager experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

Gate = Callable[[Tensor], Tensor]
APART = re.compile(r"\.experts\.\d+\.")
FUSED_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Expert(nn.Module):
    """One feed-forward expert: `down(gate([first; second](x)))`.
    It has one input projection less if the model has no gate.
    """

    def __init__(self, inputs: dict[str, nn.Linear], down: tuple[str, nn.Linear], gate: Gate) -> None:
        super().__init__()
        self.input_names, self.down_name, self.gate = tuple(inputs), down[0], gate
        for name, linear in (*inputs.items(), down):
            self.add_module(name, linear)

    def forward(self, hidden: Tensor) -> Tensor:
        """float [tokens, hidden] -> float [tokens, hidden]."""
        projected = torch.cat([self.get_submodule(name)(hidden) for name in self.input_names], dim=-1)
        output: Tensor = self.get_submodule(self.down_name)(self.gate(projected))
        return output


class Experts(nn.ModuleList):
    """The experts of one block; each sees only the tokens that the router sends to it."""

    see_all = False
    """Each sees all tokens; what the router did not send to it leaves no trace in the output."""

    # compiled, each answer of the device would be code of its own
    @torch.compiler.disable(reason="which experts have tokens is asked of the device")  # type: ignore[untyped-decorator]
    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return float [tokens, hidden] of such states and their experts, [tokens, top_k]."""
        total, flat = torch.zeros_like(hidden), chosen.flatten()
        places = flat.argsort(stable=True)  # for all experts at once: each answer of a GPU has to be waited for
        counts = flat.bincount(minlength=len(self)).tolist()
        tokens, shares = (places // chosen.shape[1]).split(counts), weights.flatten()[places].split(counts)
        for expert, token, weight in zip(self, tokens, shares, strict=False):  # a choice may stand for no expert
            if len(token) or self.see_all:
                output = expert(hidden)[token] if self.see_all else expert(hidden[token])
                total.index_add_(0, token, (output * weight[:, None]).to(total.dtype))
        return total


def experts_in(module: nn.Module) -> list[Experts]:
    """Return what holds experts in a module."""
    return [each for each in module.modules() if isinstance(each, Experts)]


@contextmanager
def seeing_all(experts: Sequence[Experts]) -> Iterator[None]:
    """Let each expert see all tokens for a while."""
    for each in experts:
        each.see_all = True
    try:
        yield
    finally:
        for each in experts:
            each.see_all = False


@dataclass(frozen=True)
class _Leaves:
    """The names on disk of the matrices that are joined in one fused parameter, in order."""

    inputs: tuple[str, ...]
    down: str


def put_apart_(model: PreTrainedModel, stored: Iterable[str]) -> None:
    """Put in the place of joined experts what transformers has in a packed model, if they lie one by one."""
    if not any(APART.search(name) for name in stored):
        return
    for name, module in list(model.named_modules()):
        if found := MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(module).__name__):
            with torch.device("meta"):
                model.set_submodule(name, found["module_name"](model.config.get_text_config()).to(model.dtype))


def unfuse_experts_(model: nn.Module, stored: Container[str] = ()) -> dict[str, str]:
    """Replace fused experts by `Experts` with the same outputs; weights become views of the old.

    `stored` holds the parameter names that the checkpoint itself has in the fused form: these
    modules stay as they are. Returns those that stay fused: module name -> the reason.
    """
    converters = [item for item in get_model_conversion_mapping(model) if isinstance(item, WeightConverter)]
    fused: dict[str, str] = {}
    for name, module in [each for each in model.named_modules() if joined_matrices(each[1])]:
        leaves = _leaves(name, module, converters)
        if isinstance(leaves, str):
            fused[name] = leaves
        elif any(f"{name}.{leaf}" in stored for leaf, _ in module.named_parameters(recurse=False)):
            fused[name] = f"the checkpoint stores the experts joined ({_shapes(module)}), not one matrix for each"
        else:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _take_apart(module, leaves))
    return fused


def why_not_joined(module: Any) -> str:
    """Return why a module is not experts in two parameters of whole matrices, "" if it is."""
    shapes = _shapes(module)
    if (
        not (hasattr(module, "_apply_gate") and hasattr(module, "has_gate"))
        or getattr(module, "down_proj", None) is None
    ):
        return f"the weights have three dimensions ({shapes}), in a layout that is not known to be that of experts"
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if {leaf for leaf, _ in module.named_parameters(recurse=False)} != {first, "down_proj"}:
        return f"the fused experts have more than their matrices ({shapes})"
    if module.is_transposed or (module.has_gate and not module.is_concatenated):
        return f"the fused experts ({shapes}) are transposed or interleaved"
    return ""


def joined_matrices(module: nn.Module) -> list[Tensor]:
    """Return a module's own parameters of three dimensions, as experts have that are joined."""
    own = () if isinstance(module, FUSED_CONVOLUTIONS) else module.parameters(recurse=False)
    return [each for each in own if each.dim() == 3 and min(each.shape) > 1]


def _leaves(name: str, module: Any, converters: list[WeightConverter]) -> _Leaves | str:
    """Return the names of an expert's projections, or why there are none."""
    shapes = _shapes(module)
    if reason := why_not_joined(module):
        return reason
    first = "gate_up_proj" if module.has_gate else "up_proj"
    found: dict[str, tuple[str, ...]] = {}
    for converter in converters:
        patterns = [pattern.rpartition("*.")[2].replace("\\", "").rstrip("$") for pattern in converter.source_patterns]
        targets = {converter.rename_source_key(f"{name}.0.{pattern}")[0] for pattern in patterns}
        operations = [
            (type(operation), operation.dim) for operation in converter.operations if hasattr(operation, "dim")
        ]
        joined = [(MergeModulelist, 0)] if len(patterns) == 1 else [(MergeModulelist, 0), (Concatenate, 1)]
        plain = len(operations) == len(converter.operations) and operations == joined
        for parameter in (first, "down_proj"):
            if (
                targets == {f"{name}.{parameter}"}
                and plain
                and all(pattern.endswith(".weight") for pattern in patterns)
            ):
                found[parameter] = tuple(pattern.removesuffix(".weight") for pattern in patterns)
    inputs, down = found.get(first, ()), found.get("down_proj", ())
    if len(inputs) != 1 + module.has_gate or len(down) != 1:
        return f"the architecture stores its experts joined ({shapes}), not one matrix for each"
    return _Leaves(inputs, down[0])


def _take_apart(module: Any, leaves: _Leaves) -> Experts:
    # [experts, inputs * intermediate, hidden]
    joined: Tensor = (module.gate_up_proj if module.has_gate else module.up_proj).detach()
    down: Tensor = module.down_proj.detach()  # [experts, hidden, intermediate]
    for leaf in [leaf for leaf, _ in module.named_parameters(recurse=False)]:
        delattr(module, leaf)
    gate: Gate = module._apply_gate if module.has_gate else module.act_fn
    experts = []
    for matrix, last in zip(joined, down, strict=True):
        inputs = zip(leaves.inputs, matrix.chunk(len(leaves.inputs)), strict=True)
        experts.append(Expert({leaf: _linear(part) for leaf, part in inputs}, (leaves.down, _linear(last)), gate))
    return Experts(experts)


def stacked_apart(module: Any) -> Experts:
    """Return the experts of a module whose matrices are transposed and have biases (gpt-oss), with its
    outputs. Weights and biases are views of its own.
    """
    parts = []
    for index in range(len(module.gate_up_proj)):
        first, last = (
            _linear(getattr(module, leaf)[index].T, getattr(module, f"{leaf}_bias")[index])
            for leaf in ("gate_up_proj", "down_proj")
        )
        parts.append(Expert({"gate_up_proj": first}, ("down_proj", last), module._apply_gate))
    return Experts(parts)


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _shapes(module: nn.Module) -> str:
    return ", ".join(f"{leaf} {list(parameter.shape)}" for leaf, parameter in module.named_parameters(recurse=False))
