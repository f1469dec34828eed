"""The names that only the tensors of packed layers have.

Those of compressed-tensors, gptq, awq and bitsandbytes; a new layout adds its own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
METHODS_WITH_CODES = ("compressed-tensors", "gptq", "awq", "bitsandbytes")
"""Values of `quant_method` whose codes stages can keep; of others they need the float weights."""
CODES = ("weight_packed", "qweight")
"""Codes of several weights in one element."""
SCALES = ("weight_scale", "weight_scale_inv", "scales", "SCB")
CODED = frozenset({*CODES, *SCALES})
"""Any of them marks a packed layer."""
BESIDE = frozenset({
    *SCALES, "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "input_global_scale",
    "input_scale", "input_zero_point", "qzeros", "g_idx", "weight_format",
})  # fmt: skip
"""What codes need: it costs bits and stands for no weight."""
FOUR_BIT_STATE = "weight.quant_state."
"""How the name of bitsandbytes' JSON about 4-bit weights begins."""


def by_module(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return module -> leaf -> what is known of the tensor, modules and leaves in the order of the tensors."""
    found: dict[str, dict[str, T]] = {}
    for name, known in tensors.items():
        module, leaf = split_tensor(name)
        found.setdefault(module, {})[leaf] = known
    return found


def split_tensor(name: str) -> tuple[str, str]:
    """Return module and leaf: `x.weight.absmax` is the leaf `weight.absmax` of x."""
    module, below, leaf = name.partition(".weight.")
    if below:
        return module, f"weight.{leaf}"
    module, _, leaf = name.rpartition(".")
    return module, leaf
