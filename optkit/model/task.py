"""What a model is for, from its config.json: text generation, or encoding to features or labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from optkit.errors import StageError
from optkit.model.config_defaults import model_folder
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
    TRANSLATION = "text2text-generation"
    """An encoder-decoder of text: logits of each token of a target, given an input."""
    SPEECH = "automatic-speech-recognition"
    """An encoder-decoder that hears: logits of each token of a transcript, given audio."""
    UNKNOWN = "unknown"
    """Whatever a model does whose code transformers does not have and that brings none."""


EVERY_TASK = frozenset(Task)
KNOWN_TASKS = EVERY_TASK - {Task.UNKNOWN}
WEIGHTS_ALONE = frozenset({Task.GENERATION, Task.UNKNOWN})
"""Models that stages change which compute with weights and run no model."""
ENCODING = frozenset({Task.FEATURES, Task.CLASSIFICATION})
ENCODER_DECODERS = frozenset({Task.TRANSLATION, Task.SPEECH})
GENERATING = ENCODER_DECODERS | {Task.GENERATION}
OF_TEXT = KNOWN_TASKS - ENCODER_DECODERS
"""Models with one stack of blocks: decoders and encoders."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
MULTI_MODAL = "ForConditionalGeneration"
"""How the architectures of decoders end that see or hear; those of encoder-decoders do so too."""
TOWERS = ("vision_config", "audio_config")
"""Keys of config.json with what stands in front of such a decoder."""
STREAM = "What it sees or hears enters the hidden states as its projector writes them"
"""Why they cannot be rotated or narrowed."""
PREFIXED = frozenset({"paligemma"})
"""`model_type` of those whose prompt is a prefix that each of its tokens sees whole, and a suffix behind it."""
CONDITIONED = (MULTI_MODAL, "MTModel")
"""How the architectures of encoder-decoders end that generate."""
MEL_BINS = "num_mel_bins"
"""Key of config.json that only models of audio have."""
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
CALLED_OTHERWISE = frozenset({
    "audioflamingo3", "blip", "blip-2", "canary", "cohere_asr", "cpmant", "dia", "git", "instructblip",
    "instructblipvideo", "kosmos-2", "kosmos-2.5", "moonshine", "moonshine_streaming", "moshi", "musicflamingo",
    "pop2piano", "speech_to_text", "udop", "vibevoice", "voxtral_realtime",
})  # fmt: skip
"""`model_type` of those that are named like the others, and give no logits of tokens alone, or sounds as
Whisper hears them.
"""
FIRST_POSITION = frozenset({
    "camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""`model_type` of those whose first position is the one behind the number of the padding token."""
LOADERS = {
    Task.FEATURES: "AutoModel",
    Task.TRANSLATION: "AutoModelForSeq2SeqLM",
    Task.SPEECH: "AutoModelForSpeechSeq2Seq",
}
PHRASES = {
    Task.GENERATION: "a causal language model",
    Task.FEATURES: "an encoder that gives features",
    Task.CLASSIFICATION: "an encoder with a head for labels",
    Task.TRANSLATION: "an encoder-decoder of text",
    Task.SPEECH: "an encoder-decoder of speech",
    Task.UNKNOWN: "a model whose code transformers does not have",
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names first; empty if it names none."""
    return str(next(iter(config.get("architectures") or [""])))


def architectures_of(config: Mapping[str, Any]) -> str:
    """Return all that config.json names, for messages; its `model_type` if it names none."""
    return ", ".join(config.get("architectures") or [str(config.get("model_type"))])


def phrase_of(tasks: Iterable[Task]) -> str:
    """Return what models of these tasks are, e.g. `an encoder of text`."""
    wanted = frozenset(tasks) & KNOWN_TASKS or frozenset(tasks)
    joined = {"an encoder of text": ENCODING, "an encoder-decoder": ENCODER_DECODERS}
    known = {phrase: group for phrase, group in joined.items() if group <= wanted}
    alone = wanted.difference(*known.values())
    return " or ".join([*(PHRASES[task] for task in Task if task in alone), *known])


def task_of(config: Mapping[str, Any]) -> Task | None:
    """Return what a config.json describes; None for what optkit does not optimize."""
    if config.get("model_type") in CALLED_OTHERWISE:
        return None
    if "auto_map" not in config and config.get("model_type") and not is_built_in(str(config["model_type"])):
        return Task.UNKNOWN
    names = [str(name) for name in config.get("architectures") or []]
    if not names:
        return None
    if config.get("is_encoder_decoder"):
        if not names[0].endswith(CONDITIONED) or any(map(config.get, TOWERS)):
            return None
        return Task.SPEECH if MEL_BINS in config else Task.TRANSLATION
    if any(name.endswith(CAUSAL) for name in names) or is_multi_modal(config):
        return Task.GENERATION
    if config.get("model_type") not in ENCODERS or config.get("is_decoder"):
        return None
    return Task.CLASSIFICATION if names[0].endswith(HEADS) else Task.FEATURES if names[0].endswith("Model") else None


def is_multi_modal(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json describes a decoder of text with other towers in front of it."""
    decodes = not (config.get("is_encoder_decoder") or text_config(config).get("is_encoder_decoder"))
    return decodes and architecture_of(config).endswith(MULTI_MODAL) and any(config.get(tower) for tower in TOWERS)


def refuse_multi_modal(config: Mapping[str, Any], where: str, why: str, remedy: str) -> None:
    """Raise StageError for a decoder with other towers in front of it."""
    if is_multi_modal(config):
        raise StageError(
            f"{architecture_of(config)} is more than a language model", where=where, why=why, remedy=remedy
        )


def sees_ahead(config: Mapping[str, Any]) -> bool:
    """Say whether the tokens of a text see those behind them."""
    return text_config(config).get("use_bidirectional_attention") is True and not has_prefix(config)


def has_prefix(config: Mapping[str, Any]) -> bool:
    """Say whether the tokens of a prompt see all of it, and those of its answer what is before them."""
    return config.get("model_type") in PREFIXED


def is_built_in(model_type: str) -> bool:
    """Say whether transformers itself has a model type's code; looks at files, imports nothing."""
    return model_folder(model_type) is not None


def loader_of(config: Mapping[str, Any]) -> str:
    """Return transformers' class that opens a model's architecture, e.g. `AutoModelForCausalLM`."""
    task = task_of(config)
    if task in LOADERS:
        return LOADERS[task]
    if is_multi_modal(config):
        return "AutoModelForImageTextToText" if config.get(TOWERS[0]) else "AutoModelForMultimodalLM"
    return f"AutoModel{next((head for head in HEADS if architecture_of(config).endswith(head)), 'ForCausalLM')}"


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that a model was built for, in tokens; None if unknown."""
    text = text_config(config)
    keys = ("max_position_embeddings", "n_positions", "max_target_positions")
    found = next((text[key] for key in keys if (text.get(key) or 0) > 0), None)
    if not found:
        return None
    unused = int(text.get("pad_token_id") or 0) + 1 if text.get("model_type") in FIRST_POSITION else 0
    return int(found) - unused
