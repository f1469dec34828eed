"""Tiny random models that see, with the tokenizer of the other tiny models."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny_models import SIZES, save_tokenizer

SEES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", **SEES, "image_size": 28}
LLAMA = {"model_type": "llama", **SIZES, "tie_word_embeddings": False}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
QWEN_SEES = {"depth": 3, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
QWEN_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
VISION_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**SIZES, "head_dim": 16, "sliding_window": 8},
        "vision_config": {**SEES, "image_size": 28},
        "mm_tokens_per_image": 4,
        **{f"{name}_token_index": 500 + number for number, name in enumerate(("image", "boi", "eoi"))},
    },
    "qwen2_vl": {
        "text_config": {**SIZES, **MROPE},
        "vision_config": {**QWEN_SEES, "embed_dim": 32, "hidden_size": 64},
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**SIZES, **MROPE},
        "vision_config": {**QWEN_SEES, "intermediate_size": 64, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**SIZES, **MROPE, "head_dim": 16, "num_hidden_layers": 3},
        "vision_config": {**QWEN_SEES, "intermediate_size": 64, "out_hidden_size": 64}
        | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": {**SIZES, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_key_head_dim": 2, "linear_value_head_dim": 2}
        | {"linear_num_key_heads": 32, "linear_num_value_heads": 32},
        "vision_config": {**QWEN_SEES, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "llama4": {
        "text_config": {**SIZES, "head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 4}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 16},
        "vision_config": {**SEES, "intermediate_size": 128, "image_size": 28, "vision_output_dim": 32}
        | {"projector_input_dim": 32, "projector_output_dim": 32},
        **{f"{name}_token_index": 500 + number for number, name in enumerate(("image", "boi", "eoi"))},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **SIZES, "head_dim": 16, "tie_word_embeddings": False},
        "vision_config": {"model_type": "pixtral", **SEES, "head_dim": 16, "image_size": 56},
        "image_token_index": 500,
        "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": LLAMA,
        "vision_config": {**SEES, "model_type": "clip_vision_model", "image_size": 28, "projection_dim": 32},
        "image_token_index": 500,
        "image_seq_length": 4,
    },
    "smolvlm": {
        "text_config": {**LLAMA, "tie_word_embeddings": True},
        "vision_config": {**SEES, "image_size": 28, "patch_size": 7},
        "image_token_id": 500,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": False},
        "vision_config": {**SEES, "image_size": [28, 28], "patch_size": [7, 7]},
        "image_token_id": 500,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", **SIZES, "head_dim": 16},
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "image_token_index": 500,
        "vocab_size": 512,
        "projection_dim": 64,
        "hidden_size": 64,
    },
    "paligemma2": {
        "model_type": "paligemma",
        "text_config": {"model_type": "gemma2", **SIZES, "head_dim": 16, "query_pre_attn_scalar": 16}
        | {"sliding_window": 8, "num_hidden_layers": 2},
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "image_token_index": 500,
        "vocab_size": 512,
        "projection_dim": 64,
        "hidden_size": 64,
    },
    "mllama": {
        "text_config": {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [1], "pad_token_id": 0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_global_layers": 2}
        | {"attention_heads": 2, "image_size": 28, "vision_output_dim": 96, "intermediate_layers_indices": [0, 1]},
        "image_token_index": 500,
    },
}
"""`model_type` -> the rest of config.json."""


GRID = {"pixel_values": (16, 3 * 2 * 14 * 14), "image_grid_thw": [[1, 4, 4]]}
SQUARE = {"pixel_values": (1, 3, 28, 28)}
IMAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "gemma3": (4, SQUARE),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), (4, GRID)),
    "llama4": (1, SQUARE),
    "mistral3": (2, {"pixel_values": (1, 3, 28, 56), "image_sizes": [[28, 56]]}),
    "llava": (4, SQUARE),
    "smolvlm": (4, {"pixel_values": (1, 1, 3, 28, 28)}),
    "internvl": (4, SQUARE),
    **dict.fromkeys(("paligemma", "paligemma2"), (4, SQUARE)),
}
"""`model_type` -> the tokens of an image, and what its processor makes of one: pixels have a shape."""


class ImagePrompts:
    """Prompts of different lengths, each with a random image, as the model's processor would make them."""

    def __init__(self, kind: str, lengths: Sequence[int] = (9, 14)) -> None:
        self.kind, self.lengths, self.longest = kind, lengths, max(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> "ImagePrompts":
        return ImagePrompts(self.kind, self.lengths[rows])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch

        places, made = IMAGES[self.kind]
        for seed, length in enumerate(self.lengths):
            draw = torch.Generator().manual_seed(seed)
            tokens = torch.randint(1, 490, (1, length), generator=draw)
            tokens[:, 2 : 2 + places] = 500
            more = {name: torch.tensor(value) for name, value in made.items() if name != "pixel_values"}
            if self.kind.startswith(("qwen", "gemma")):
                more["mm_token_type_ids" if self.kind.startswith("qwen") else "token_type_ids"] = (tokens == 500).int()
            if self.kind.startswith("paligemma"):
                more["token_type_ids"] = (torch.arange(length) >= 6).int().view(1, -1)  # a prefix and a suffix
            yield {"input_ids": tokens, "pixel_values": torch.rand(made["pixel_values"], generator=draw), **more}


def save_vision_model(kind: str, directory: Path) -> Path:
    """Write a seeded random float32 model of one of `VISION_CONFIGS`, as transformers saves it, with
    its tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(**{"model_type": kind, **VISION_CONFIGS[kind]})
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5 if "embed" not in name else 1.0)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory
