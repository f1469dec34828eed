"""Which architectures are encoders (BERT and its kin), and what each is loaded as and gives; no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.errors import StageError

WHERE = "onnx"


@dataclass(frozen=True)
class Head:
    """What an architecture is loaded as, and what it gives."""

    loader: str
    outputs: tuple[str, ...]


HEADS = {
    "ForSequenceClassification": Head("AutoModelForSequenceClassification", ("logits",)),
    "ForTokenClassification": Head("AutoModelForTokenClassification", ("logits",)),
    "ForQuestionAnswering": Head("AutoModelForQuestionAnswering", ("start_logits", "end_logits")),
    "ForMaskedLM": Head("AutoModelForMaskedLM", ("logits",)),
    "Model": Head("AutoModel", ("last_hidden_state",)),
}
"""By the end of the name of the architecture; a bare encoder gives the features of each token, which pooling makes embeddings of."""
DECODERS = ("ForCausalLM", "LMHeadModel")
"""How the names of causal language models end."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names first; empty where it names none."""
    return str(next(iter(config.get("architectures") or [""])))


def is_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a causal language model."""
    return architecture_of(config).endswith(DECODERS) or bool(config.get("is_decoder"))


def encoder_head(config: Mapping[str, Any]) -> Head:
    """Return how an encoder is loaded, from its config.json. Raises StageError for what is none, with the exporter that there is for it."""
    architecture = architecture_of(config)
    found = next((head for end, head in HEADS.items() if architecture.endswith(end)), None)
    if found and not config.get("is_encoder_decoder") and not config.get("is_decoder"):
        return found
    raise StageError(
        f"{architecture or config.get('model_type')} is no encoder that torch exports here",
        where=WHERE,
        why=f"It knows architectures that end with {', '.join(HEADS)}",
        remedy="Take exporter: genai, which is for causal language models" if is_decoder(config) else "Export another model",
    )
