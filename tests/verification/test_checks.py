"""The files of an artifact: digests, headers, blocks, ties, tokenizer."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optkit.artifact import Artifact, read_artifact
from optkit.verification.artifact_checks import check_artifact
from tests.conftest import TinyModel
from tests.support.changes import change_json, changing
from tests.support.publishing import published


def broken(artifact: Artifact) -> dict[str, str]:
    """Return the checks that do not hold."""
    return {check.name: check.detail for check in check_artifact(artifact) if not check.ok}


def test_a_whole_artifact(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    artifact.attach("scorecard.json", "{}")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    checks = {check.name: check for check in check_artifact(artifact)}
    assert list(checks) == ["digests", "weights", "layers", "blocks", "ties", "tokenizer"]
    assert all(check.ok for check in checks.values())
    count = len(artifact.record.files)
    assert (
        checks["digests"].detail
        == f"the SHA-256 of {count} files are those of optkit.json; beside them notes.txt, which optkit did not write"
    )
    assert checks["layers"].detail == "0 packed layers and 21 plain ones, as config.json says"
    assert checks["blocks"].detail == "3 decoder blocks, each with its tensors"


def test_a_byte_that_changed_is_found_though_size_and_time_are_the_same(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    artifact.check()
    assert broken(artifact) == {"digests": "model.safetensors was changed"}


def test_a_file_cut_off(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-100])
    found = broken(artifact)
    assert found["digests"] == f"model.safetensors has {size - 100:,} bytes, not {size:,}"
    assert f"the file has {size - 100:,} bytes and its header asks for {size:,}" in found["weights"]


def test_a_file_that_is_lost(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    assert broken(artifact) == {
        "digests": "config.json is missing",
        "weights": f"{tmp_path / 'out'}: there is no config.json. A model directory needs one. "
        "Download the model whole, or name its directory.",
    }


def lose(directory: Path, *names: str) -> None:
    with changing(directory) as held:
        for name in names:
            del held[name]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("model.layers.1.input_layernorm.weight",), "there is no model.layers.1.input_layernorm.weight"),
        (("model.layers.2.mlp.up_proj.weight",), "there is no model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_that_one_block_lacks(names: tuple[str, ...], said: str, model: Path, tmp_path: Path) -> None:
    lose(model, *names)
    assert broken(published(model, tmp_path / "out")) == {"blocks": said}


def test_a_block_that_is_lost(model: Path, tmp_path: Path) -> None:
    lose(model, *(name for name in load_file(model / "model.safetensors") if ".layers.2." in name))
    assert broken(published(model, tmp_path / "out")) == {
        "blocks": "config.json says 3 decoder blocks, and there are no weights of 2"
    }


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "gemma3", "gpt2", "opt", "gptj", "gpt_oss"])
def test_models_of_every_make_are_whole(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    assert broken(published(tiny_model(kind), tmp_path / "out")) == {}


@pytest.mark.parametrize(
    ("tied", "head", "said"),
    [
        (False, None, "tie_word_embeddings is false, and there is no lm_head.weight"),
        (True, lambda embedding: embedding.clone(), None),
        (False, lambda embedding: embedding + 1, None),
        (
            True,
            lambda embedding: embedding + 1,
            "tie_word_embeddings is true, and lm_head.weight differs from model.embed_tokens.weight",
        ),
        (
            True,
            lambda embedding: embedding[:-1].clone(),
            "tie_word_embeddings is true, and lm_head.weight has another shape or dtype than model.embed_tokens.weight",
        ),
    ],
)
def test_tied_weights(
    tied: bool, head: Callable[[torch.Tensor], torch.Tensor] | None, said: str | None, model: Path, tmp_path: Path
) -> None:
    with changing(model) as held:
        if head:
            held["lm_head.weight"] = head(held["model.embed_tokens.weight"])
    change_json(model / "config.json", tie_word_embeddings=tied)
    assert broken(published(model, tmp_path / "out")) == ({"ties": said} if said else {})


def test_embeddings_that_are_lost(model: Path, tmp_path: Path) -> None:
    lose(model, "model.embed_tokens.weight")
    assert broken(published(model, tmp_path / "out")) == {"ties": "there are no token embeddings"}


def test_a_tokenizer_that_is_lost_or_damaged(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    assert broken(published(model, tmp_path / "one"))["tokenizer"].startswith("tokenizer.json is not JSON: ")
    (model / "tokenizer.json").unlink()
    assert broken(published(model, tmp_path / "two"))["tokenizer"] == "there is no tokenizer"


def test_shards_and_their_index(tiny_model: TinyModel, tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    (model / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_model("llama")).save_pretrained(model, max_shard_size="200KB")
    assert broken(published(model, tmp_path / "whole")) == {}
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    norm = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.extra.weight"] = norm
    path.write_text(json.dumps(index))
    found = broken(published(model, tmp_path / "mixed"))
    assert f"model.extra.weight is not in {norm}; model.norm.weight in {norm} is not in {path.name}" in found["weights"]


def test_a_format_that_is_not_known_is_not_checked_and_that_is_said(model: Path, tmp_path: Path) -> None:
    change_json(model / "config.json", quantization_config={"quant_method": "exl3"})
    checks = {check.name: check for check in check_artifact(published(model, tmp_path / "out"))}
    assert checks["layers"].ok
    assert (
        checks["layers"].detail == "not checked: optkit does not know how the layers of quant_method exl3 lie on disk"
    )


def test_the_directory_alone_is_believed(model: Path, tmp_path: Path) -> None:
    """A record that agrees with a damaged model does not hide the damage."""
    lose(model, "model.layers.1.mlp.up_proj.weight")
    out = published(model, tmp_path / "out").directory
    assert broken(read_artifact(out)) == {"blocks": "there is no model.layers.1.mlp.up_proj.weight"}
