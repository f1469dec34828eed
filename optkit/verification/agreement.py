"""How near an engine's logits are to those of optkit's own session.
What is near enough depends on the dtype that it computes in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.errors import OptkitError
from optkit.measure import Session, SteppingSession
from optkit.verification.blocks import states_of

if TYPE_CHECKING:
    from torch import Tensor


TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 2e-2}
"""Largest mean KL in nats, by the least precise dtype that the engine or optkit computes in.

Ten times what rounding alone makes of SmolLM2-135M in bfloat16 (vLLM against optkit: 0.0012 to
0.0019), and less in the square of the precision for the others; one of its 210 layers with its
outputs in a wrong order makes 0.26 or more."""
ROUNDED_ACTIVATIONS = 0.1
"""Largest mean KL in nats if the inputs of layers are rounded to 5 to 8 bits, in any dtype.

There a difference in the last place moves a few codes, and these move more in the next layer. After
some layers two sound engines differ by as much as the rounding itself does. Of SmolLM2-135M with
FP8 inputs: embeddings changed by 1e-7 in float32 make 0.015, engines 0.017 to 0.023.
"""
FOUR_BIT_ACTIVATIONS = 0.6
"""The same if they are rounded to 4 bits.

Of SmolLM2-135M in NVFP4 with such inputs, in bfloat16: embeddings changed by one step make 0.36, steps
of decoding 0.2. Layers whose outputs are in a wrong order make 2 to 3 in the first half of the model,
and less than this limit behind it: `blocks.py` finds these.
"""
TEXT = """\
A lighthouse keeper counts the ships that pass: on Monday 12, on Tuesday 9, on Wednesday 17, which makes 38 in three days.
The first of them carried oranges from Valencia to Hamburg, and its captain, a patient woman of sixty, wrote letters to her
brother in French: « La mer est calme ce soir ». In the harbour a program prints `for index in range(10): print(index ** 2)`
and the numbers 0, 1, 4, 9, 16, 25, 36, 49, 64 and 81 appear one below the other. Water boils at 100 degrees Celsius at sea
level; the capital of Japan is Tokyo; two and two are four. Nobody in the village could say why the old clock, which had been
silent since the winter of 1947, began to strike again on the night before the election.
"""
"""Prose, numbers, code and a little French, so that the tokens of one kind alone do not decide."""


@dataclass(frozen=True)
class Reference:
    """What optkit's own session computes of the tokens."""

    tokens: tuple[int, ...]
    logits: Tensor
    """float32 [tokens, vocabulary], on the CPU."""
    generated: tuple[int, ...]
    dtype: str
    device: str
    stepped: Agreement | None
    """How near its decode steps come to its logits of the whole text, over the last tokens; None
    without steps.
    """
    states: Tensor | None = None
    """What `states_of` returns of the tokens, if layers round their inputs so far that logits say little."""

    @property
    def prompt(self) -> int:
        """How many of the tokens are read at once if the others are fed one at a time."""
        return len(self.tokens) - min(len(self.generated), len(self.tokens) - 1)


@dataclass(frozen=True)
class Agreement:
    """How near two models are on the same tokens."""

    max_logit_difference: float
    mean_kl: float
    """KL(optkit || engine), nats."""
    top1_agreement: float
    """Share of tokens after which the engine's likeliest next one is also optkit's, or as likely as
    that.
    """


def measure_reference(
    session: Session, dtype: str, tokens: int, new_tokens: int, activation_bits: int = 0
) -> Reference:
    """Return what a session makes of the fixed text's first `tokens` tokens, and its continuation.
    The text is repeated if it is too short. `activation_bits`: to how few layers round their inputs.

    Raises OptkitError if the tokenizer makes fewer than two tokens of it, or the model has too
    few positions.
    """
    room = min(tokens, session.positions - new_tokens)
    ids = session.encode(TEXT)
    while 1 < len(ids) < room:
        ids = session.encode(TEXT * math.ceil(room / len(ids) + 1))
    ids = ids[: max(room, 0)]
    if len(ids) < 2:
        remedy = "Ask for more with --tokens"
        raise OptkitError(f"{len(ids)} tokens are too few to compare", where=str(session.directory), remedy=remedy)
    logits = session.logits(ids[None])[0].cpu()
    generated = session.generate(ids[None], new_tokens)[0, len(ids) :].tolist()
    states = states_of(session, ids[None]) if 0 < activation_bits <= 4 else None
    found = Reference(tuple(ids.tolist()), logits, tuple(generated), dtype, session.device, None, states)
    if not isinstance(session, SteppingSession):
        return found
    stepped = session.stepped_logits(ids[None], found.prompt)[0].cpu()
    return replace(found, stepped=compare_logits(logits[found.prompt :], stepped))


