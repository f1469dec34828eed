"""The fields of `prune_structured` that give the new widths, and the widths no model can have.

No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator

from optkit.common.field_types import LARGEST_WIDTH, Width
from optkit.common.frozen import Frozen
from optkit.errors import StageError
from optkit.model.config_defaults import assigned, config_class
from optkit.model.shape import ModelShape
from optkit.model.task import STREAM, refuse_multi_modal
from optkit.model.text_config import text_config
from optkit.model.width import FFN_KEYS, Role, Widths, axes_of, changing, widths_of

KIND = "prune_structured"
OWN_HEADS = frozenset({
    "arcee", "cohere", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite",
    "helium", "llama", "ministral",
    "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3",
})  # fmt: skip
"""`model_type` of those whose config.json may say how large a head is and how many heads of keys
there are.
"""
SQUARE_OUTPUTS = ("chameleon", "helium", "stablelm")
"""`model_type` of those whose attention ends, in transformers, in a layer of hidden size x hidden
size.
"""
SCALED_EMBEDDINGS = ("gemma", "t5gemma", "vaultgemma", "recurrent_gemma")
"""`model_type` of those that multiply embeddings by the root of the hidden size."""


class WidthFields(Frozen):
    """What is to be left of the widths."""

    intermediate_size: int | float | None = None
    """Channels of the feed-forward layers that are left: how many, or a fraction below 1, rounded
    to `multiple_of`.
    """
    attention_heads: Width | None = None
    """Heads of the queries that are left in each block. With as many heads of keys and values they
    go together; with fewer, every group that shares one keeps equally many."""
    kv_heads: Width | None = None
    """Heads of keys and values that are left in each block: the KV cache shrinks with them."""
    kv_method: Literal["pooling", "importance"] | None = None
    """`pooling`, the default: neighbours become their mean, as for grouped- and multi-query
    attention (arXiv:2305.13245). `importance`: those that matter least go, with the queries that
    read them."""
    hidden_size: int | float | None = None
    """Channels of the hidden states that are left: how many, or a fraction below 1, rounded to
    `multiple_of`.
    """
    multiple_of: Width = 64
    """What `intermediate_size` and `hidden_size` have to be multiples of, for the matrix units of
    the hardware.
    """
    experts: int | float | None = Field(default=None, exclude_if=lambda value: value is None)
    """Experts that are left in each block of a mixture: how many, or a fraction below 1. Those stay
    whose outputs, times the router's weights, are longest on the text (REAP, arXiv:2510.13999)."""
    merge: bool = Field(default=False, exclude_if=lambda value: not value)
    """Add each expert that goes to the one whose outputs on the text are nearest (arXiv:2410.08589). Each
    counts by its share of the tokens. Left out, they are lost, which REAP's authors found better for
    text that is generated."""
    compensate: bool = True
    """Compensate for removed feed-forward channels and heads in the layers that read the others, by
    least squares on the text.
    """

    @field_validator("intermediate_size", "hidden_size", "experts")
    @classmethod
    def _number(cls, value: float | None) -> float | None:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError(f"{value:g} is no fraction between 0 and 1. Write a whole number to say how many")
        if isinstance(value, int) and not 1 <= value <= LARGEST_WIDTH:
            raise ValueError(
                f"{value} is less than 1"
                if value < 1
                else f"{value} is more than {LARGEST_WIDTH:,}, beyond any model's"
            )
        return value

    @property
    def narrows(self) -> bool:
        """Whether a width is asked for."""
        return any(
            value is not None
            for value in (self.intermediate_size, self.attention_heads, self.kv_heads, self.hidden_size)
        )

    def widths(self, shape: ModelShape) -> tuple[Widths, Widths]:
        """Return the widths of the model and those that are left.
        Raises StageError for those that it cannot have.
        """
        before = widths_of(shape)
        after = replace(
            before,
            ffn=self._channels("intermediate_size", before.ffn),
            hidden=self._channels("hidden_size", before.hidden),
        )
        if self.attention_heads or self.kv_heads:
            after = replace(after, **self._heads(before))
        if after == before:
            return before, after
        if after.hidden % max(1, after.heads) and before.hidden % max(1, before.heads) == 0:
            raise StageError(
                f"a hidden size of {after.hidden:,} is no multiple of {after.heads} heads",
                where=f"{KIND}.{'hidden_size' if after.hidden != before.hidden else 'attention_heads'}",
                why="transformers refuses that, although heads may have any size",
                remedy="Choose attention_heads and hidden_size so that one divides the other",
            )
        _refuse_architecture(shape, before, after)
        return before, after

    def experts_left(self, count: int) -> int:
        """Return how many of the experts of a block stay; raises StageError if that is one or all."""
        asked = self.experts or 0
        left = round(asked * count) if isinstance(asked, float) else asked
        if not 1 < left < count:
            raise StageError(
                f"{asked:g} of {count} experts leaves {left}",
                where=f"{KIND}.experts",
                remedy=f"Take 2 to {count - 1}, or a fraction between",
            )
        return left

    def _channels(self, field: str, size: int) -> int:
        asked = getattr(self, field)
        if asked is None:
            return size
        where, unit = f"{KIND}.{field}", self.multiple_of
        if size == 0:
            raise StageError(
                "the feed-forward layers are not one of equal size in every block",
                where=where,
                why="Experts, and blocks that differ, are not narrowed",
                remedy="Leave the field out; remove_layers, attention_heads and kv_heads take such models",
            )
        if isinstance(asked, int) and asked % unit:
            near = f"{asked // unit * unit:,} or {(asked // unit + 1) * unit:,}" if asked > unit else f"{unit:,}"
            raise StageError(
                f"{asked:,} is not a multiple of {unit}", where=where, remedy=f"Take {near}, or set multiple_of"
            )
        left = asked if isinstance(asked, int) else max(unit, round(asked * size / unit) * unit)
        if left >= size:
            how = (
                f"{asked:g} of {size:,} channels, rounded to a multiple of {unit},"
                if isinstance(asked, float)
                else "it"
            )
            raise StageError(
                f"{how} is {left:,}, and the model has {size:,}", where=where, remedy="Take less, or lower multiple_of"
            )
        return left

    def _heads(self, before: Widths) -> dict[str, int]:
        multi_head = before.heads == before.key_heads
        importance = self.kv_method == "importance"
        shared = before.heads // max(1, before.key_heads)
        together = multi_head and self.kv_heads is None
        keys = self.kv_heads or (self.attention_heads if together and self.attention_heads else before.key_heads)
        heads = self.attention_heads or (keys * shared if importance else before.heads)
        for field, asked, size in (("attention_heads", heads, before.heads), ("kv_heads", keys, before.key_heads)):
            if asked > size:
                raise StageError(
                    f"{asked} heads are more than the model's {size}", where=f"{KIND}.{field}", remedy="Take fewer"
                )
        if (heads, keys) == (before.heads, before.key_heads):
            raise StageError(
                f"the model has {before.heads} heads and {before.key_heads} of keys and values already",
                where=KIND,
                remedy="Take fewer, or leave the fields out",
            )
        if not importance and not together and before.key_heads % keys:
            divisors = ", ".join(str(number) for number in range(1, before.key_heads) if before.key_heads % number == 0)
            raise StageError(
                f"{before.key_heads} heads cannot be pooled to {keys}",
                where=f"{KIND}.kv_heads",
                why="Every head that is left is the mean of equally many",
                remedy=f"Take one of {divisors}, or `kv_method: importance`",
            )
        if heads % keys or heads // keys > before.heads // keys or (importance and heads // keys > shared):
            raise StageError(
                f"{heads} heads of queries cannot share {keys} heads of keys and values equally",
                where=f"{KIND}.attention_heads",
                why=f"The model has {before.heads} and {before.key_heads}",
                remedy=f"Take a multiple of {keys}, or set kv_heads too",
            )
        return {"heads": heads, "key_heads": keys}

    def pools(self, before: Widths) -> bool:
        """Whether heads of keys and values become means of others."""
        together = before.heads == before.key_heads and self.kv_heads is None
        return self.kv_method != "importance" and not together


