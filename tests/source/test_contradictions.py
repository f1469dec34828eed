"""Model directories of which programs would read different weights."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from optkit.errors import SourceError
from optkit.source.models import ModelSource, pin_model
from tests.support.changes import change_json, changing


def two_sets_of_weights(model: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    shutil.copy(model / "model.safetensors", model / shard)
    index = {"weight_map": dict.fromkeys(load_file(model / shard), shard)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def a_file_that_transformers_alone_reads(model: Path) -> None:
    change_json(model / "config.json", transformers_weights="other.safetensors")


def an_adapter_beside(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")


def another_head(model: Path) -> None:
    with changing(model) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def another_head_and_a_silent_config(model: Path) -> None:
    another_head(model)
    change_json(model / "config.json", lambda config: config.pop("tie_word_embeddings"), model_type="gemma")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            two_sets_of_weights,
            ": model.safetensors and model.safetensors.index.json are both there. transformers reads the first, and "
            "other programs the shards that the second names. Remove the one that is not the model's.",
        ),
        (
            a_file_that_transformers_alone_reads,
            '/config.json: `transformers_weights` names "other.safetensors". transformers reads that file, and other '
            "programs model.safetensors. Name the file model.safetensors, and take the key out.",
        ),
        (
            an_adapter_beside,
            ": an adapter lies in it (adapter_config.json). transformers adds it to the model, and other programs do "
            "not. Merge it into the float weights by peft's merge_and_unload, or name a directory without it.",
        ),
        (
            another_head,
            ": tie_word_embeddings is true, and lm_head.weight differs from model.embed_tokens.weight. transformers "
            "computes with both, and other programs with one of them. Set tie_word_embeddings to false in "
            "config.json, or take the first tensor out of the file.",
        ),
        (
            another_head_and_a_silent_config,
            ": tie_word_embeddings is true, which config.json leaves out, and lm_head.weight differs from "
            "model.embed_tokens.weight. transformers",
        ),
    ],
)
def test_which_weights_are_meant_has_to_be_clear(
    make: Callable[[Path], None], said: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    make(model)
    with pytest.raises(SourceError, match=re.escape(f"{model}{said}")):
        pin_model(ModelSource(name=str(model)))


def test_weights_that_a_config_leaves_open_are_taken(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    change_json(model / "config.json", transformers_weights=None)
    assert pin_model(ModelSource(name=str(model))).revision


def test_a_head_that_is_the_embedding_once_more_is_taken(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    with changing(model) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert pin_model(ModelSource(name=str(model))).revision
