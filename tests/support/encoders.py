"""Tiny random encoders (BERT and its kin)."""

from pathlib import Path
from typing import Any

from tests.support.tiny_models import save_tokenizer

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "BertModel": {"model_type": "bert", **SIZES, "max_position_embeddings": 64},
    "BertForSequenceClassification": {"model_type": "bert", **SIZES, "max_position_embeddings": 64, "num_labels": 3},
    "DistilBertModel": {
        "model_type": "distilbert",
        "vocab_size": 512,
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
    }
    | {"max_position_embeddings": 64},
    "RobertaModel": {"model_type": "roberta", **SIZES, "max_position_embeddings": 66, "pad_token_id": 1},
    "BertForMaskedLM": {"model_type": "bert", **SIZES, "max_position_embeddings": 64},
}


def save_encoder(architecture: str, directory: Path) -> Path:
    """Write one of `ENCODERS`."""
    return save_random(architecture, ENCODERS[architecture], directory, 3, 0.3)


def save_random(architecture: str, fields: dict[str, Any], directory: Path, seed: int, spread: float) -> Path:
    """Write a seeded random float32 model, as transformers saves it, with the tiny tokenizer."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0, spread)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory
