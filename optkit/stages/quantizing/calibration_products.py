"""How a CPU computes while a block runs on the calibration text, which is most of what GPTQ does.

What Hessians are summed of may be off by a thousandth of itself, as such errors cancel over many tokens;
what the next block is given may not. So may the unmodified model's states beside it (`earlier_errors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import pack
from optkit.environment import cpu_has
from optkit.kernels.cpu.coded_linear import CodedLinear, why_not_coded
from optkit.kernels.cpu.decoding import why_not_step
from optkit.kernels.cpu.prompts import PromptPass
from optkit.kernels.cpu.structures import Structures
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.blocks import BlockInputs, Call
from optkit.model.replaced_forward import replaced_forward
from optkit.model.skeleton import Skeleton

TOKENS_AT_ONCE = 1024
"""Of a run on a CPU: activations of more leave its cache, and took 8% more time on an EPYC."""


def sequences_at_once(batch: int, length: int, device: str) -> int:
    """Return how many sequences of a length run through a block together, of a batch."""
    return batch if device != "cpu" else max(1, min(batch, TOKENS_AT_ONCE // length))


def in_bfloat16(layers: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
    """Let float32 linear layers round weights and inputs to bfloat16, on a CPU that multiplies these faster.
    Sums are in float32.
    """
    return replaced_forward(bfloat16_forwards(layers.values()))


def bfloat16_forwards(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Return what `in_bfloat16` lets layers compute by, with the weights that they have now."""
    if not cpu_has("avx512_bf16"):
        return {}
    return {module: _rounding(module) for module in modules if _is_plain(module)}


def in_codes(layers: Mapping[str, nn.Module], quantized: Mapping[str, QuantizedWeight]) -> AbstractContextManager[None]:
    """Let float32 linear layers on a CPU compute with their codes, by the kernels of the finished model.
    These round activations to 16 bits, a scale for each group.
    """
    plain = {name: module for name, module in layers.items() if name in quantized and _is_plain(module)}
    coded = {module: _coded(quantized[name], module) for name, module in plain.items()}
    return replaced_forward({module: each for module, each in coded.items() if each is not None})


def in_cpp(skeleton: Skeleton, index: int, inputs: BlockInputs) -> AbstractContextManager[None]:
    """Let a loaded block on a CPU compute all beside its products in C++, if `is_prompt`."""
    if not is_prompt(skeleton, index, inputs):
        return replaced_forward({})
    block = skeleton.blocks[index].module
    return replaced_forward(
        {block: lambda hidden, **beside: prompt_pass(skeleton, block, hidden, beside).hidden(hidden)}
    )


def is_prompt(skeleton: Skeleton, index: int, inputs: BlockInputs) -> bool:
    """Whether a block on a CPU computes what the C++ of prompts does: one of the Llama family, in float32,
    without a mask of its own.
    """
    known = inputs.device.type == "cpu" and inputs.hidden.dtype == torch.float32
    return (
        known and not why_not_step(skeleton.model) and all(_is_plain_call(each.calls[index]) for each in inputs.batches)
    )


def prompt_pass(skeleton: Skeleton, block: nn.Module, hidden: Tensor, beside: Mapping[str, Any]) -> PromptPass:
    """Return what runs a block on hidden states, float32 [batch, length, width], called with this beside them."""
    (batch, length, _), (cosines, sines) = hidden.shape, beside["position_embeddings"]
    sizes = batch, skeleton.model.config.num_key_value_heads, length, cosines.shape[-1]
    structures = Structures(skeleton.model, [block], hidden.new_empty(1, 2, *sizes), cosines[0], sines[0])
    return PromptPass([block], structures)


def _is_plain_call(call: Call) -> bool:
    mask, embeddings = (call.keywords.get(name) for name in ("attention_mask", "position_embeddings"))
    return (
        not call.arguments
        and call.added is None
        and mask is None
        and embeddings is not None
        and len(embeddings[0]) == 1
    )


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _rounding(module: nn.Module) -> Callable[[Tensor], Tensor]:
    assert isinstance(module, nn.Linear)
    weight, bias = module.weight.bfloat16(), None if module.bias is None else module.bias.bfloat16()
    return lambda given: F.linear(given.bfloat16(), weight, bias).float()


def _coded(weight: QuantizedWeight, module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    inputs, bias = weight.codes.shape[1], module.bias
    packed = PackedWeight(pack(weight.codes, weight.bits, 1), weight.scales, weight.zeros, None, weight.bits, inputs)
    if why_not_coded(packed, "cpu") is not None:
        return None
    return CodedLinear(packed, None if bias is None else bias.detach(), torch.float32).forward  # type: ignore[arg-type, operator]
