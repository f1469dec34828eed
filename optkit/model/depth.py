"""A model with fewer decoder blocks: its tensors' names, and its config.json.

No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optkit.errors import SourceError
from optkit.model.shape import BLOCK_COUNTS, WIDTHS, ModelShape
from optkit.model.text_config import text_config, with_text_config

NOT_OF_BLOCKS = ("architectures", "_token_id", "_token_ids", "_ids")
"""How keys of lists end that have nothing to do with blocks, however long they are."""
INDEX_LISTS = ("mlp_only_layers", "cross_attention_layers")
"""Keys of lists that name blocks by their index."""
FIRST_BLOCKS = ("max_window_layers", "first_k_dense_replace")
"""Keys that say how many of the first blocks are of another kind."""


def block_count(config: Mapping[str, Any]) -> int:
    """Return the number of decoder blocks; raises SourceError if config.json does not say."""
    return _number(config, BLOCK_COUNTS, "how many decoder blocks the model has")


def hidden_size(config: Mapping[str, Any]) -> int:
    """Return how wide the hidden states are; raises SourceError if config.json does not say."""
    return _number(config, WIDTHS, "how wide the hidden states are")


def _number(config: Mapping[str, Any], keys: Sequence[str], meaning: str) -> int:
    text = text_config(config)
    for key in keys:
        if isinstance(text.get(key), int):
            return int(text[key])
    raise SourceError(
        f"config.json does not say {meaning}",
        where=str(text.get("model_type")),
        why=f"None of {', '.join(keys)} is there",
    )


def shallower_tensors(shape: ModelShape, kept: Sequence[int]) -> dict[str, str]:
    """Return tensor -> its name in a model with these of the blocks, numbered anew."""
    numbers = {index: number for number, index in enumerate(kept)}
    names = {}
    for name in shape.tensors:
        place = shape.block(name)
        if place is None:
            names[name] = name
        elif place[1] in numbers:
            parent, index = place
            before = f"{parent}.{index}." if parent else f"{index}."
            after = f"{parent}.{numbers[index]}." if parent else f"{numbers[index]}."
            names[name] = after + name.removeprefix(before)
    return names


def shallower_config(
    config: Mapping[str, Any], kept: Sequence[int], resolved: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return config.json of a model with these of the blocks.

    `resolved` is what transformers makes of the language model's part: some kinds of blocks derive
    from their index (a sliding window in all but every sixth, say). They are written out, as the
    index is another one now.
    """
    return with_text_config(config, lambda text: _shallower(text, kept, resolved or {}))


def _shallower(text: Mapping[str, Any], kept: Sequence[int], resolved: Mapping[str, Any]) -> dict[str, Any]:
    blocks = block_count(text)
    derived = {
        key: value
        for key, value in resolved.items()
        if text.get(key) is None and is_per_block(key, value, blocks) and any(each != value[0] for each in value)
    }
    found = {**text, **derived}
    for key in BLOCK_COUNTS:
        if isinstance(found.get(key), int):
            found[key] = len(kept)
    for key, value in found.items():
        if is_per_block(key, value, blocks):
            found[key] = [value[index] for index in kept]
    for key in FIRST_BLOCKS:
        if isinstance(found.get(key), int):
            found[key] = sum(index < found[key] for index in kept)
    for key in INDEX_LISTS:
        if isinstance(found.get(key), list):
            found[key] = [number for number, index in enumerate(kept) if index in found[key]]
    return found | _sparse_blocks(text, kept)


def is_per_block(key: str, value: Any, blocks: int) -> bool:
    """Whether a value of config.json is a list with an entry for each block."""
    return (
        isinstance(value, list) and len(value) == blocks and key not in INDEX_LISTS and not key.endswith(NOT_OF_BLOCKS)
    )


def _sparse_blocks(text: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return the keys that say which blocks have experts if every n-th has.
    The others are named one by one (Qwen's MoE).
    """
    step, dense = text.get("decoder_sparse_step"), text.get("mlp_only_layers") or []
    if not isinstance(step, int) or step <= 1:
        return {}
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [new for new, old in enumerate(kept) if old in dense or (old + 1) % step],
    }
