"""A model with fewer decoder blocks: its tensors' names, and its config.json.

No torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from optkit.errors import SourceError, StageError
from optkit.model.inventory import extra_heads
from optkit.model.shape import BLOCK_COUNTS, BLOCK_KINDS, PROPOSING_BLOCKS, WIDTHS, ModelShape, place_in_list
from optkit.model.text_config import text_config, with_text_config

Refusal = Callable[[Sequence[int]], None]
"""Raises StageError for blocks that may not go together."""
NOT_OF_BLOCKS = ("architectures", "_token_id", "_token_ids", "_ids", "_limit", "_multipliers")
"""How keys of lists end that have nothing to do with blocks, however long they are."""
INDEX_LISTS = ("mlp_only_layers", "cross_attention_layers", "_layer_indices", "_attn_idxs", "_layer_ids")
"""How keys of lists end that name blocks by their index."""
PERIOD, OFFSET = "_layer_period", "_layer_offset"
"""How two keys end that say which blocks are of another kind (Jamba): every so many, from one on."""
REPEATED = "block_types"
"""Key of the kinds of the first blocks, which repeat (RecurrentGemma)."""
OTHER_WIDTHS = "it proposes tokens, and its widths are those of the larger model"
FIRST_BLOCKS = ("max_window_layers", "first_k_dense_replace")
"""Keys that say how many of the first blocks are of another kind."""

SCALE = "scale_depth"
"""Key of what is divided by the root of the number of blocks, and scales what each adds (MiniCPM)."""
PARTS = "hidden_size_per_layer_input"
"""Key of what each block has of a tensor of them all."""
EXCEPTIONS = "per_layer_config"
"""Key of what differs in some blocks, by their index."""
COUNTING = (PERIOD, OFFSET, SCALE, REPEATED, *FIRST_BLOCKS, *INDEX_LISTS)
"""How keys end whose defaults in a model's code are wrong of fewer blocks."""


def block_count(config: Mapping[str, Any]) -> int:
    """Return the number of decoder blocks; raises SourceError if config.json does not say."""
    return ModelShape(config, {}).block_count or _number(config, BLOCK_COUNTS, "how many decoder blocks the model has")


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


def shallower_tensors(shape: ModelShape, kept: Sequence[int], narrows: bool = False) -> dict[str, str]:
    """Return tensor -> its name in a model with these of the blocks, numbered anew.
    Heads that propose tokens still stand behind them; they go if the model becomes narrower too.

    Raises SourceError if a tensor outside the blocks has a part for each of them.
    """
    text = text_config(shape.config)
    if text.get(PARTS) and len(kept) < block_count(text):
        raise SourceError(
            f"{text.get('model_type')} has a second embedding, with {text[PARTS]} channels for each block",
            where="prune_structured.remove_layers",
            why="Its tensors would have to lose those of the blocks that go",
            remedy="Take intermediate_size",
        )
    gone = tuple(f"{head}." for head in extra_heads(shape)) if narrows else ()
    numbers = {index: number for number, index in enumerate(kept)}
    moved = text_config(shape.config).get(PROPOSING_BLOCKS)
    numbers |= {index: len(kept) + number if moved else index for number, (_, index) in enumerate(shape.extra_blocks)}
    names = {}
    for name in shape.tensors:
        if name.startswith(gone):
            continue
        place = place_in_list(name)
        if place is None or not (shape.block(name) or place in shape.extra_blocks):
            names[name] = name
        elif place[1] in numbers:
            parent, index = place
            before, after = (f"{parent}.{number}.".lstrip(".") for number in (index, numbers[index]))
            names[name] = after + name.removeprefix(before)
    return names


def dropped_parts(shape: ModelShape, kept: Sequence[int], narrows: bool) -> dict[str, str]:
    """Return the modules that `shallower_tensors` leaves out, and why."""
    blocks = {place for name in shape.tensors if (place := shape.block(name)) and place[1] not in kept}
    heads = dict.fromkeys(extra_heads(shape), OTHER_WIDTHS) if narrows else {}
    return {f"{parent}.{index}".lstrip("."): "removed" for parent, index in sorted(blocks)} | heads


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
    refuse_without_attention({**resolved, **text}, [index for index in range(blocks) if index not in kept])
    text = {**text, **dict(_implied(text, resolved, blocks))}
    found = dict(text)
    for key in BLOCK_COUNTS:
        if isinstance(found.get(key), int):
            found[key] = len(kept)
    for key, value in found.items():
        if key == REPEATED and value and isinstance(value, list):
            found[key] = [value[index % len(value)] for index in kept]
        elif is_per_block(key, value, blocks):
            of_kept = [value[index] for index in kept]
            found[key] = "".join(of_kept) if isinstance(value, str) else of_kept
    if isinstance(per_block := found.get(EXCEPTIONS), dict):
        numbered = {int(index): value for index, value in per_block.items()}
        found[EXCEPTIONS] = {str(new): numbered[old] for new, old in enumerate(kept) if old in numbered}
    if isinstance(found.get(SCALE), (int, float)):
        found[SCALE] *= math.sqrt(len(kept) / blocks)
    for key in FIRST_BLOCKS:
        if isinstance(found.get(key), int):
            found[key] = sum(index < found[key] for index in kept)
    for key, value in found.items():
        if key.endswith(INDEX_LISTS) and isinstance(value, list):
            found[key] = [number for number, index in enumerate(kept) if index in value]
    return found | _sparse_blocks(text, kept) | _periods(text, kept)


