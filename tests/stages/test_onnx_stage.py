"""The stage `onnx`: what it leaves, that it says what its source says, and what it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.errors import RecipeError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.onnx.builder import Order
from optkit.onnx.genai_tokenizer import agree_on_tokens, genai_tokens
from optkit.onnx.model_file import ModelFile
from optkit.onnx.parity import _cases, check_parity
from optkit.onnx.prediction import is_tied
from optkit.onnx.reference import Reference
from optkit.onnx.torch_noise import _products_in_float64
from optkit.progress import SilentTask
from optkit.recipe.recipe import load_recipe
from optkit.stage import Report
from optkit.stages.onnx import Onnx
from tests.conftest import TinyModel
from tests.support.changes import changed_copy
from tests.support.onnx_changes import overwrite
from tests.support.packed_models import save_packed
from tests.support.running import run_stage
from tests.support.skeletons import reference

Exported = Callable[..., tuple[Path, Report]]

for package in ("onnx", "onnxruntime", "onnxruntime_genai", "onnxscript"):
    pytest.importorskip(package)
pytestmark = pytest.mark.usefixtures("children_here")


@pytest.fixture(scope="module")
def exported(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return what exports a tiny model once for each choice of fields; copy the directory before
    changing it.
    """
    made: dict[str, tuple[Path, Report]] = {}

    def export(kind: str, **fields: Any) -> tuple[Path, Report]:
        key = f"{kind} {fields}"
        if key not in made:
            target = tmp_path_factory.mktemp("export") / "onnx"
            made[key] = target, run_stage(Onnx(**fields), tiny_model(kind), target)
        return made[key]

    return export


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_a_float_model_says_what_its_source_says(exported: Exported, kind: str) -> None:
    details = exported(kind)[1].details
    assert set(details["logits_apart"]) == {"1 x 1", "1 x 7", "2 x 33", "3 x 64", "1 x 256", "10 steps"}
    assert max(details["logits_apart"].values()) < 2e-6
    assert (details["logits_limit"], details["logits_limit_is"]) == (2e-5, "the limit of any model")
    assert "divergence" not in details
    assert details["nodes"]["GroupQueryAttention"] == {"llama": 3}.get(kind, 2)


def test_what_it_leaves(exported: Exported, tiny_model: TinyModel) -> None:
    target, report = exported("llama")
    source = tiny_model("llama")
    beside = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
    assert {path.name for path in target.iterdir()} == {"model.onnx", "model.onnx.data", "genai_config.json", *beside}
    assert [path.name for path in target.parent.iterdir()] == ["onnx"]
    for name in beside - {"config.json"}:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((target / "config.json").read_text()) == {**Checkpoint(source).config, "dtype": "float32"}
    graph = ModelFile(target)
    assert {entry.key: entry.value for entry in graph.proto.graph.initializer[0].external_data}[
        "location"
    ] == "model.onnx.data"
    assert (report.details["opset"], report.details["ir_version"]) == (21, 10)
    assert report.details["size_bytes"] == sum(
        (target / name).stat().st_size for name in ("model.onnx", "model.onnx.data")
    )
    assert report.changed == len(graph.initializers)


def test_float16_on_a_cpu_has_fused_attention(exported: Exported) -> None:
    target, report = exported("llama", dtype="float16")
    assert max(report.details["logits_apart"].values()) < 2e-2
    assert report.details["nodes"]["GroupQueryAttention"] == 3
    assert (
        json.loads((target / "genai_config.json").read_text())["model"]["decoder"]["session_options"][
            "provider_options"
        ]
        == []
    )
    assert (target / "model.onnx.data").stat().st_size < 0.52 * (
        exported("llama")[0] / "model.onnx.data"
    ).stat().st_size


def test_bfloat16_is_not_compared_without_a_gpu(exported: Exported) -> None:
    report = exported("llama", target="cuda", dtype="bfloat16")[1]
    assert "logits_apart" not in report.details
    said = (
        "the graph was not compared with its source: ONNX Runtime has no kernels of bfloat16 "
        "here, only with --device cuda"
    )
    assert report.notes == (said,)


@pytest.mark.parametrize(
    ("target", "dtype"), [("dml", "float16"), ("webgpu", "float16"), ("webgpu", "float32"), ("cuda", "float16")]
)
def test_graphs_for_other_providers_are_compared_on_the_cpu(exported: Exported, target: str, dtype: str) -> None:
    directory, report = exported("llama", target=target, dtype=dtype)
    assert max(report.details["logits_apart"].values()) < report.details["logits_limit"]
    genai = json.loads((directory / "genai_config.json").read_text())["model"]["decoder"]["session_options"]
    assert [*genai["provider_options"][0]] == [target]


