import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from optkit.errors import SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.stage import Context, Report
from optkit.stages.cast import Cast
from tests.support.changes import change_json, changing
from tests.support.predictions import predicted

CONTEXT = Context()


def cast(source: Path, target: Path, dtype: str) -> Report:
    return Cast(dtype=dtype).run(source, target, CONTEXT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_equals_a_cast_by_transformers(tiny_model, target: Path, kind: str, dtype: str) -> None:
    report = cast(tiny_model(kind), target, dtype)
    torch_dtype = getattr(torch, dtype)
    written, stored = load_file(target / "model.safetensors"), load_file(tiny_model(kind) / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == dict.fromkeys(stored, torch_dtype)
    assert report.changed == len(stored)
    assert (
        report.details["size_bytes_before"]
        == 2 * report.details["size_bytes_after"]
        == sum(t.nbytes for t in stored.values())
    )
    assert (report.details["dtype_before"], report.details["dtype_after"]) == ("float32", dtype)
    tokens = AutoTokenizer.from_pretrained(target)("def f(x): return x", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch_dtype
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch_dtype)(tokens).logits
        assert torch.equal(model(tokens).logits, want)


def test_there_and_back_changes_nothing_more(tiny_model, target: Path, tmp_path: Path) -> None:
    cast(tiny_model("llama"), target, "bf16")
    (tmp_path / "back").mkdir()
    report = cast(target, tmp_path / "back", "fp32")
    assert report.details["dtype_before"] == "bfloat16"
    half = load_file(target / "model.safetensors")
    assert all(
        torch.equal(tensor, half[name].float())
        for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items()
    )


def test_the_prediction_is_what_comes_out(tiny_model, target: Path) -> None:
    cast(tiny_model("qwen2"), target, "bfloat16")
    assert predicted(Cast(dtype="bfloat16"), tiny_model("qwen2"), target).gpu_bytes == 0


def test_only_floats_change_and_integers_are_kept(tiny_model, target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    ids, mixed = torch.arange(5), torch.ones(3, dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"ids": ids, "mixed": mixed}, source / "model.safetensors", metadata={"format": "pt"})
    report = cast(source, target, "bfloat16")
    written = load_file(target / "model.safetensors")
    assert torch.equal(written["ids"], ids)
    assert torch.equal(written["mixed"], mixed)
    assert report.changed == len(tensors)


def test_the_config_says_so_in_every_part(tiny_model, target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    parts = {"text_config": {"torch_dtype": "float32", "size": 1}, "other": {"size": 2, "dtype": {}}}
    change_json(source / "config.json", lambda config: config.pop("dtype"), torch_dtype="float32", **parts)
    cast(source, target, "float16")
    written = json.loads((target / "config.json").read_text())
    assert "torch_dtype" not in written
    assert written["dtype"] == "float16"
    assert written["text_config"] == {"dtype": "float16", "size": 1}
    assert written["other"] == {"size": 2}
    assert written["hidden_size"] == 64


@pytest.mark.parametrize(
    ("short", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float16", "float16")]
)
def test_short_names(short: str, dtype: str) -> None:
    assert Cast(dtype=short).dtype == dtype


@pytest.mark.parametrize("wrong", ["int8", "fp8", 16, None])
def test_other_dtypes_are_refused(wrong: object) -> None:
    with pytest.raises(ValidationError, match="'bfloat16', 'float16' or 'float32'"):
        Cast(dtype=wrong)


def test_the_same_dtype_is_an_error(tiny_model, target: Path) -> None:
    message = (
        r"cast: the model is float32 already\. None of its 29 tensors would change\. Take the stage out of the recipe\."
    )
    with pytest.raises(StageError, match=message):
        cast(tiny_model("llama"), target, "float32")
    assert not list(target.iterdir())
    with pytest.raises(StageError, match=message):
        Cast(dtype="float32").predict(Checkpoint(tiny_model("llama")).shape, "cpu")


@pytest.mark.parametrize(
    ("value", "dtype", "shown"),
    [
        (7e4, "float16", r"70,000 do not fit float16\. Its largest number is 65,504\. Cast to bfloat16\."),
        (3.4e38, "bfloat16", r"[\d,]+ do not fit bfloat16\. They would be infinite\. Keep the dtype that they have\."),
    ],
)
def test_overflow_names_the_tensor(
    tiny_model, target: Path, tmp_path: Path, value: float, dtype: str, shown: str
) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    with changing(source) as tensors:
        tensors["model.norm.weight"][5] = value
    with pytest.raises(StageError, match=rf"model\.norm\.weight: weights of up to {shown}"):
        cast(source, target, dtype)
    assert not list(target.iterdir())


def test_nan_weights_are_refused(tiny_model, target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    with changing(source) as tensors:
        tensors["model.norm.weight"][5] = float("nan")
    with pytest.raises(SourceError, match=r"model\.norm\.weight: 1 of 64 weights are NaN"):
        cast(source, target, "bfloat16")
