"""A checkpoint as another version of transformers reads it.
It comes with the proof that it reads the same model.

transformers 5 writes `rope_parameters`, which 4.x passes over in silence: it then turns the
positions with its default frequencies. So the directory that is handed over has both spellings, and
the logits on a few tokens are compared. Libraries that open it with the attention of their choice
would open Gemma 2 without its soft cap; `attn_implementation` in config.json decides, in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.environment import package_version
from optkit.errors import StageError
from optkit.model.attention_choice import attention_options
from optkit.source.quiet import quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor

PROBE_TOKENS = 128
"""Tokens whose logits are compared."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest ||difference|| / ||logits|| of the same model in two versions of transformers, by the
dtype that they compute in.
"""
INSTEAD = "Take `backend: optkit` for this model"
TOKENIZER_OF_5 = "TokenizersBackend"


def hand_over(source: Path, directory: Path, transformers: str) -> Path:
    """Return a directory with a checkpoint whose config.json suits this version of transformers.
    All its files are there.

    If it reads the checkpoint as it is, that is `source`; else `directory` is filled with links
    and a config.json of its own.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    attention = attention_options(config, {})
    is_newer = int(transformers.partition(".")[0]) >= 5
    if is_newer and not attention:
        return source
    directory.mkdir()
    for path in source.iterdir():
        if path.name not in ("config.json", "tokenizer_config.json"):
            (directory / path.name).symlink_to(path.resolve())
    config = {**(config if is_newer else both_spellings(config)), **attention}
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if (source / "tokenizer_config.json").is_file():
        tokenizer: dict[str, Any] = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        if tokenizer.get("tokenizer_class") == TOKENIZER_OF_5 and not is_newer:
            tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2), encoding="utf-8")
    return directory


def both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that transformers 4 reads as transformers 5 does.
    `rope_theta`, `rope_scaling`, `torch_dtype` are there too.
    """
    old = dict(config)
    if isinstance(named := config.get("dtype"), str):
        old["torch_dtype"] = named
    for part in ("text_config", "vision_config"):
        if isinstance(config.get(part), Mapping):
            old[part] = both_spellings(config[part])
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return old
    if any(isinstance(each, Mapping) for each in rope.values()):
        local = rope.get("sliding_attention") or {}
        if "rope_theta" in local:
            old["rope_local_base_freq"] = local["rope_theta"]
        rope = rope.get("full_attention") or next(iter(rope.values()))
    scaling = dict(rope)
    old |= {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    old["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return old


def logits_here(source: Path, tokens: Sequence[int], dtype: str) -> Tensor:
    """Return the logits of a float checkpoint by this process's transformers, on the CPU.
    They are float32 [tokens, vocabulary].
    """
    import torch
    from transformers import AutoModelForCausalLM

    options = attention_options(json.loads((source / "config.json").read_text(encoding="utf-8")), {})
    with quiet_transformers(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), local_files_only=True, **options
        )
        logits: Tensor = model.eval()(torch.tensor([list(tokens)])).logits[0].float()
    return logits


def check_same_model(
    here: Tensor, there: Tensor, dtype: str, name: str, transformers: str, instead: str = INSTEAD
) -> float:
    """Return ||difference|| / ||logits|| of two readings of a model. Raises StageError if they
    are two models.
    """
    where, ours = f"backend {name}", package_version("transformers")
    why = "They read the checkpoint as two models"
    if here.shape != there.shape:
        what = f"transformers {transformers} gives logits {list(there.shape)} and {ours} gives {list(here.shape)}"
        raise StageError(what, where=where, why=why, remedy=instead)
    apart = float((here - there).norm() / here.norm())
    limit = TOLERANCES.get(dtype, TOLERANCES["bfloat16"])
    if not apart <= limit:
        what = f"the logits of transformers {transformers} and {ours} are {apart:.3g} apart, {limit:g} is the limit"
        why += ", so another one than yours would be quantized"
        raise StageError(what, where=where, why=why, remedy=instead)
    return apart
