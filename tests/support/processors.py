"""Processors of the tiny models that see: PIL's image processors, and the tiny tokenizer with tokens
for images.
"""

import json
from pathlib import Path
from typing import Any

import pytest

TOKENS = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "end_token": "<end>"}
"""Their ids are 500, 501, 502 and 503, as `VISION_CONFIGS` has them."""
FIRST = 500
SQUARE = {"size": {"height": 28, "width": 28}}
PROCESSORS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], str]] = {
    "gemma3": ("Gemma3Processor", {"image_seq_length": 4}, "Gemma3ImageProcessorPil", SQUARE, "<boi>"),
    "llava": (
        "LlavaProcessor",
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        "<image>",
    ),
    "paligemma": ("PaliGemmaProcessor", {}, "SiglipImageProcessorPil", {**SQUARE, "image_seq_length": 4}, ""),
    "qwen2_5_vl": (
        "Qwen2_5_VLProcessor",
        {},
        "Qwen2VLImageProcessorPil",
        {"patch_size": 14, "min_pixels": 28 * 28, "max_pixels": 16 * 28 * 28},
        "<eoi><image><end>",
    ),
}
"""Kind of model -> class of its processor and its fields, those of its images, and what its template
writes for an image.
"""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ END }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
).replace("END", r"'\n'")


def save_processor(kind: str, directory: Path, template: str = TEMPLATE) -> None:
    """Write the processor of a tiny model beside it, in place of its tokenizer."""
    import transformers
    from transformers import PreTrainedTokenizerFast

    processor, fields, images, sizes, written = PROCESSORS[kind]
    file = directory / "tokens.json"
    file.write_text(json.dumps(_with_tokens(json.loads((Path(__file__).parent / "tiny_tokenizer.json").read_text()))))
    PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token="<|endoftext|>", eos_token="<|endoftext|>", extra_special_tokens=TOKENS
    ).save_pretrained(directory)
    file.unlink()
    getattr(transformers, images)(**sizes).save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": processor, **fields}))
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    if written:
        (directory / "chat_template.jinja").write_text(template.replace("IMAGE", written))


def _with_tokens(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer whose tokens from 500 on are those of images."""
    model, names = tokenizer["model"], list(TOKENS.values())
    replaced = range(FIRST, FIRST + len(names))
    gone = {token for token, place in model["vocab"].items() if place in replaced}
    model["vocab"] = {token: place for token, place in model["vocab"].items() if token not in gone}
    model["vocab"] |= dict(zip(names, replaced, strict=True))
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) not in gone]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": place, "content": name, **special} for name, place in zip(names, replaced, strict=True)]
    return {**tokenizer, "model": model, "added_tokens": [*tokenizer["added_tokens"], *added]}


def without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processors be loaded whose part for videos needs torchvision, which has no build for CPUs."""
    from transformers import processing_utils
    from transformers.video_processing_utils import BaseVideoProcessor

    class Unused:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> Any:
            return object.__new__(BaseVideoProcessor)

    monkeypatch.setattr("transformers.models.auto.video_processing_auto.AutoVideoProcessor", Unused)
    monkeypatch.setattr(processing_utils.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)


def save_pairs(directory: Path, count: int = 4, noun: str = "list") -> Path:
    """Write records of seeded images of several sizes, with a text, and return their file."""
    import torch
    from PIL import Image

    draw = torch.Generator().manual_seed(3)
    lines = []
    for index in range(count):
        pixels = torch.randint(0, 256, (30 + 20 * (index % 3), 50, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(directory / f"{index}.png")
        text = " ".join(f"number {place} of the {noun}" for place in range(index + 2))
        lines.append(json.dumps({"image": f"{index}.png", "text": text}))
    (directory / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "pairs.jsonl"