def _refuse_architecture(shape: ModelShape, before: Widths, after: Widths) -> None:
    """Raise StageError if config.json could not say what is left, or the norms do not carry over."""
    text = text_config(shape.config)
    kind, roles = str(text.get("model_type")), changing(before, after)
    says = kind in OWN_HEADS or {"head_dim", "num_key_value_heads"} <= set(text)
    fields = "attention_heads" if Role.QUERY in roles else "kv_heads" if Role.KEY in roles else "hidden_size"
    if roles & {Role.QUERY, Role.KEY, Role.HIDDEN} and not says:
        raise StageError(
            f"the config.json of {kind} has no place for heads of another size or number",
            where=f"{KIND}.{fields}",
            why=f"Its heads are hidden size / heads = {before.head_size} channels",
            remedy="Take remove_layers and intermediate_size",
        )
    code = config_class(kind)
    if Role.FFN in roles and code and not {*text, *assigned(code)} & {*FFN_KEYS}:
        raise StageError(
            f"the config.json of {kind} has no place for feed-forward layers of another width",
            where=f"{KIND}.intermediate_size",
            why=f"Their {before.ffn:,} channels follow from the {before.hidden:,} of the hidden states",
            remedy="Take remove_layers",
        )
    found = {role for axes in axes_of(shape, before).values() for axis in axes or () for role in axis}
    if roles & {Role.QUERY, Role.KEY} - found:
        raise StageError(
            f"no tensor of {kind} is as long as its {before.key_heads} heads of {before.head_size} channels",
            where=f"{KIND}.{fields}",
            why="Its attention is of another kind, such as one that keeps a latent",
            remedy="Take remove_layers and intermediate_size",
        )
    if kind in SQUARE_OUTPUTS and after.heads * after.head_size != after.hidden:
        raise StageError(
            f"{after.heads} heads of {after.head_size} channels are not the {after.hidden:,} "
            "channels of the hidden states",
            where=f"{KIND}.{fields}",
            why=f"The attention of {kind} ends in a layer of hidden size x hidden size, whatever heads there are",
            remedy="Take remove_layers, intermediate_size and kv_heads",
        )
    if Role.HIDDEN in roles and kind.startswith(SCALED_EMBEDDINGS):
        raise StageError(
            f"{kind} multiplies its embeddings by the root of the hidden size",
            where=f"{KIND}.hidden_size",
            why="The embeddings of a narrower model would be scaled otherwise",
            remedy="Take remove_layers, intermediate_size and heads",
        )
    if Role.HIDDEN in roles:
        refuse_multi_modal(
            shape.config, f"{KIND}.hidden_size", STREAM, "Take remove_layers, intermediate_size and heads"
        )
    _refuse_norms(shape.tensors, shape, before, roles)


def _refuse_norms(tensors: Mapping[str, Any], shape: ModelShape, before: Widths, roles: frozenset[Role]) -> None:
    for name, axes in axes_of(shape, before).items():
        leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if Role.HIDDEN in roles and name.endswith(".bias") and ("norm" in leaf or leaf.startswith("ln_")):
            raise StageError(
                "a norm with a bias subtracts the mean of all channels",
                where=f"{KIND}.hidden_size: {name}",
                why="Without some of the channels the mean is another one; only RMS norms are made up for",
                remedy="Take remove_layers and intermediate_size",
            )
        if roles & {Role.QUERY, Role.KEY} and axes is None and leaf in ("q_norm", "k_norm"):
            raise StageError(
                "one norm stands over all heads together",
                where=f"{KIND}: {name}",
                why=f"It has {tensors[name].shape[0]} channels, a head has {before.head_size}: no head can "
                "go without changing the others",
                remedy="Take remove_layers and intermediate_size",
            )
