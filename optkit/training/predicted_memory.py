"""The peak memory of a training on one of its devices, predicted from shapes alone.

No torch is needed.

Counted is what `optkit.training.loop` and `objective` hold. That is float32 weights, gradients and
AdamW states, and the casts that autocast keeps of weights until the backward pass. What each block
keeps for its gradients as transformers writes it, and the logits of as many positions as are
computed at once, count too. A step has three moments that can be its peak. When the loss is known,
there are all activations and no gradients but those of lm_head. The others are when the last block
gets its gradients, and when all gradients are there. Between them activations go and gradients
come, block by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optkit.model.attention import HEADS, attention_of
from optkit.model.attention_choice import attends_eagerly, caps_scores
from optkit.model.mixed_dtypes import computes_in_float32_alone
from optkit.model.shape import WIDTHS, ModelShape
from optkit.model.text_config import first_number, text_config
from optkit.model.weights import TABLES, expert_counts
from optkit.training.memory_kinds import MemoryKinds

WIDE = 4
"""Bytes of what is kept in float32 whatever is computed in."""
LOGIT_BYTES: Mapping[str, int] = {"cpu": 128 << 20, "cuda": 2 << 30}
"""Most bytes of float32 logits held together, by the kind of device; the losses hold a few tensors
of that size.
"""
OPTIMIZER_BYTES: Mapping[str, int] = {"adamw": 8, "adamw_8bit": 2}
GATED, PLAIN, CLAMPED = 4, 2, 8
"""Tensors of the width of the MLP that are kept: with a gate its input, its output, what it is
multiplied with and the product; of gpt_oss, which clamps two of them, those before and after."""
AGAIN = 1.4
"""What the backward pass of a block holds, as a multiple of what the block keeps for it: gradients
of the same widths come as these go.
"""
PAIRS_GO_BACK = 6
"""Bytes of a query-key pair and head while they get their gradients, beside what was kept."""
GATHERED = 2
"""Blocks whose weights FSDP2 holds whole at once: the one that computes and the one that comes
next.
"""
SPELLED_OUT = 5
"""The same for activations that transformers writes as single operations."""
MATRICES = (".weight", ".weight_packed", ".qweight")
"""Ends of the names of a layer's matrix, packed or not."""
SPELLED_OUT_NAMES = frozenset({"gelu_new", "gelu_fast", "quick_gelu", "gelu_pytorch_tanh_python"})


@dataclass(frozen=True)
class Setup:
    """What decides the memory of a training, beside the shape of the student."""

    positions: int
    """Tokens of a forward pass on all devices together."""
    length: int
    """Tokens of a sequence."""
    half: bool
    """Matrices are multiplied in 16 bits, by autocast."""
    checkpointing: bool = False
    accumulation: int = 1
    optimizer: str = "adamw"
    trained: int | None = None
    """Numbers that are trained; None: all of the student's."""
    teacher: ModelShape | None = None
    """A teacher that computes beside the student."""
    known_answers: bool = False
    """The teacher's answers are read from disk."""
    divergence: bool = True
    attention_loss: bool = False
    hidden_loss: bool = False
    device: str = "cpu"
    devices: int = 1
    parallel: Literal["ddp", "fsdp"] = "ddp"

    @property
    def computed(self) -> int:
        """Bytes of a number that matrices are multiplied in."""
        return 2 if self.half else WIDE

    @property
    def taught(self) -> int:
        """Bytes of a number that the teacher beside the student computes in."""
        return WIDE if self.teacher and computes_in_float32_alone(self.teacher.config) else self.computed

    @property
    def share(self) -> int:
        """Positions of a forward pass on one device."""
        return self.positions // self.devices

    @property
    def divided(self) -> int:
        """By how much weights, gradients and optimizer are divided."""
        return self.devices if self.devices > 1 and self.parallel == "fsdp" else 1


@dataclass(frozen=True)
class Blocks:
    """What the decoder blocks of a model look like."""

    count: int
    width: int
    """Of the hidden states."""
    intermediate: int
    query_width: int
    key_width: int
    """Of keys, and of values."""
    heads: int
    readers: int
    """Matrices of a block that read what a norm wrote."""
    norms: int
    centred: bool
    """They are LayerNorms, which torch computes in one operation."""
    head_norms: bool
    """Queries and keys have norms of their own."""
    kept_of_mlp: int
    chosen: int
    """Experts that a token is sent to; 1 if there are none."""
    eager: bool
    """Attention is matrix products, whose weights are kept for each query and key."""
    capped: bool
    """The scores go through a tanh before the softmax."""

    def kept_bytes(self, setup: Setup) -> int:
        """Return the bytes that a token leaves in one block for the backward pass."""
        size, norms = setup.computed, self.norms * (1 if self.centred else 2) * WIDE * self.width
        inputs = self.readers * size * self.width if setup.half else min(2, self.norms) * WIDE * self.width
        attention = size * (2 * self.query_width + 2 * self.key_width)
        attention += 2 * WIDE * (self.query_width + self.key_width) if self.head_norms else 0
        attention += self.pair_bytes(setup)
        return norms + inputs + attention + self.chosen * size * self.kept_of_mlp * self.intermediate

    def pair_bytes(self, setup: Setup) -> int:
        """Return the bytes of these that query-key pairs leave: the matrices of attention."""
        tanh = setup.computed if self.capped else 0
        if setup.attention_loss:
            return (2 * WIDE + tanh) * self.heads * setup.length
        softmax, beside_values = WIDE, setup.computed if setup.half else 0
        return (softmax + beside_values + tanh) * self.heads * setup.length if self.eager else 0


