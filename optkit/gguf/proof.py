"""Proof that llama.cpp computes of a written file what its source says."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from optkit.errors import StageError
from optkit.gguf.llama_cpp import LlamaCppModel, tokens_of
from optkit.kernels.cpu.native import exact_products
from optkit.kernels.open_packed import load_packed
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.checkpoint import Checkpoint
from optkit.model.empty_model import stored_dtype
from optkit.progress import SilentProgress
from optkit.source.calibration import load_tokenizer
from optkit.source.texts import TextSource

CHARACTERS, TOKENS = 8_000, 256
"""Of the text: those that are cut into tokens, and the tokens whose logits are compared."""
LIMIT = 0.1
"""Largest mean KL, in nats a token, that inputs in 8 bits explain; of SmolLM2-135M a layer with its rows
in a wrong order makes 0.26 or more."""


def compare(source: Path, file: Path, rounded: bool, trust_remote_code: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return how far llama.cpp is from the source, and what to know of its tokenizer.

    Raises StageError if it computes something else, unless the weights were `rounded` on the way.
    """
    text = TextSource(dataset="python-reference").joined(None)[:CHARACTERS]
    ids = load_tokenizer(source, trust_remote_code)(text, verbose=False)["input_ids"]
    divergence = _divergence(source, file, ids[:TOKENS], trust_remote_code)
    if not rounded and not divergence < LIMIT:
        raise StageError(
            f"llama.cpp computes something else: {divergence:.3g} nats a token apart",
            where="gguf",
            why=f"Its rounding explains {LIMIT}",
            remedy="This is a bug of optkit or llama.cpp: report it with the model's name",
        )
    theirs = tokens_of(file, text)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(theirs, ids, strict=False)))
    other = (
        f"llama.cpp cuts text into other tokens than transformers, from token {same:,} of {len(ids):,} on: "
        "give it token ids that transformers' tokenizer made",
    )
    return {"divergence": divergence}, () if theirs == ids else other


def _divergence(source: Path, file: Path, ids: list[int], trust_remote_code: bool) -> float:
    checkpoint = Checkpoint(source)
    ids = ids[: checkpoint.shape.positions]
    layers = quantized_layers(checkpoint) or {}
    model, _ = load_packed(checkpoint, layers, "cpu", stored_dtype(checkpoint), SilentProgress(), trust_remote_code)
    with torch.no_grad(), exact_products():
        ours = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    opened = LlamaCppModel(file, "cpu")
    opened.start(1, len(ids))
    theirs = torch.from_numpy(opened.append([(token, place, 0) for place, token in enumerate(ids)])).log_softmax(-1)
    opened.close()
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())
