"""The shape of a model: its config, and the dtype and shape of every tensor.
It is known without reading a weight and without torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optkit.common.grouping import common_prefix
from optkit.model.task import ENCODER_DECODERS, TOWERS, Task, positions_of, task_of
from optkit.model.text_config import first_number, text_config

DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64,
    "I4": 4, "U4": 4, "I2": 2, "U2": 2,
}  # fmt: skip
"""Bits of one element, by the names that safetensors uses; integers of less than 8 bits are ONNX's,
named like the others.
"""

FLOAT_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Float dtypes that weights are computed with, by those names, as torch calls them."""
BLOCK_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks")
"""Keys of config.json that say how many decoder blocks there are."""
BLOCK_KINDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Keys of what says the kind of each decoder block, if none of those is there (Nemotron-H)."""
PROPOSING_BLOCKS = "num_nextn_predict_layers"
"""Key of config.json that says how many blocks behind those propose tokens (MTP)."""
WIDTHS = ("hidden_size", "n_embd", "d_model")
"""Keys of config.json that say how wide the hidden states are."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint."""

    dtype: str
    """As safetensors names it: F32, BF16, I32, ..."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return (self.elements * DTYPE_BITS[self.dtype] + 7) // 8

    @property
    def pinned_bytes(self) -> int:
        """What it takes where a GPU copies from by itself: torch has powers of two there."""
        return 1 << (self.size_bytes - 1).bit_length() if self.size_bytes else 0


@dataclass(frozen=True)
class ModelShape:
    """A model's config and tensors."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.tensors.values())

    @property
    def elements(self) -> int:
        return sum(info.elements for info in self.tensors.values())

    @property
    def quant_method(self) -> str:
        """What packed the weights, as config.json calls it; empty if they are floats."""
        return str((self.config.get("quantization_config") or {}).get("quant_method") or "")

    @property
    def positions(self) -> int | None:
        """Longest sequence that the model was built for, in tokens; None if not configured."""
        return positions_of(self.config)

    @property
    def task(self) -> Task | None:
        """What the model is for; None if its config does not say, or optkit does not know it."""
        return task_of(self.config)

    def block(self, name: str) -> tuple[str, int] | None:
        """Return the list and the index of the decoder block that a tensor belongs to:
        `model.layers.3.mlp...` -> `("model.layers", 3)`.

        Of several lists (a multi-modal model has one for images too) it is that of the language
        model; of an encoder-decoder it is any.
        """
        place = place_in_list(name)
        return place if place and self.decoder in (None, place[0]) and place not in self.extra_blocks else None

    def in_tower(self, name: str) -> bool:
        """Say whether a tensor belongs to what stands in front of the decoder: a tower of vision or
        audio, or a projector.
        """
        beside = {"lm_head", "mtp"}.isdisjoint(name.split(".")) and not name.startswith(self._around_blocks)
        return beside and not {"text_config", *TOWERS}.isdisjoint(self.config)

    @cached_property
    def _around_blocks(self) -> str:
        """How the names of the language model's tensors begin, e.g. `language_model.model.`."""
        blocks = next((place[0] for name in self.tensors if (place := self.block(name))), "")
        return blocks[: blocks.rfind(".") + 1]

    @cached_property
    def extra_blocks(self) -> tuple[tuple[str, int], ...]:
        """What stands in the list of the decoder blocks behind those that config.json counts.
        They propose tokens, such as DeepSeek-V3's `model.layers.61`.
        """
        name, counted = self.decoder, self._counted
        members = self.lists[name][0] if name is not None and counted else frozenset()
        return tuple((str(name), index) for index in sorted(members - counted)) if members > counted else ()

    @property
    def _counted(self) -> frozenset[int]:
        return frozenset(range(self.block_count or 0))

    @cached_property
    def lists(self) -> dict[str, tuple[frozenset[int], bool, int]]:
        """Each outermost list of modules: its indices, whether it has norms of the model's width, and
        how many numbers it holds.
        """
        members: dict[str, set[int]] = {}
        sizes: Counter[str] = Counter()
        wide = set()
        for name, info in self.tensors.items():
            if place := place_in_list(name):
                members.setdefault(place[0], set()).add(place[1])
                sizes[place[0]] += info.elements
                if info.shape == (self.width,):
                    wide.add(place[0])
        return {name: (frozenset(indices), name in wide, sizes[name]) for name, indices in members.items()}

    @cached_property
    def decoder(self) -> str | None:
        """The list of the decoder blocks, of as many as config.json says, or of more if there is none.
        The norms of its width tell, which are never packed, then how near the embedding of tokens is, else
        the largest is taken. None if none fits, or all count.
        """
        if self.task in ENCODER_DECODERS:
            return None
        exact = [name for name, (indices, *_) in self.lists.items() if len(indices) == self.block_count]
        longer = [name for name, (indices, *_) in self.lists.items() if self._counted and indices > self._counted]
        vocabulary = first_number(self.config, ("vocab_size",))
        embeddings = [name for name, info in self.tensors.items() if info.shape == (vocabulary, self.width)]

        def likely(name: str) -> tuple[bool, int, int, int]:
            shared = max((common_prefix(name.split("."), each.split(".")) for each in embeddings), default=0)
            return self.lists[name][1], shared, shared - name.count("."), self.lists[name][2]

        return max(exact or longer, key=likely, default=None)

    @property
    def block_count(self) -> int | None:
        """How many decoder blocks there are; None if config.json does not say."""
        text = text_config(self.config)
        kinds = (len(text[key]) for key in BLOCK_KINDS if text.get(key))
        return next((text[key] for key in BLOCK_COUNTS if key in text), next(kinds, None))

    @property
    def width(self) -> int | None:
        """How wide the hidden states are; None if config.json does not say."""
        return first_number(self.config, WIDTHS) or None

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest decoder block."""
        return self._largest_block("size_bytes")

    @property
    def pinned_bytes(self) -> int:
        """The same where a GPU copies from by itself."""
        return self._largest_block("pinned_bytes")

    @cached_property
    def block_elements(self) -> Counter[tuple[str, int] | None]:
        """How many numbers each decoder block has; under None, everything outside."""
        return self._by_block("elements")

    @property
    def outside_bytes(self) -> int:
        """Bytes of everything outside the decoder blocks: embeddings, last norm, lm_head, vision."""
        return self._by_block("size_bytes")[None]

    def _largest_block(self, measure: str) -> int:
        return max((size for place, size in self._by_block(measure).items() if place), default=0)

    def _by_block(self, measure: str) -> Counter[tuple[str, int] | None]:
        sums: Counter[tuple[str, int] | None] = Counter()
        for name, info in self.tensors.items():
            sums[self.block(name)] += getattr(info, measure)
        return sums


def without_indices(name: str) -> str:
    """Return the name that layers have in common which differ by indices alone, e.g. `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def place_in_list(name: str) -> tuple[str, int] | None:
    """Return the outermost list of modules that a tensor belongs to and its index, or None."""
    found = re.match(r"(.*?)\.(\d+)\.", name) or re.match(r"()(\d+)\.", name)
    return (found[1], int(found[2])) if found else None
