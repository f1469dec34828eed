"""What a model is for, from its config.json: text generation, or encoding to features or labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from optkit.model.text_config import text_config


class Task(StrEnum):
    """What a model does, by the names of Hugging Face's pipelines."""

    GENERATION = "text-generation"
    """A causal language model, which may see or hear too: logits of the next token after each."""
    FEATURES = "feature-extraction"
    """An encoder: features of each token, which pooling makes the embedding of a text."""
    CLASSIFICATION = "text-classification"
    """An encoder with a head: logits of the labels of a text, or of each of its tokens
    (token-classification, fill-mask).
    """


EVERY_TASK = frozenset(Task)
ENCODING = frozenset({Task.FEATURES, Task.CLASSIFICATION})
CAUSAL = ("ForCausalLM", "LMHeadModel")
MULTI_MODAL = "ForConditionalGeneration"
"""How the architectures of decoders end that see or hear; those of encoder-decoders do so too."""
TOWERS = ("vision_config", "audio_config")
"""Keys of config.json with what stands in front of such a decoder."""
PREFIXED = frozenset({"paligemma"})
"""`model_type` of those whose prompt is seen whole by each of its tokens, whatever config.json says."""
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
"""How the architectures of encoders end that give logits: of the labels of a text, of those of each
token, of the word in its place.
"""
ENCODERS = frozenset({
    "albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2",
    "distilbert", "electra", "ernie",
    "eurobert", "megatron-bert", "mobilebert", "modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert",
    "roberta",
    "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""`model_type` of the encoders of text: a decoder and a vision model can have an architecture that
ends in Model, too.
"""
FIRST_POSITION = frozenset({
    "camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""`model_type` of those whose first position is the one behind the number of the padding token."""
PHRASES = {
    Task.GENERATION: "a causal language model",
    Task.FEATURES: "an encoder that gives features",
    Task.CLASSIFICATION: "an encoder with a head for labels",
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names first; empty if it names none."""
    return str(next(iter(config.get("architectures") or [""])))


def architectures_of(config: Mapping[str, Any]) -> str:
    """Return all that config.json names, for messages; its `model_type` if it names none."""
    return ", ".join(config.get("architectures") or [str(config.get("model_type"))])


def phrase_of(tasks: Iterable[Task]) -> str:
    """Return what models of these tasks are, e.g. `an encoder of text`."""
    wanted = frozenset(tasks)
    return "an encoder of text" if wanted == ENCODING else " or ".join(PHRASES[task] for task in Task if task in wanted)


def task_of(config: Mapping[str, Any]) -> Task | None:
    """Return what a config.json describes; None for what optkit does not optimize."""
    names = [str(name) for name in config.get("architectures") or []]
    if config.get("is_encoder_decoder") or not names:
        return None
    if any(name.endswith(CAUSAL) for name in names) or is_multi_modal(config):
        return Task.GENERATION
    if config.get("model_type") not in ENCODERS or config.get("is_decoder"):
        return None
    return Task.CLASSIFICATION if names[0].endswith(HEADS) else Task.FEATURES if names[0].endswith("Model") else None


def is_multi_modal(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json describes a decoder of text with other towers in front of it."""
    decodes = not (config.get("is_encoder_decoder") or text_config(config).get("is_encoder_decoder"))
    return decodes and architecture_of(config).endswith(MULTI_MODAL) and any(config.get(tower) for tower in TOWERS)


def sees_ahead(config: Mapping[str, Any]) -> bool:
    """Say whether the tokens of a text see those behind them."""
    return text_config(config).get("use_bidirectional_attention") is True or config.get("model_type") in PREFIXED


def loader_of(config: Mapping[str, Any]) -> str:
    """Return transformers' class that opens a model's architecture, e.g. `AutoModelForCausalLM`."""
    if task_of(config) is Task.FEATURES:
        return "AutoModel"
    if is_multi_modal(config):
        return "AutoModelForImageTextToText" if config.get(TOWERS[0]) else "AutoModelForMultimodalLM"
    return f"AutoModel{next((head for head in HEADS if architecture_of(config).endswith(head)), 'ForCausalLM')}"


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that a model was built for, in tokens; None if unknown."""
    text = text_config(config)
    found = text.get("max_position_embeddings") or text.get("n_positions")
    if not found:
        return None
    unused = int(text.get("pad_token_id") or 0) + 1 if text.get("model_type") in FIRST_POSITION else 0
    return int(found) - unused