@pytest.mark.parametrize(("kind", "fields"), [("llama", {}), ("qwen2", {}), ("llama", {"dtype": "float16"})])
def test_the_size_is_predicted(exported: Exported, tiny_model: TinyModel, kind: str, fields: dict[str, Any]) -> None:
    target = exported(kind, **fields)[0]
    cost, left = Onnx(**fields).predict(Checkpoint(tiny_model(kind)).shape, "cpu")
    assert cost.disk_bytes == left.size_bytes == (target / "model.onnx.data").stat().st_size
    assert cost.ram_bytes > 2 * left.size_bytes


def test_one_export_is_of_one_exporter() -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    assert Onnx(exporter="genai").made_with() == {"packages": [f"onnxruntime-genai=={genai.__version__}"]}


def order_of(exported: tuple[Path, Report], source: Path, copy: Path) -> Order:
    """Return the order of an export, with a copy of what it left as target."""
    return Order(source, Path(shutil.copytree(exported[0], copy / "onnx")), "cpu", exported[1].details["dtype"])


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ("model.layers.1.mlp.down_proj.MatMul.weight", "block 1 is the first that differs, by "),
        ("model.layers.0.input_layernorm.weight", "block 0 is the first that differs, by "),
        ("sin_cache", "block 0 is the first that differs, by "),
        (
            "model.layers.3.final_norm_layernorm.weight",
            "all blocks agree, so it is the last norm, lm_head or the KV cache",
        ),
        ("lm_head.MatMul.weight", "the embedding is the first that differs, by "),
    ],
)
def test_a_graph_that_says_something_else_fails(
    exported: Exported, tiny_model: TinyModel, tmp_path: Path, changed: str, place: str
) -> None:
    order = order_of(exported("llama"), tiny_model("llama"), tmp_path)
    overwrite(order.target, changed, b"\0\0\0\x3f")  # 0.5
    said = (
        r"^onnx: the graph does not say what its source says: logits of 1 x \d tokens differ by "
        r".* the limit 2e-05 of that, "
    )
    said += r"the limit of any model \(torch in float(64|32 with sdpa) is [\d.]+e-07 from itself\); "
    with pytest.raises(StageError, match=said + place):
        check_parity(order, torch.arange(600) % 512, SilentTask())
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]