def _implied(text: Mapping[str, Any], resolved: Mapping[str, Any], blocks: int) -> Iterator[tuple[str, Any]]:
    """Yield what config.json leaves to the model's code and depends on the number or the index of blocks."""
    for key, value in resolved.items():
        differs = is_per_block(key, value, blocks) and any(each != value[0] for each in value)
        if (differs and text.get(key) is None) or (value and key not in text and key.endswith(COUNTING)):
            yield key, value


def _attends(kind: Any) -> bool:
    """Whether blocks of a kind attend to earlier tokens, and carry no state instead."""
    return kind in ("*", "hybrid") or (str(kind).endswith("attention") and not str(kind).startswith("linear"))


def _attending(text: Mapping[str, Any], blocks: int) -> Iterator[list[bool]]:
    """Yield which blocks attend, by each key that says so."""
    yield from ([_attends(kind) for kind in kinds] for kinds in filter(None, map(text.get, BLOCK_KINDS)))
    for key, value in text.items():
        if key.startswith("attn") and key.endswith(INDEX_LISTS) and isinstance(value, list):
            yield [index in value for index in range(blocks)]
        elif key.startswith("attn") and key.endswith(PERIOD) and not any(map(text.get, BLOCK_KINDS)):
            offset = text.get(key.removesuffix(PERIOD) + OFFSET, 0)
            yield [index % value == offset for index in range(blocks)]


def refuse_without_attention(config: Mapping[str, Any], removed: Sequence[int]) -> None:
    """Raise StageError if the last block with attention would go."""
    text = text_config(config)
    for attending in _attending(text, block_count(text)):
        if any(attending) and not any(is_one for index, is_one in enumerate(attending) if index not in removed):
            raise StageError(
                "no block with attention would be left",
                where="prune_structured.remove_layers",
                why="transformers counts the tokens of a cache by such a block, and could not generate",
                remedy="Remove fewer blocks, or name others",
            )


def losable(order: Iterable[int], count: int, refuse: Refusal, gone: Sequence[int] = ()) -> list[int]:
    """Return the first `count` blocks of an order that may go together, beside those that are gone.
    If there are not so many, the first refusal is raised.
    """
    taken: list[int] = []
    first: StageError | None = None
    for index in order:
        if len(taken) == count:
            break
        try:
            refuse([*gone, *taken, index])
        except StageError as error:
            first = first or error
        else:
            taken.append(index)
    if first and len(taken) < count:
        raise first
    return taken


def is_per_block(key: str, value: Any, blocks: int) -> bool:
    """Whether a value of config.json is a list, or a text, with an entry for each block."""
    if not isinstance(value, list) and not (isinstance(value, str) and key in BLOCK_KINDS):
        return False
    return len(value) == blocks and not key.endswith((*INDEX_LISTS, *NOT_OF_BLOCKS))


def _periods(text: Mapping[str, Any], kept: Sequence[int]) -> dict[str, int]:
    """Return the keys that say by a period which blocks are of another kind.

    Raises StageError if no period says it of the blocks that are left.
    """
    found: dict[str, int] = {}
    for key, period in text.items():
        offset_key = key.removesuffix(PERIOD) + OFFSET
        if not key.endswith(PERIOD) or not isinstance(period, int) or any(text.get(kinds) for kinds in BLOCK_KINDS):
            continue
        offset, blocks = text.get(offset_key, 0), range(len(kept))
        asked = [index % period == offset for index in kept]
        pairs = ((period, offset), *((size, place) for size in range(1, len(kept) + 2) for place in range(size)))
        fitting = next((pair for pair in pairs if [index % pair[0] == pair[1] for index in blocks] == asked), None)
        if fitting is None:
            raise StageError(
                f"config.json says by {key}: {period} which blocks are of another kind, and without those "
                "that go they are not evenly spaced",
                where="prune_structured.remove_layers",
                why=f"The {len(kept)} blocks that are left would be taken for others",
                remedy=f"Remove {period} neighbouring blocks, or a multiple of it",
            )
        found |= dict(zip((key, offset_key), fitting, strict=True))
    return found


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
