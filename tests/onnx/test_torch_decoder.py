"""Decoders by torch.onnx.export: what they say, with a KV cache and without, and what cannot be
exported.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optkit.errors import RecipeError, ResourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.onnx.builder import Order
from optkit.onnx.directory import OnnxDirectory
from optkit.onnx.genai_config import write_genai_config
from optkit.onnx.model_file import ModelFile
from optkit.onnx.parity import check_parity
from optkit.onnx.runtime import OnnxRunner
from optkit.onnx.tracing import trace
from optkit.progress import SilentTask
from optkit.recipe.recipe import load_recipe
from optkit.stage import Report
from optkit.stages.onnx import Onnx
from tests.conftest import TinyModel
from tests.support import untraceable
from tests.support.exported import outputs
from tests.support.near import near
from tests.support.onnx_changes import overwrite
from tests.support.running import run_stage

CASES = {"1 x 1", "1 x 7", "2 x 33", "3 x 64", "1 x 256"}

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)
pytestmark = pytest.mark.usefixtures("children_here")


def test_a_decoder_that_genai_does_not_know(torch_gpt2: tuple[Path, Report], tiny_model: TinyModel) -> None:
    target, report = torch_gpt2
    assert report.details["exporter"] == "torch"
    assert report.notes == ("exported by torch: the exporter genai has no GPT2LMHeadModel",)
    assert set(report.details["logits_apart"]) == {*CASES, "10 steps"}
    assert max(report.details["logits_apart"].values()) < 2e-6
    assert (report.details["opset"], report.details["dtype"], report.details["kv_cache"]) == (21, "float32", True)
    assert {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json"} <= {
        path.name for path in target.iterdir()
    }
    graph = ModelFile(target)
    assert str(Path.cwd()).encode() not in (target / "model.onnx").read_bytes()
    assert "transformer.h.1.mlp.c_fc.weight" in graph.initializers
    cost, left = Onnx().predict(Checkpoint(tiny_model("gpt2")).shape, "cpu")
    written = (target / "model.onnx.data").stat().st_size
    assert 0.8 * written < cost.disk_bytes == left.size_bytes < 1.2 * written


def test_it_generates_what_transformers_generates(torch_gpt2: tuple[Path, Report], tiny_model: TinyModel) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("gpt2"), dtype=torch.float32).eval()
    tokens = torch.arange(14).view(2, 7) * 31 % 512
    wanted = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )
    runner = OnnxRunner(OnnxDirectory(torch_gpt2[0]))
    decoding = runner.prefill(tokens, 13)
    made = [decoding.logits.argmax(-1)]
    for _ in range(5):
        made.append(decoding.step(made[-1]).argmax(-1))
    assert torch.stack(made, 1).tolist() == wanted[:, 7:].tolist()


def test_prompts_may_be_padded_on_the_left(torch_gpt2: tuple[Path, Report]) -> None:
    heads = {
        name: np.zeros((1, 4, 0, 16), np.float32)
        for name in OnnxDirectory(torch_gpt2[0]).graph.inputs
        if "past" in name
    }
    tokens = np.arange(6)[None] * 31 % 512
    plain = outputs(torch_gpt2[0], {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **heads})
    padded = np.pad(tokens, ((0, 0), (3, 0)))
    mask = (np.arange(9) >= 3).astype(np.int64)[None]
    assert near(outputs(torch_gpt2[0], {"input_ids": padded, "attention_mask": mask, **heads})[:, 3:], plain)


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ("transformer.h.1.mlp.c_proj.weight", "block 1 is the first that differs, by "),
        ("transformer.h.0.mlp.c_fc.weight", "block 0 is the first that differs, by "),
        ("transformer.wpe.weight", "the embedding is the first that differs, by "),
    ],
)
def test_the_block_that_differs_is_named(
    torch_gpt2: tuple[Path, Report], tiny_model: TinyModel, tmp_path: Path, changed: str, place: str
) -> None:
    order = Order(
        tiny_model("gpt2"), Path(shutil.copytree(torch_gpt2[0], tmp_path / "onnx")), "cpu", "float32", exporter="torch"
    )
    overwrite(order.target, changed, b"\0\0\0\x3f")  # 0.5
    with pytest.raises(StageError, match=f"^onnx: the graph does not say what its source says: logits of .*; {place}"):
        check_parity(order, torch.arange(600) % 512, SilentTask())


def test_without_a_kv_cache(tiny_model: TinyModel, tmp_path: Path) -> None:
    report = run_stage(Onnx(exporter="torch", kv_cache=False, opset=18), tiny_model("llama"), tmp_path / "onnx")
    assert set(report.details["logits_apart"]) == CASES
    assert max(report.details["logits_apart"].values()) < 2e-6
    assert (report.details["opset"], report.details["kv_cache"], report.notes) == (18, False, ())
    assert not (tmp_path / "onnx" / "genai_config.json").exists()
    assert write_genai_config(tmp_path / "onnx") == "the graph has no KV cache"
    directory = OnnxDirectory(tmp_path / "onnx")
    assert (list(directory.graph.inputs), list(directory.graph.outputs)) == (
        ["input_ids", "attention_mask"],
        ["logits"],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "gemma", "gemma2", "gemma3", "opt", "gptj", "mixtral", "qwen2_moe", "gpt_oss"]
)
def test_other_architectures(tiny_model: TinyModel, tmp_path: Path, kind: str) -> None:
    report = run_stage(Onnx(exporter="torch"), tiny_model(kind), tmp_path / "onnx")
    assert set(report.details["logits_apart"]) == {*CASES, "10 steps"}
    assert max(report.details["logits_apart"].values()) < 2e-6


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


def traced(model: nn.Module, target: Path) -> None:
    trace(Wrapped(model).eval(), (torch.randn(3, 4),), ({0: "batch"},), (["x"], ["y"]), target)


def test_the_line_that_cannot_be_traced(tmp_path: Path) -> None:
    said = (
        r"^onnx: exporter torch: torch \S+ cannot trace Branching at untraceable.py, line \d+: if "
        r"x.sum\(\) > 0: GuardOnDataDependent"
    )
    with pytest.raises(StageError, match=said):
        traced(untraceable.Branching(), tmp_path)


def test_an_operator_that_onnx_has_not(tmp_path: Path) -> None:
    said = (
        r"^onnx: exporter torch: torch \S+ cannot write Eigenvalues as ONNX. .*aten.linalg_eig.* "
        r"ONNX has no operator for it"
    )
    with pytest.raises(StageError, match=said):
        traced(untraceable.Eigenvalues(), tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError("problem writing element 3072 to file"),
        OSError("3072 requested and 0 written"),
    ],
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", full)
    with pytest.raises(
        ResourceError, match=r"model.onnx: the disk is full: 80 bytes were to be written and [\d,]+ are free"
    ):
        traced(nn.Linear(4, 4), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [None, [object()]])
def test_a_cache_of_something_else(layers: list[object] | None) -> None:
    from optkit.onnx.torch_decoder import _past

    class Model:
        def __call__(self, *_arguments: Any, **_options: Any) -> dict[str, Any]:
            return {"past_key_values": type("States", (), {"layers": layers})()}

    with pytest.raises(
        StageError,
        match="(Model gives no KV cache of layers|the cache of Model has a object).*Set kv_cache: false, "
        "and the graph computes whole",
    ):
        _past(Model())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"opset": 13},
            "opset: the exporter torch writes 18 to 23, not 13: put onnx_optimize with opset: 13 behind it",
        ),
        ({"opset": 31}, "opset: the exporter torch writes 18 to 23, not 31: take one of these"),
        (
            {"exporter": "genai", "opset": 21},
            "opset: the exporter genai has no choice there. Leave it out, or take exporter: torch",
        ),
        ({"exporter": "genai", "kv_cache": False}, "kv_cache: the exporter genai has no choice there"),
    ],
)
def test_fields_that_do_not_go_together(tiny_model: TinyModel, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe({"model": str(tiny_model("gpt2")), "stages": [{"onnx": fields}], "evals": ["footprint"]})


def test_fields_that_the_chosen_exporter_has_not(tiny_model: TinyModel, tmp_path: Path) -> None:
    from tests.support.encoders import save_encoder

    with pytest.raises(StageError, match="^onnx.opset: the exporter genai has no choice there"):
        Onnx(opset=21).predict(Checkpoint(tiny_model("llama")).shape, "cpu")
    with pytest.raises(StageError, match="^onnx.kv_cache: an encoder that gives features has no KV cache"):
        Onnx(kv_cache=True).predict(Checkpoint(save_encoder("BertModel", tmp_path / "bert")).shape, "cpu")