@pytest.fixture(scope="module")
def sharp(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose scores of attention are 128 times as large, so that float32 keeps fewer
    digits of its logits.
    """

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor * 128 if "q_proj" in name else tensor for name, tensor in tensors.items()}

    return changed_copy(tiny_model("llama"), tmp_path_factory.mktemp("sharp"), change)


def test_a_model_that_loses_digits_in_torch_too_has_a_limit_of_its_own(sharp: Path, tmp_path: Path) -> None:
    report = run_stage(Onnx(), sharp, tmp_path / "onnx")
    details = report.details
    assert 2e-5 < max(details["logits_apart"].values()) < details["logits_limit"] < 2e-2
    assert details["logits_limit_is"] == "8 times what torch in float64 is from itself on this model"
    order = order_of((tmp_path / "onnx", report), sharp, tmp_path / "copy")
    overwrite(order.target, "model.layers.1.mlp.down_proj.MatMul.weight", b"\0\0\0\x3f")  # 0.5
    said = (
        r"the limit 0.00\d+ of that, 8 times what torch in float64 is from itself on this model; "
        r"block 1 is the first that differs"
    )
    with pytest.raises(StageError, match=said):
        check_parity(order, torch.arange(600) % 512, SilentTask())


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_how_far_torch_is_from_itself(tiny_model: TinyModel, kind: str) -> None:
    tokens = torch.arange(2 * 40).view(2, 40) * 5 % 512
    source = Reference(tiny_model(kind))
    before = source.logits(tokens)
    exact = reference(tiny_model(kind), torch.float64, "eager")
    with torch.no_grad():
        wanted = exact(tokens).logits
    with torch.no_grad(), _products_in_float64(source._model):
        found = source._model(tokens, use_cache=False).logits
    assert found.dtype == torch.float64
    # norms are computed in float32 in both
    assert float((found - wanted).abs().max()) < 0.5 * float((before - wanted).abs().max())
    rounding = source.rounding(tokens, "float32")
    assert 1e-8 < rounding.share < 1e-5
    assert rounding.how in (("float64",) if kind == "gemma2" else ("float64", "float32 with sdpa"))
    assert source.rounding(tokens, "float16").how == "float16"
    assert source.logits(tokens).equal(before)
    assert {parameter.dtype for parameter in source._model.parameters()} == {torch.float32}


def test_how_far_torch_is_from_itself_with_codes(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    rounding = Reference(tmp_path / "packed").rounding(torch.arange(40)[None], "float16")
    assert 1e-8 < rounding.share < 1e-5


def test_numbers_that_are_none_fail(exported: Exported, tiny_model: TinyModel, tmp_path: Path) -> None:
    order = order_of(exported("llama", dtype="float16"), tiny_model("llama"), tmp_path)
    overwrite(order.target, "model.layers.1.mlp.down_proj.MatMul.weight", b"\xff\x7f")
    said = (
        "^onnx: the graph gives NaN or Inf as logits of 1 x 1 tokens. Numbers of the model do not "
        "fit float16. Set dtype: float32.$"
    )
    with pytest.raises(StageError, match=said):
        check_parity(order, torch.arange(600) % 512, SilentTask())


def test_a_source_without_a_tokenizer_is_compared_on_numbers(
    exported: Exported, tiny_model: TinyModel, tmp_path: Path
) -> None:
    from optkit.onnx.export_steps import compared_text

    order = order_of(exported("llama"), tiny_model("llama"), tmp_path)
    assert len(compared_text(order)[1]) > 700
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").hardlink_to(order.source / "config.json")
    (bare / "model.safetensors").hardlink_to(order.source / "model.safetensors")
    text, numbers = compared_text(replace(order, source=bare))
    assert (text, len(numbers)) == ("", 2000)
    assert 0 <= min(numbers) < max(numbers) < 512


def test_genais_tokenizer_is_compared(exported: Exported, tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    target = Path(
        shutil.copytree(exported("llama")[0], tmp_path / "onnx", ignore=shutil.ignore_patterns("model.onnx*"))
    )
    text = "def  run(self):\n\n    Über 12 345 tokens"
    ids = AutoTokenizer.from_pretrained(tiny_model("llama"))(text).input_ids
    assert agree_on_tokens(target, text, ids) == ""
    path = target / "tokenizer.json"
    plain = json.loads(path.read_text())
    for_sentencepiece = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    odd = {
        **plain,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, for_sentencepiece, plain["decoder"]],
        },
    }
    path.write_text(json.dumps(odd))
    assert genai_tokens(target, text) != ids
    assert agree_on_tokens(target, text, ids) == ""
    assert json.loads(path.read_text()) == plain
    path.write_text(json.dumps(odd))
    said = (
        r"^ONNX Runtime GenAI cuts text into other tokens than transformers, from token 0 of 3 on: give "
        r"it token ids that transformers' "
    )
    assert re.match(said, agree_on_tokens(target, text, [1, 2, 3]))
    assert json.loads(path.read_text()) == odd
    path.unlink()
    assert agree_on_tokens(target, text, ids).startswith(
        "ONNX Runtime GenAI cannot read its tokenizer: give it token ids"
    )


def test_sequences_fit_positions_and_reach_beyond_a_window() -> None:
    text = torch.arange(100)
    assert [tuple(case.shape) for case in _cases(text, 20, None)] == [(1, 1), (1, 7), (2, 20), (3, 20), (1, 20)]
    assert tuple(_cases(text, None, 512)[-1].shape) == (1, 544)
    assert tuple(_cases(text, None, 8)[-1].shape) == (1, 256)
    assert tuple(_cases(text, None, 4096)[-1].shape) == (1, 256)


REFUSED = [
    ({"target": "cuda", "dtype": "float32"}, "float32: a graph for cuda computes in float16 or bfloat16"),
    ({"dtype": "bfloat16"}, "bfloat16: a graph for cpu computes in float32 or float16"),
    ({"lm_head": "keep", "embedding": "shared"}, "embedding: shared reads the codes of lm_head: set lm_head: 8 or 4"),
    ({"exporter": "tract"}, "exporter"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_fields_that_do_not_go_together(tiny_model: TinyModel, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe({"model": str(tiny_model("llama")), "stages": [{"onnx": fields}], "evals": ["footprint"]})


@pytest.mark.parametrize("fields", [{"lm_head": 8}, {"activations": "float"}, {"embedding": "shared"}])
def test_fields_of_quantized_models_alone(tiny_model: TinyModel, fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    said = (
        f"^onnx.{name}: {name} means nothing here: the model has float weights. Leave it out, put gptq, "
        "awq or rtn before onnx, or onnx_q"
    )
    with pytest.raises(StageError, match=said):
        Onnx(**fields).predict(Checkpoint(tiny_model("llama")).shape, "cpu")


def test_an_architecture_that_is_not_known(tiny_model: TinyModel) -> None:
    with pytest.raises(StageError, match=r"^onnx: the exporter genai does not know GPT2LMHeadModel. It knows "):
        Onnx(exporter="genai").predict(Checkpoint(tiny_model("gpt2")).shape, "cpu")


def test_what_the_exporter_cannot_do_is_told(tiny_model: TinyModel, tmp_path: Path) -> None:
    odd = changed_copy(
        tiny_model("llama"), tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": -1.0}
    )
    with pytest.raises(StageError, match="^onnx: exporter genai: ValueError: rope_scaling.factor must be positive"):
        run_stage(Onnx(), odd, tmp_path / "onnx")


def test_an_lm_head_is_tied_where_there_is_no_other(tiny_model: TinyModel) -> None:
    tied, apart = (Checkpoint(tiny_model(kind)).shape for kind in ("llama", "qwen2"))
    for shape, expected in ((tied, True), (apart, False)):
        silent = {name: value for name, value in shape.config.items() if name != "tie_word_embeddings"}
        assert is_tied(shape) == is_tied(replace(shape, config=silent)) == expected
