"""The operations of a training step, by published formulas, and their share of a device's rate.

A multiply and an add are two operations. N is the weights of the matrices that a token meets,
lm_head among them and the tables of which it reads one row not; of experts, those that it is sent
to.

    forward       2 N, and 2 (query width + value width) for each pair of a query and a key that it
                  may see (causal)
    backward      2 N for the gradients of inputs, 2 N for those of weights that are trained, and
                  twice the attention of the forward
    recomputed    the blocks' forward once more, with gradient checkpointing; lm_head stands behind
                  the blocks (torch leaves out what follows the last input that a gradient needs:
                  one matrix of each block)
    teacher       its own forward

So a step is 3 times a forward (6 N), with gradient checkpointing nearly 4 times (8 N); of frozen
weights 4 N, and 6 N' for N' of adapters. Model FLOPs utilization (PaLM, arXiv:2204.02311, appendix
B) leaves out what was recomputed, hardware FLOPs utilization (arXiv:2205.05198) counts it. Unlike
PaLM's 12 L H Q T, attention is counted as a causal mask leaves it, which is half of that. Norms,
activations, softmax, the loss and the optimizer are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from optkit.model.attention import attention_of
from optkit.model.shape import ModelShape
from optkit.model.weights import expert_counts, weights_of

FORWARD, INPUTS, WEIGHTS = 2, 2, 2
"""Operations of a weight and a token: the product, the gradient of its input, its own gradient."""


@dataclass(frozen=True)
class ForwardFlops:
    """What a forward of one sequence costs."""

    blocks: float
    """Matrices of the blocks and whatever else stands before lm_head."""
    head: float
    attention: float

    @property
    def total(self) -> float:
        return self.blocks + self.head + self.attention


@dataclass(frozen=True)
class StepFlops:
    """What a step costs; of one sequence, until it is multiplied."""

    forward: float
    backward: float
    recomputed: float
    teacher: float

    @property
    def model(self) -> float:
        """What the student's mathematics needs: 3 times its forward if all of it is trained."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """What is computed in fact: with what is computed again, and the teacher."""
        return self.model + self.recomputed + self.teacher

    @property
    def formula(self) -> str:
        """What was counted.
        For example `3.0 x forward, 3.9 x with what gradient checkpointing computes again, 1.2 x
        more for the teacher`.
        """
        words = [f"{self.model / self.forward:.1f} x forward"]
        words += (
            [f"{(self.model + self.recomputed) / self.forward:.1f} x with what gradient checkpointing computes again"]
            if self.recomputed
            else []
        )
        words += [f"{self.teacher / self.forward:.1f} x more for the teacher"] if self.teacher else []
        return ", ".join(words)


def forward_flops(shape: ModelShape, length: int) -> ForwardFlops:
    """Return what one sequence of `length` tokens costs, all of which get logits.

    Raises SourceError if packed weights lie in a layout that is not known, or nothing makes
    logits.
    """
    weights = weights_of(shape)
    experts, chosen = expert_counts(shape.config)
    share = chosen / experts if experts else 1.0
    blocks = sum(
        each.elements * (share if each.role == "experts" else 1.0)
        for each in weights
        if each.role not in ("head", "rows")
    )
    head = sum(each.elements for each in weights if each.role == "head")
    count = len({place for name in shape.tensors if (place := shape.block(name))})
    pairs = sum(layer.flops(layer.pairs(length, 0)) for layer in attention_of(shape.config, count)[0])
    return ForwardFlops(FORWARD * blocks * length, FORWARD * head * length, float(pairs))


def step_flops(
    shape: ModelShape,
    length: int,
    *,
    recomputed: bool = False,
    frozen: bool = False,
    frozen_head: bool = False,
    adapter_elements: int = 0,
    teacher: ModelShape | None = None,
) -> StepFlops:
    """Return what training on one sequence of `length` tokens costs.

    `recomputed`: gradient checkpointing. `frozen`: the model's own weights get no gradients, the
    `adapter_elements` weights of matrices that stand beside its layers do. `frozen_head`: lm_head
    alone gets none. `teacher`: a model that computes in the same step; one whose logits are kept
    costs nothing here. Raises what `forward_flops` raises.
    """
    own = forward_flops(shape, length)
    beside = FORWARD * adapter_elements * length
    matrices = own.blocks + own.head
    learning = 0.0 if frozen else own.blocks if frozen_head else matrices
    gradients = (matrices * INPUTS + learning * WEIGHTS + beside * (INPUTS + WEIGHTS)) / FORWARD
    return StepFlops(
        forward=own.total + beside,
        backward=gradients + 2 * own.attention,
        recomputed=own.blocks + own.attention + beside if recomputed else 0.0,
        teacher=forward_flops(teacher, length).total if teacher else 0.0,
    )
