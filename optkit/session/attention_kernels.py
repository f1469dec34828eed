"""Which kernel torch's scaled_dot_product_attention really dispatched to, seen while a model runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FUSED = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_attention_math": "math",
}
"""Operator of torch -> how its documentation calls the backend."""
MATH = "math"
"""If none of these is called: plain matrix products and a softmax."""


class _Operators(TorchDispatchMode):
    """Notes the fused attention operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # in inference mode it arrives whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.found.append(FUSED.get(name, name.removeprefix("_scaled_dot_product_")))
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Counts the calls of torch's attention by what they became."""

    def __init__(self, kernels: Counter[str]) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with _Operators() as operators:
            result = func(*args, **(kwargs or {}))
        self.kernels[operators.found[0] if operators.found else MATH] += 1
        return result


@contextmanager
def watched_attention() -> Iterator[Counter[str]]:
    """Count how often each kernel computes attention within the block: `{"flash": 32}`.
    It is empty if the model has attention of its own.
    """
    kernels: Counter[str] = Counter()
    with _Calls(kernels), torch.compiler.set_stance("force_eager"):
        yield kernels


def kernels_text(kernels: Counter[str]) -> str:
    """Return e.g. `flash`, or `flash (24), math (8)` if layers differ; empty for none."""
    return (
        next(iter(kernels), "")
        if len(kernels) < 2
        else ", ".join(f"{name} ({count})" for name, count in kernels.most_common())
    )