def read_logits(path: Path, shape: Sequence[int]) -> Tensor:
    """Return the raw float32 numbers of a file as [tokens, vocabulary]."""
    import torch

    return torch.from_file(str(path), size=math.prod(shape), dtype=torch.float32).view(*shape)


def compare_logits(ours: Tensor, theirs: Tensor) -> Agreement:
    """Compare float32 [tokens, vocabulary] with the same of an engine."""
    import torch

    left, right = torch.log_softmax(ours, -1), torch.log_softmax(theirs, -1)
    divergence = (left.exp() * (left - right)).sum(-1)
    return Agreement(
        max_logit_difference=float((ours - theirs).abs().max()),
        mean_kl=max(float(divergence.mean()), 0.0),  # below 0 by rounding alone
        top1_agreement=float((ours.gather(-1, theirs.argmax(-1, keepdim=True))[:, 0] == ours.amax(-1)).float().mean()),
    )


def compare_likeliest(ours: Tensor, likeliest: Sequence[Sequence[tuple[int, float]]]) -> Agreement:
    """Compare float32 [tokens, vocabulary] with log-probabilities of an engine.
    It gives them for its likeliest tokens after each token.

    The divergence is that of these tokens and one class of all others: exact for these, and never
    above that of all tokens.
    """
    import torch

    left = torch.log_softmax(ours.double(), -1)
    difference, divergence, same = 0.0, 0.0, 0
    for row, found in zip(left, likeliest, strict=True):
        ids = torch.tensor([token for token, _ in found])
        theirs = torch.tensor([value for _, value in found], dtype=torch.float64)
        mine = row[ids]
        difference = max(difference, float((mine - theirs).abs().max()))
        rest, their_rest = (1 - mine.exp().sum()).clamp_min(1e-9), (1 - theirs.exp().sum()).clamp_min(1e-9)
        divergence += float((mine.exp() * (mine - theirs)).sum() + rest * (rest / their_rest).log())
        same += int(mine[theirs.argmax()] == row.max())
    return Agreement(difference, max(divergence, 0.0) / len(left), same / len(left))


def tolerance(*dtypes: str, activation_bits: int) -> float:
    """Return the largest mean KL that the least precise dtype or rounded activations explain."""
    if activation_bits:
        return ROUNDED_ACTIVATIONS if activation_bits > 4 else FOUR_BIT_ACTIVATIONS
    return max(TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) for dtype in dtypes)


def verdict_of(near: Agreement, limit: float, stepped: Agreement | None = None) -> dict[str, Any]:
    """Return the fields of a loading line: how near an engine came, and whether that is enough.
    Decode steps have theirs if it took some.
    """
    seen = [each for each in (near, stepped) if each]
    if not all(math.isfinite(each.mean_kl) and math.isfinite(each.max_logit_difference) for each in seen):
        return {"verdict": "disagrees", "reason": "its logits are not all finite numbers"}
    fields: dict[str, Any] = {**asdict(near), "stepped_kl": stepped.mean_kl if stepped else None}
    for what, each in (("mean KL", near), ("mean KL of its decode steps", stepped)):
        if each and each.mean_kl >= limit:
            reason = f"the {what} is {each.mean_kl:.2g}, and rounding explains {limit:g}"
            return {**fields, "verdict": "disagrees", "reason": reason}
    return {**fields, "verdict": "agrees"}
