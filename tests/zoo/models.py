"""Tiny random models on disk, and what plain transformers makes of a directory."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import WhisperFeatureExtractor

from optkit.model.prompts import placed
from optkit.session.loading import BITSANDBYTES_TILE
from tests.support.tiny_models import draw_, save_tokenizer
from tests.zoo.configs import SPECIAL, kinds, tiny_config

LARGEST = 5_000_000
"""Parameters of the largest model: one that has more has a field that `configs.SIZES` does not name."""
TOKENS = torch.randint(1, SPECIAL - 20, (2, 24), generator=torch.Generator().manual_seed(0))


class TooLargeError(Exception):
    """A tiny model that is not tiny."""


def save_model(kind: str, directory: Path, **fields: Any) -> Path:
    """Write a seeded random float32 model of an architecture, with a tokenizer."""
    config = tiny_config(kind, **fields)
    config.architectures = [kinds()[kind]]
    build = getattr(transformers, kinds()[kind])
    with torch.random.fork_rng():
        torch.manual_seed(sum(kind.encode()))
        with torch.device("meta"):
            parameters = {name: each.numel() for name, each in build(config).named_parameters()}
        if sum(parameters.values()) > LARGEST:
            largest = sorted(parameters, key=parameters.__getitem__)[-3:]
            raise TooLargeError(f"{sum(parameters.values()):,} parameters, many of them in {largest}")
        model = build(config).to(torch.float32)
        draw_(model)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    if hears(config):
        WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1).save_pretrained(directory)
    return directory


def hears(config: Any) -> bool:
    """Say whether an encoder is given sounds."""
    return bool(config.is_encoder_decoder and getattr(config, "num_mel_bins", None))


def plain_logits(directory: Path) -> Tensor:
    """Return the logits of `TOKENS`, or an encoder's features, as transformers opens a directory.

    Raises ValueError if a parameter finds no tensor in the files, or a tensor no parameter.
    """
    model = plain_model(directory)
    with torch.no_grad():
        return logits_of(model, TOKENS)


def plain_model(directory: Path) -> Any:
    """Return the model that transformers opens; raises as `plain_logits` does."""
    config = transformers.AutoConfig.from_pretrained(directory)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    placed: dict[str, Any] = {"device_map": {"": "cpu"}} if method == "bitsandbytes" else {}
    model, report = getattr(transformers, config.architectures[0]).from_pretrained(
        directory, dtype="auto", attn_implementation="eager", output_loading_info=True, **placed
    )
    for found in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(found) or ())):
            raise ValueError(f"{len(names)} {found.replace('_', ' ')}: {', '.join(names[:3])}")
    rows, columns = BITSANDBYTES_TILE
    for module in model.modules():
        takes = getattr(module, "support_avx512bf16_for_cpu", False)
        if takes and (module.out_features % rows or module.in_features % columns):
            module.support_avx512bf16_for_cpu = False  # its kernel there fails with such layers
    return model.eval()


def given_to(config: Any) -> dict[str, Tensor]:
    """Return what an encoder is given: `TOKENS`, or noise in place of sounds."""
    if not hears(config):
        return {"input_ids": TOKENS}
    shape = len(TOKENS), config.num_mel_bins, 2 * config.max_source_positions
    return {"input_features": torch.randn(shape, generator=torch.Generator().manual_seed(0))}


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return what a model says of tokens, float32."""
    if model.config.is_encoder_decoder:
        found = model(
            **placed(given_to(model.config), "cpu", model.dtype), decoder_input_ids=tokens, use_cache=False
        ).logits
    elif type(model).__name__.endswith("Model") and "LMHead" not in type(model).__name__:
        found = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    else:
        found = model(input_ids=tokens, use_cache=False).logits
    return torch.as_tensor(found).float()


def greedy(model: Any, tokens: Tensor, count: int) -> Tensor:
    """Return tokens and the likeliest ones behind them; without a cache, as nothing can be wrong with it then."""
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, logits_of(model, tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens
