"""Models that vLLM cannot run, because it takes another size of heads than config.json says.

No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.model.attention import HEADS
from optkit.model.depth import hidden_size
from optkit.model.text_config import first_number, text_config

VLLM = "0.32"
HEADS_FROM_WIDTH = frozenset({
    "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "granitemoe", "granitemoeshared", "mimo", "minicpm",
    "olmoe",
})  # fmt: skip
"""`model_type` of those whose class in vLLM divides the hidden size by the heads and reads no
`head_dim`.
"""


def notes_on_heads(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what vLLM makes of other head sizes than hidden / heads; empty if it reads `head_dim`.

    It takes the first rows of tensors that are longer than it expects, and refuses shorter ones.
    """
    text = text_config(config)
    kind, size = str(text.get("model_type")), int(text.get("head_dim") or 0)
    heads = first_number(text, HEADS)
    if kind not in HEADS_FROM_WIDTH or not size or not heads or size * heads == hidden_size(config):
        return ()
    wrong = hidden_size(config) // heads
    outcome = "refuses the weights" if wrong > size else "reads a part of the weights and computes something else"
    fitting = f"hidden_size {heads * size:,} with these {heads} heads"
    if hidden_size(config) % size == 0:
        fitting += f", or {hidden_size(config) // size} heads with this hidden_size"
    return (
        f"vLLM {VLLM} cannot run it: for {kind} it takes hidden size / heads = {wrong} for the size "
        "of a head and reads no head_dim,"
        f" which is {size} here, so that it {outcome}; transformers and optkit read it. vLLM runs {fitting}",
    )
