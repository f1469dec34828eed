"""Tiny random encoder-decoders: T5, BART, Marian, Whisper; and pairs for them."""

import json
import math
import struct
import wave
from pathlib import Path
from typing import Any

from tests.support.encoders import save_random
from tests.support.tiny_models import VOCABULARY

LAYERS = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 64, "decoder_start_token_id": 2}
HEADS = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
INNER = {f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {
        "model_type": "t5", **TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
        "num_heads": 4, "decoder_start_token_id": 1, "feed_forward_proj": "gated-gelu",
    },
    "BartForConditionalGeneration": {
        "model_type": "bart", **TOKENS, **LAYERS, **HEADS, **INNER, "max_position_embeddings": 128,
        "forced_eos_token_id": None,
    },
    "MarianMTModel": {"model_type": "marian", **TOKENS, **LAYERS, **HEADS, **INNER, "max_position_embeddings": 128},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper", **TOKENS, **LAYERS, **HEADS, **INNER, "num_mel_bins": 16, "max_source_positions": 50,
        "max_target_positions": 64, "begin_suppress_tokens": None,
    },
}  # fmt: skip


def save_encoder_decoder(architecture: str, directory: Path) -> Path:
    """Write one of `CONFIGS` and, if it hears, an extractor that hears one second."""
    save_random(architecture, CONFIGS[architecture], directory, 5, 0.2)
    if "num_mel_bins" in CONFIGS[architecture]:
        from transformers import WhisperFeatureExtractor

        WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(directory)
    return directory


def write_wav(path: Path, pitch: float, seconds: float = 0.5, rate: int = 16_000, width: int = 2) -> Path:
    """Write a tone."""
    most = 2 ** (8 * width - 1) - 1
    values = [round(0.5 * most * math.sin(2 * math.pi * pitch * n / rate)) for n in range(int(seconds * rate))]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(rate)
        zero = 128 if width == 1 else 0
        file.writeframes(b"".join(struct.pack("<i", value + zero)[:width] for value in values))
    return path


def write_pairs(directory: Path, hears: bool, count: int = 6) -> Path:
    """Write pairs of texts, or of audio files and texts, and return the .jsonl file."""
    directory.mkdir(exist_ok=True, parents=True)
    records = []
    for index in range(count):
        said = f"The answer to question {index} is {index * index}, {'and so on, ' * (index % 3)}as it was."
        if hears:
            name = write_wav(directory / f"{index}.wav", 200.0 + 50 * index).name
            records.append({"audio": name, "text": said})
        else:
            records.append(
                {"input": f"What is the answer to question {index}, {'please, ' * index}sir?", "target": said}
            )
    path = directory / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path
