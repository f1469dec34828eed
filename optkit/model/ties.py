"""Whether the output layer is the embedding, as the config says, by the bytes of both. No torch."""

from __future__ import annotations

from optkit.model.checkpoint import Checkpoint
from optkit.model.config_defaults import TIED, tied_by_default

HEADS = ("lm_head.weight", "output.weight", "embed_out.weight", "proj_out.weight")
"""How the name of the output layer ends."""
EMBEDDINGS = tuple(
    f"{name}.weight"
    for name in ("embed_tokens", "wte", "embeddings", "word_embeddings", "embed_in", "tok_embeddings", "shared")
)


def output_and_embedding(checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """Return the names of both tensors, None for one that is not there."""
    head = next((name for name in checkpoint.tensors if f".{name}".endswith(tuple(f".{end}" for end in HEADS))), None)
    return head, next((name for end in EMBEDDINGS for name in checkpoint.tensors if name.endswith(end)), None)


def broken_tie(checkpoint: Checkpoint, most: int | None = None) -> str:
    """Return in words that the output layer is not the embedding that it is tied to, empty if it is.
    Tensors of different shapes are not compared.

    most: how many bytes are compared, else all
    """
    head, embedding = output_and_embedding(checkpoint)
    config, silent = checkpoint.config, TIED not in checkpoint.config
    if not (head and embedding) or checkpoint.tensors[head] != checkpoint.tensors[embedding]:
        return ""
    if not (tied_by_default(str(config.get("model_type", ""))) if silent else config[TIED]):
        return ""
    same = checkpoint.read_bytes(head, most) == checkpoint.read_bytes(embedding, most)
    told = f"{TIED} is true{', which config.json leaves out,' if silent else ','}"
    return "" if same else f"{told} and {head} differs from {embedding}"