def predicted_memory(shape: ModelShape, setup: Setup) -> MemoryKinds:
    """Return the bytes by kind when most of a step's are in use, on each of the devices."""
    moments = [_loss_is_known(shape, setup), _last_block_goes_back(shape, setup), _gradients_are_there(shape, setup)]
    moments += [_is_divided(shape, setup)] if setup.divided > 1 else []
    return max(moments, key=lambda kinds: kinds.total)


def blocks_of(shape: ModelShape) -> Blocks:
    """Return the blocks of a model, as config.json and the names of tensors tell them."""
    config = text_config(shape.config)
    places = {place for name in shape.tensors if (place := shape.block(name))}
    attention = attention_of(shape.config, len(places))[0]
    width = first_number(config, WIDTHS)
    first = [(name, info) for name, info in shape.tensors.items() if shape.block(name) == min(places, default=None)]
    matrices = [
        name for name, info in first if len(info.shape) >= 2 and ".experts." not in name and name.endswith(MATRICES)
    ]
    norms = [name for name, _ in first if name.endswith("norm.weight") or (".ln_" in name and name.endswith("weight"))]
    norms = [name for name in norms if shape.tensors[name].shape == (width,)]
    experts, chosen = expert_counts(shape.config)
    gate = any("gate_proj" in name or "gate_up" in name or ".w1." in name for name, _ in first)
    kind = str(config.get("activation_function") or config.get("hidden_act") or config.get("hidden_activation") or "")
    return Blocks(
        count=len(places),
        width=width,
        intermediate=(first_number(config, ["moe_intermediate_size"]) if experts else 0)
        or first_number(config, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"))
        or 4 * width,
        query_width=attention[0].query_width if attention else width,
        key_width=attention[0].cache_width // 2 if attention else width,
        heads=first_number(config, HEADS) or 1,
        readers=max(1, len(matrices) - (1 if experts else 2)) + (2 * chosen if experts else 0),
        norms=len(norms),
        centred=any(name.removesuffix("weight") + "bias" in shape.tensors for name in norms),
        head_norms=any("q_norm" in name for name, _ in first),
        kept_of_mlp=_kept_of_mlp(config, gate, kind),
        chosen=chosen or 1,
        eager=attends_eagerly(shape.config),
        capped=caps_scores(shape.config),
    )


def _kept_of_mlp(config: Mapping[str, Any], gate: bool, activation: str) -> int:
    if config.get("model_type") == "gpt_oss":
        return CLAMPED
    return GATED if gate else SPELLED_OUT if activation in SPELLED_OUT_NAMES else PLAIN


def _loss_is_known(shape: ModelShape, setup: Setup) -> MemoryKinds:
    blocks = blocks_of(shape)
    head = _head_elements(shape)
    entering = WIDE * blocks.width
    kept = entering if setup.checkpointing else blocks.kept_bytes(setup)
    return MemoryKinds(
        **_standing(shape, setup),
        computed_weights=_casts(shape, setup, head),
        gradients=_standing_gradients(shape, setup, head),
        activations=(blocks.count * kept + 2 * entering) * setup.share,  # with what lm_head is given, and its gradient
        logits=_logit_bytes(shape, setup),
    )


def _last_block_goes_back(shape: ModelShape, setup: Setup) -> MemoryKinds:
    """What all blocks kept is there still.
    With gradient checkpointing that is what they were given, and this block computes again.
    """
    blocks = blocks_of(shape)
    head = _head_elements(shape)
    kept, pairs = blocks.kept_bytes(setup), blocks.pair_bytes(setup)
    coming = PAIRS_GO_BACK * blocks.heads * setup.length if pairs else 0
    of_all = blocks.count * (WIDE * blocks.width if setup.checkpointing else kept)
    again = int(AGAIN * (kept - pairs)) + pairs if setup.checkpointing else 0
    casts = 2 * _largest_block(shape) if setup.half else 0
    return MemoryKinds(
        **_standing(shape, setup),
        computed_weights=casts if setup.checkpointing else _casts(shape, setup, head),
        gradients=_standing_gradients(shape, setup, head),
        activations=(of_all + again + coming) * setup.share,
    )


def _gradients_are_there(shape: ModelShape, setup: Setup) -> MemoryKinds:
    blocks = blocks_of(shape)
    trained = _trained(shape, setup)
    gathered = WIDE * GATHERED * _largest_block(shape) if setup.divided > 1 else 0
    return MemoryKinds(
        **_standing(shape, setup),
        computed_weights=gathered,
        gradients=WIDE * trained // setup.divided + (WIDE * _head_elements(shape) if setup.divided > 1 else 0),
        activations=blocks.kept_bytes(setup) * setup.share,
    )


def _is_divided(shape: ModelShape, setup: Setup) -> MemoryKinds:
    """Each device opens the whole model and keeps its part."""
    standing = _standing(shape, setup)
    whole = WIDE * shape.elements
    return MemoryKinds(
        **{**standing, "weights": whole, "optimizer": 0, "best_weights": 0}, computed_weights=whole // setup.divided
    )


def _standing(shape: ModelShape, setup: Setup) -> dict[str, int]:
    """Return what is there in every moment."""
    trained = _trained(shape, setup)
    frozen = 0 if setup.trained is None else shape.elements
    teacher = setup.teacher.elements * setup.taught + setup.share * _teacher_widths(setup) if setup.teacher else 0
    return {
        "weights": WIDE * trained // setup.divided,
        "frozen_weights": WIDE * frozen // setup.divided,
        "teacher": teacher,
        "optimizer": OPTIMIZER_BYTES[setup.optimizer] * trained // setup.divided,
        "best_weights": WIDE * trained if setup.device == "cpu" else 0,
    }


def _teacher_widths(setup: Setup) -> int:
    """Return the bytes that the teacher leaves of a token."""
    assert setup.teacher is not None
    blocks = blocks_of(setup.teacher)
    kept = setup.taught * blocks.width * (blocks.count + 1 if setup.hidden_loss else 1)
    return kept + (setup.taught * blocks.count * blocks.heads * setup.length if setup.attention_loss else 0)


def _standing_gradients(shape: ModelShape, setup: Setup, head: int) -> int:
    """Return the gradients that are there when the loss is known.
    They are lm_head's, and all of them if a step has several passes.
    """
    all_of_them = WIDE * _trained(shape, setup) // setup.divided
    of_head = WIDE * head if setup.trained is None else 0
    if setup.accumulation > 1 or (setup.devices > 1 and setup.divided == 1):  # DDP keeps its buckets
        return all_of_them + of_head
    return of_head


def _casts(shape: ModelShape, setup: Setup, head: int) -> int:
    """Return the bytes of weights as computed with: autocast's copies, and what FSDP2 gathers."""
    matrices = sum(info.elements for name, info in shape.tensors.items() if len(info.shape) >= 2 and shape.block(name))
    casts = 2 * (matrices + head) if setup.half else 0
    if setup.divided == 1:
        return casts
    outside = sum(info.elements for name, info in shape.tensors.items() if shape.block(name) is None)
    return casts + WIDE * (outside + GATHERED * _largest_block(shape))


def logits_at_once(device: str, vocabulary: int) -> int:
    """Return of how many tokens logits are held together."""
    return max(1, LOGIT_BYTES.get(device.partition(":")[0], LOGIT_BYTES["cpu"]) // (WIDE * vocabulary))


def _logit_bytes(shape: ModelShape, setup: Setup) -> int:
    """Return what the loss makes of the logits that are computed at once.
    It makes three float32 tensors, and the logits of both as they come.
    """
    vocabulary = vocabulary_of(shape)
    positions = min(setup.share, logits_at_once(setup.device, vocabulary))
    tensors = 3 * WIDE + setup.computed + (setup.taught if setup.divergence and not setup.known_answers else 0)
    parts = 2 if setup.share > positions else 1  # one part's gradient of lm_head beside the sum of those before
    again = (parts - 1) * WIDE * _head_elements(shape) if setup.trained is None else 0
    return positions * vocabulary * tensors + again


def _trained(shape: ModelShape, setup: Setup) -> int:
    return shape.elements if setup.trained is None else setup.trained


def _head_elements(shape: ModelShape) -> int:
    """Return the numbers of the matrix that makes logits."""
    sizes = [
        info.elements for name, info in shape.tensors.items() if shape.block(name) is None and len(info.shape) == 2
    ]
    named = [
        info.elements
        for name, info in shape.tensors.items()
        if name.removesuffix(".weight").endswith(("lm_head", "embed_out"))
    ]
    return named[0] if named else max(sizes, default=0)


def _largest_block(shape: ModelShape) -> int:
    return max((elements for place, elements in shape.block_elements.items() if place), default=0)


def vocabulary_of(shape: ModelShape) -> int:
    """Return how many logits a model has for a position."""
    config = text_config(shape.config)
    tables = [
        each.shape[0] for name, each in shape.tensors.items() if each.shape and any(word in name for word in TABLES)
    ]
    return int(config.get("vocab_size") or max(tables, default=1))
