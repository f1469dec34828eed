"""The fields that `gptq` and `qat` share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from optkit.common.field_types import BatchSize, Damping
from optkit.common.frozen import Frozen


class GptqFields(Frozen):
    """How codes are chosen so that outputs on a calibration text change least."""

    damping: Damping = 0.01
    """Added to the diagonal of each Hessian, as a fraction of its mean; raised, and reported, if
    a Hessian needs more.
    """
    activation_order: bool = True
    """Round the inputs with the largest activations first."""
    true_sequential: bool | Literal["auto"] = "auto"
    """Let each layer of a block see the errors of those before it in the block: no better perplexity
    as a rule. `auto`: where that saves time, which is on CPUs, with float32 models of the Llama family;
    elsewhere it takes more.
    """
    scale_search: Literal["hessian", "mse", "minmax"] = "hessian"
    """`hessian`: the scale with the least rounding error, each input weighted by its activations.
    `mse`: unweighted. `minmax`: the scale that reaches every weight."""
    refinements: int = Field(default=2, ge=0, le=100)
    """Turns of least-squares scales and coordinate descent on the codes (QuantEase,
    arXiv:2309.01885) after GPTQ; 0 leaves them out.
    """
    equal_tokens: bool = True
    """Divide each layer's input by its root mean square, token by token, so that no token with
    enormous activations outweighs the rest.
    """
    keep_zeros: bool | Literal["auto"] = "auto"
    """Let weights that are 0 stay 0 while the others compensate for errors. `auto`: in layers that
    were pruned (a fifth or more is 0).
    """
    batch_size: BatchSize = 8
    """Sequences that run through a block at once."""
