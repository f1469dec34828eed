"""What optkit makes of a few texts with an encoder, and how near an engine comes to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.measure import EncoderSession
from optkit.model.pooling import Pooling, pooling_for
from optkit.model.task import Task
from optkit.verification import agreement

if TYPE_CHECKING:
    from torch import Tensor


OUTPUTS = {Task.FEATURES: ("last_hidden_state", "token_embeddings"), Task.CLASSIFICATION: ("logits",)}
"""What an ONNX model gives."""
TARGET = 32
"""Tokens of an encoder-decoder's target."""
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
"""How far the cosine of two embeddings of one text may be from 1, by the least precise dtype that
the engine or optkit computes in.
"""
ROUNDED_ACTIVATIONS = 1e-2
"""The same if the inputs of layers are rounded to 8 bits: there a difference in the last place
grows from layer to layer.
"""


@dataclass(frozen=True)
class EncoderReference:
    """What optkit's own session computes of the texts."""

    task: Task
    tokens: Tensor
    mask: Tensor
    """int64 [texts, tokens of the longest]."""
    outputs: Tensor
    """Features or logits, float32."""
    pooling: Pooling | None
    dtype: str
    device: str
    target: Tensor | None = None
    """Of an encoder-decoder, what its decoder is given, int64 [1, tokens], with `tokens` or features of
    audio for the encoder; the mask is that of the target."""


def measure_encoder_decoder(session: Any, dtype: str, task: Task) -> EncoderReference:
    """Return the logits of a fixed target behind the fixed text, or behind silence."""
    import torch

    target = session.target(agreement.TEXT, TARGET)[None]
    inputs = session.fixed_inputs(agreement.TEXT)
    logits = session.logits_given(inputs, target).cpu()
    given = next(iter(inputs.values())).cpu()
    return EncoderReference(task, given, torch.ones_like(target), logits, None, dtype, session.device, target)


def measure_encoder(session: EncoderSession, dtype: str, task: Task) -> EncoderReference:
    """Return what a session makes of the fixed text's sentences, padded to the longest."""
    texts = [sentence.strip() for sentence in re.split(r"(?<=[.;])\s", agreement.TEXT) if sentence.strip()]
    tokens, mask = session.tokenize(texts)
    pooling = pooling_for(session.directory, task)
    return EncoderReference(task, tokens, mask, session.outputs(tokens, mask), pooling, dtype, session.device)


def asked_of(reference: EncoderReference) -> dict[str, Any]:
    """Return what a worker is told beside the model's place."""
    return {
        "tokens": reference.tokens.tolist(),
        "mask": reference.mask.tolist(),
        "outputs": list(OUTPUTS.get(reference.task, ())),
        "target": None if reference.target is None else reference.target.tolist(),
    }


def compare_encoded(reference: EncoderReference, said: Mapping[str, Any], place: Path, bits: int) -> dict[str, Any]:
    """Return the fields of a loading line: verdict, numbers and what was compared."""
    if list(said["logits_shape"]) != list(reference.outputs.shape):
        reason = f"it gives {said['logits_shape']}, and optkit {list(reference.outputs.shape)}"
        return {"verdict": "disagrees", "reason": reason}
    found = agreement.read_logits(place, said["logits_shape"])
    dtypes = (reference.dtype, str(said["dtype"]))
    compare = _compare_embeddings if reference.pooling else _compare_labels
    return compare(reference, found, dtypes, bits)


def _compare_embeddings(
    reference: EncoderReference, found: Tensor, dtypes: tuple[str, str], bits: int
) -> dict[str, Any]:
    import torch

    pool: Any = reference.pooling
    ours, theirs = (pool(features, reference.mask.float()) for features in (reference.outputs, found))
    cosine = float(torch.cosine_similarity(ours.double(), theirs.double(), dim=-1).min())
    limit = ROUNDED_ACTIVATIONS if bits else max(TOLERANCES.get(each, TOLERANCES["bfloat16"]) for each in dtypes)
    what = f"embeddings ({pool}) of {len(found)} padded texts of up to {found.shape[1]} tokens"
    when = f"agrees if each cosine is within {limit:g} of 1 ({because(dtypes, bits)})"
    fields: dict[str, Any] = {"compared": f"{what}; {when}"}
    if not found.isfinite().all():
        return {**fields, "verdict": "disagrees", "reason": "its features are not all finite numbers"}
    fields |= {"min_cosine": min(cosine, 1.0), "max_difference": float((ours - theirs).abs().max())}
    if cosine >= 1 - limit:
        return {**fields, "verdict": "agrees"}
    reason = f"the least cosine is {cosine:.6f}, and rounding explains {1 - limit:g}"
    return {**fields, "verdict": "disagrees", "reason": reason}


def _compare_labels(reference: EncoderReference, found: Tensor, dtypes: tuple[str, str], bits: int) -> dict[str, Any]:
    ours = reference.outputs
    if found.dim() == 3:
        seen = reference.mask.bool()
        ours, found = ours[seen], found[seen]
    limit = agreement.tolerance(*dtypes, activation_bits=bits)
    items = "tokens" if reference.outputs.dim() == 3 else "padded texts"
    what = f"{found.shape[1]:,} logits for each of {len(found)} {items}"
    fields = {"compared": f"{what}; agrees below a mean KL of {limit:g} ({because(dtypes, bits)})"}
    return {**fields, **agreement.verdict_of(agreement.compare_logits(ours, found), limit)}


def because(dtypes: tuple[str, str], bits: int) -> str:
    """Return why a limit is what it is: both dtypes, and whether activations are rounded."""
    rounded = ", rounded activations" if bits > 4 else f", activations of {bits} bits"
    return f"{dtypes[0]} and {dtypes[1]}{rounded if bits else ''}"
