"""How a CPU computes while a block runs on the calibration text, which is most of what GPTQ does.

What Hessians are summed of may be off by a thousandth of itself, as such errors cancel over many tokens;
what the next block is given may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.kernels.cpu.coded_linear import CodedLinear, why_not_coded
from optkit.kernels.cpu.decoding import why_not_step
from optkit.kernels.cpu.prompts import PromptPass
from optkit.kernels.cpu.structures import Structures
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.blocks import BlockInputs
from optkit.model.replaced_forward import replaced_forward
from optkit.model.skeleton import Skeleton

if TYPE_CHECKING:
    from optkit.algorithms.grid import QuantizedWeight

TOKENS_AT_ONCE = 1024
"""Of a run on a CPU: activations of more leave its cache, and took 8% more time on an EPYC."""


def sequences_at_once(batch: int, length: int, device: str) -> int:
    """Return how many sequences of a length run through a block together, of a batch."""
    return batch if device != "cpu" else max(1, min(batch, TOKENS_AT_ONCE // length))


def in_bfloat16(layers: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
    """Let float32 linear layers round weights and inputs to bfloat16, on a CPU that multiplies these faster.
    Sums are in float32.
    """
    modules = layers.values() if torch.cpu._is_avx512_bf16_supported() else ()  # type: ignore[no-untyped-call]
    return replaced_forward({module: _rounding(module) for module in modules if _is_plain(module)})


def in_codes(layers: Mapping[str, nn.Module], quantized: Mapping[str, QuantizedWeight]) -> AbstractContextManager[None]:
    """Let float32 linear layers on a CPU compute with their codes, by the kernels of the finished model.
    These round activations to 16 bits, a scale for each group.
    """
    plain = {name: layers[name] for name in quantized if _is_plain(layers[name])}
    coded = {module: _coded(quantized[name], module) for name, module in plain.items()}
    return replaced_forward({module: each for module, each in coded.items() if each is not None})


def in_cpp(skeleton: Skeleton, index: int, inputs: BlockInputs) -> AbstractContextManager[None]:
    """Let a loaded float32 block on a CPU compute all beside its products in C++, as prompts are.
    That is known of the Llama family; a call with a mask goes the model's own way.
    """
    block = skeleton.blocks[index].module
    known = inputs.hidden.device.type == "cpu" and inputs.hidden.dtype == torch.float32
    return replaced_forward({block: _as_prompt(block, skeleton)} if known and not why_not_step(skeleton.model) else {})


def _as_prompt(block: nn.Module, skeleton: Skeleton) -> Callable[..., Any]:
    own, config = block.forward, skeleton.model.config

    def forward(hidden: Tensor, **beside: Any) -> Any:
        cosines, sines = beside["position_embeddings"]
        if beside["attention_mask"] is not None or len(cosines) > 1:
            return own(hidden, **beside)
        batch, length, _ = hidden.shape
        cache = hidden.new_empty(1, 2, batch, config.num_key_value_heads, length, cosines.shape[-1])
        structures = Structures(skeleton.model, [block], cache, cosines[0], sines[0])
        return PromptPass([block], structures).hidden(hidden)

    return forward


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _rounding(module: nn.Module) -> Callable[[Tensor], Tensor]:
    assert isinstance(module, nn.Linear)
    weight, bias = module.weight.bfloat16(), None if module.bias is None else module.bias.bfloat16()
    return lambda given: F.linear(given.bfloat16(), weight, bias).float()


def _coded(weight: QuantizedWeight, module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    from optkit.algorithms.packing import pack

    inputs, bias = weight.codes.shape[1], module.bias
    packed = PackedWeight(pack(weight.codes, weight.bits, 1), weight.scales, weight.zeros, None, weight.bits, inputs)
    if why_not_coded(packed, "cpu") is not None:
        return None
    return CodedLinear(packed, None if bias is None else bias.detach(), torch.float32).forward  # type: ignore[arg-type, operator]
