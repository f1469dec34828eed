"""Memory that an opened model takes and needs to compute, from its shape alone, without torch.

Measured on random models of the shapes of Gemma 3 270M and Qwen2.5 0.5B; a peak is within 0.8 to
1.5 of what is said here.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optkit.model.attention import cache_width
from optkit.model.attention_choice import eager_bytes
from optkit.model.linear_layers import EXPERTS, by_block, scaled_together
from optkit.model.packed_floats import packed_floats
from optkit.model.packed_names import CODES, METHODS_WITH_CODES
from optkit.model.shape import DTYPE_BITS, ModelShape
from optkit.model.text_config import text_config

NARROW = ("BF16", "F16")
FLOATS = ("F64", "F32", *NARROW)
TORCH_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}
HIDDEN_COPIES, INNER_COPIES = 6, 3
"""Tensors of hidden and of feed-forward width that one block holds at once."""
STEPPED = 128
"""Tokens that `cuda_graphs` multiplies by codes, however few experts there are."""
SLICE_BYTES = 64 << 20
"""Logits are cast to float32, and their softmax computed, so many bytes at once."""


@dataclass(frozen=True)
class SessionMemory:
    """What a session of a model takes and needs, in bytes."""

    shape: ModelShape
    device: str
    dtype: str | None = None
    """Torch name of the float dtype that a setting asks for; None for the checkpoint's own."""
    computes_in: str | None = None
    """Torch name of the float dtype that its format always computes in (`Format.computes_in`)."""
    graphs: bool = False
    """It decodes by `cuda_graphs`, which multiplies longer prompts by experts whose codes are floats meanwhile."""

    @cached_property
    def weights(self) -> int:
        """What it holds while it is open."""
        if self.dtype is None or self._is_packed or self.computes_in:
            return self.shape.size_bytes
        bits = TORCH_BITS.get(self.dtype, 32)
        return (
            sum(
                info.elements * (bits if info.dtype in FLOATS else DTYPE_BITS[info.dtype])
                for info in self.shape.tensors.values()
            )
            // 8
        )

    @cached_property
    def opening(self) -> int:
        """Most main memory while it is opened: packed weights as in the file and as in the kernels."""
        copied = self._is_packed or self.weights != self.shape.size_bytes
        return self.shape.size_bytes + (self.weights if copied else 0)

    @property
    def element(self) -> int:
        """Bytes of a number that it computes with."""
        return 2 if self._is_narrow else 4

    def logits(self, positions: int) -> int:
        """The logits of so many positions, in float32, and the slice cast to it if narrower."""
        return 4 * positions * self._number("vocab_size", 0) + (SLICE_BYTES if self._is_narrow else 0)

    def forward(self, sequences: int, length: int) -> int:
        """What a forward pass holds in a block, or lm_head in it, beside weights and logits."""
        hidden = self._number("hidden_size", self._number("n_embd", 0))
        heads = self._number("num_attention_heads", self._number("n_head", 1))
        attention = heads * self._number("head_dim", hidden // max(1, heads))
        inner = self._number("intermediate_size", self._number("n_inner", 4 * hidden))
        width = HIDDEN_COPIES * max(hidden, attention) + INNER_COPIES * inner
        return (
            self.element * sequences * length * width
            + eager_bytes(self.shape.config, sequences, length)
            + self._reordered
            + (self._unpacked if sequences * length > STEPPED else 0)
        )

    def cache(self, sequences: int, length: int) -> int:
        """What is kept of so many tokens, in an engine that forgets none behind a window."""
        return cache_width(self.shape.config, self.shape.block_count or 0) * self.element * sequences * length

    @cached_property
    def _reordered(self) -> int:
        """oneDNN lays 16-bit weights out anew at each product on a CPU: the largest one's copy."""
        if not self._is_narrow or self.device != "cpu":
            return 0
        return max(
            (
                2 * info.elements
                for info in self.shape.tensors.values()
                if len(info.shape) == 2 and info.dtype in FLOATS
            ),
            default=0,
        )

    @cached_property
    def _unpacked(self) -> int:
        """Gate and up of a block's experts in 16 bits, if a GPU holds codes of fewer than 8."""
        if not self.graphs or self.shape.quant_method not in METHODS_WITH_CODES:
            return 0
        tensors = self.shape.tensors
        elements = {
            name.removesuffix(".weight"): math.prod(each.shape)
            for name, each in packed_floats(self.shape).items()
            for part in each.parts
            if EXPERTS in name and part.endswith(CODES) and tensors[part].size_bytes < math.prod(each.shape)
        }
        groups = (group for block in by_block(self.shape, elements) for group in scaled_together(block))
        return max((sum(2 * elements[name] for stack in group for name in stack) for group in groups), default=0)

    @cached_property
    def _is_packed(self) -> bool:
        return self.shape.quant_method not in ("", "bitsandbytes")  # which transformers maps as it is

    @cached_property
    def _is_narrow(self) -> bool:
        if dtype := self.computes_in or self.dtype:
            return TORCH_BITS.get(dtype, 32) == 16
        sizes = Counter[str]()
        for info in self.shape.tensors.values():
            if info.dtype in FLOATS and len(info.shape) > 1:
                sizes[info.dtype] += math.prod(info.shape)
        return bool(sizes) and sizes.most_common(1)[0][0] in NARROW

    def _number(self, name: str, default: int) -> int:
        config: Any = text_config(self.shape.config)
        found = config.get(name)
        return found if isinstance(found, int) else default
