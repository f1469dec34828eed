"""Encoder-decoders as ONNX: three graphs over one file of weights, beside torch and optimum."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optkit_evals.answers import Answers
from optkit_evals.perplexity import Perplexity

from optkit.backends.environments import Environments
from optkit.errors import RecipeError, SourceError, StageError
from optkit.measure import EvalContext
from optkit.model.checkpoint import Checkpoint
from optkit.model.formats.base import Format
from optkit.model.onnx_file import DECODER, ENCODER, MODEL, PARTS, STEPS, OnnxFile, all_initializers
from optkit.model.shape import ModelShape
from optkit.model.task import Task, task_of
from optkit.onnx import encoder_decoder, torch_encoder_decoder
from optkit.onnx.exporters import UNTRACED
from optkit.onnx.torch_export import load_eager
from optkit.progress import SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.settings.onnx_provider import OnnxProvider
from optkit.stage import Context
from optkit.stages.onnx import Onnx
from optkit.stages.onnx_quantize import OnnxQuantize
from optkit.verification.encoders import asked_of, compare_encoded, measure_encoder_decoder
from optkit.verification.engines import OPTIMUM, ask
from optkit.verification.onnx_checks import check_onnx
from optkit.verification.workers import open_in_onnxruntime
from tests.conftest import TinyModel
from tests.support.encoder_decoders import CONFIGS, write_pairs, write_wav

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
T5 = "T5ForConditionalGeneration"
FIELDS = {False: {"input": "input", "field": "target"}, True: {"input": "audio", "field": "text"}}


def trace_quickly(
    module: Any, feeds: Any, shapes: Any, names: tuple[list[str], list[str]], target: Path, _opset: int
) -> None:
    """Write what `tracing.trace` writes, by TorchScript: a tenth of the time, and other names."""
    axes = dict(zip(names[0], shapes["inputs"], strict=True))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(feeds),
            str(target / MODEL),
            dynamo=False,
            input_names=names[0],
            output_names=names[1],
            dynamic_axes=axes,
            opset_version=17,
        )


@pytest.fixture(scope="module")
def quick(tiny_encoder_decoder: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Return a tiny T5, its graphs, and what the stage reported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_encoder_decoder, "trace", trace_quickly)
        return export(tiny_encoder_decoder(T5), tmp_path_factory.mktemp("quick"))


def export(source: Path, target: Path) -> tuple[Path, Path, Any]:
    return source, target, Onnx().run(source, target, Context())


def check_answers(source: Path, target: Path, folder: Path) -> None:
    """Assert that ONNX Runtime measures, generates and answers what torch does."""
    hears = task_of(Checkpoint(source).config) is Task.SPEECH
    pairs = str(write_pairs(folder, hears))
    theirs: Any = open_session(source)
    ours: Any = open_session(target, [OnnxProvider(threads=1)])
    assert "onnxruntime" in ours.notes[0]
    for measure in (
        Perplexity(dataset=pairs, window=32, **FIELDS[hears]),
        Answers(dataset=pairs, new_tokens=6, **FIELDS[hears]),
    ):
        for want, got in zip(measure.run(theirs, EvalContext()), measure.run(ours, EvalContext()), strict=True):
            assert got.samples == pytest.approx(want.samples, rel=1e-5)
    prompts = torch.tensor([[9, 7, 5, 3], [4, 8, 12, 16]])
    assert ours.generate(prompts, 6).equal(theirs.generate(prompts, 6))
    asked = str(write_wav(folder / "a.wav", 440)) if hears else "What is the matter?"
    assert ours.answer(asked, 6) == theirs.answer(asked, 6)
    assert 0.8 * theirs.decode_bytes(1, 4) < ours.decode_bytes(1, 4) < 1.05 * theirs.decode_bytes(1, 4)
    reference = measure_encoder_decoder(theirs, "float32", Task.TRANSLATION)
    request = {**asked_of(reference), "directory": str(target), "device": "cpu", "logits": str(folder / "logits")}
    found = compare_encoded(reference, open_in_onnxruntime.answer_to(request), folder / "logits", bits=0)
    assert found["verdict"] == "agrees"
    assert [check.detail for check in check_onnx(target) if not check.ok] == []


def test_onnxruntime_answers_as_torch_does(quick: tuple[Path, Path, Any], tmp_path: Path) -> None:
    source, target, report = quick
    assert max(report.details["difference"], report.details["step_difference"]) < 1e-5
    assert report.notes == ()
    check_answers(source, target, tmp_path)


def test_a_weight_lies_once_in_one_file(quick: tuple[Path, Path, Any]) -> None:
    source, target, _ = quick
    assert {path.name for path in Format.ONNX.check(target)} == {*PARTS, "model.onnx.data"}
    stored = (source / "model.safetensors").stat().st_size
    assert (target / "model.onnx.data").stat().st_size < 1.1 * stored + 512 * 64 * 4  # lm_head once more, transposed
    graphs = [OnnxFile(target / name) for name in PARTS]
    assert len(all_initializers(graphs)) < sum(len(graph.initializers) for graph in graphs)
    shape = Format.ONNX.shape(target)
    assert shape.size_bytes == pytest.approx((target / "model.onnx.data").stat().st_size, rel=0.05)


def test_parts_that_are_missing_or_strange(quick: tuple[Path, Path, Any], tmp_path: Path) -> None:
    target = Path(shutil.copytree(quick[1], tmp_path / "made"))
    with pytest.raises(StageError, match="runs causal language models, and this is an encoder-decoder. Leave engine"):
        open_session(target, [OnnxProvider(engine="onnxruntime-genai")])
    with pytest.raises(SourceError, match="give to its input encoder_attention_mask.*It knows input_ids"):
        encoder_decoder.Graph(target / DECODER, "cpu", None, ()).run({"input_ids": torch.zeros(1, 1)})
    (target / STEPS).unlink()
    assert check_onnx(target)[0].detail.endswith("Export it again: with optkit, or with optimum and --no-post-process.")
    with pytest.raises(SourceError, match=f"there is no {STEPS}. An encoder-decoder is {STEPS}, {DECODER}, {ENCODER}."):
        open_session(target)
    (target / ENCODER).unlink()
    assert Format.of(target) == Format.ONNX


def test_graphs_that_say_something_else(quick: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_encoder_decoder, "LIMIT", 0.0)
    model = load_eager(quick[0], "AutoModelForSeq2SeqLM", trust_remote_code=False)
    with pytest.raises(StageError, match="^onnx: the graphs have a difference from their source of .* is the limit"):
        torch_encoder_decoder._compare(model, quick[1], None)


@pytest.mark.parametrize(("fields", "apart"), [({"bits": 8}, 0.03), ({"bits": 4}, 0.35), ({"method": "dynamic"}, 0.05)])
def test_all_three_graphs_in_integers(
    quick: tuple[Path, Path, Any], tmp_path: Path, fields: dict[str, Any], apart: float
) -> None:
    stage, (source, target, _) = OnnxQuantize(**fields), quick
    _, left = stage.predict(Onnx().predict(Checkpoint(source).shape, "cpu")[1], "cpu")
    report = stage.run(target, tmp_path, Context())
    theirs, ours = (open_session(each) for each in (source, tmp_path))
    inputs, tokens = theirs.fixed_inputs("How are you?"), theirs.target("I am fine, thank you.", 12)[None]
    want, got = (each.logits_given(inputs, tokens) for each in (theirs, ours))
    assert 0 < (want - got).norm() / want.norm() < apart
    after = report.details["nodes_after"]
    rounded = after.get("MatMulNBits", 0) + after.get("MatMulInteger", 0)
    assert rounded == report.changed == 56  # 37 weights, of which 19 are in two graphs
    strange = {"decoder_attention_mask": torch.zeros_like(tokens)}
    with pytest.raises(SourceError, match="its graphs take no decoder_attention_mask. They read .* Leave it out"):
        ours.model(**inputs, decoder_input_ids=tokens, **strange)
    with pytest.raises(SourceError, match="its graphs take no inputs_embeds"):
        ours.model.get_encoder()(**inputs, inputs_embeds=torch.zeros(1, 1, 1))
    assert left.size_bytes == pytest.approx((tmp_path / "model.onnx.data").stat().st_size, rel=0.15)
    assert [check.detail for check in check_onnx(tmp_path) if not check.ok] == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "static", "calibration": {"dataset": "c4", "samples": 2}}, r"method: static is .* method: dynamic"),
        ({"embedding": "shared"}, "embedding: shared is for models of one graph, and this is an encoder-decoder of"),
        ({"exclude": ["*fc1*"]}, "exclude is for models .* go on sharing their weights. Leave it out"),
    ],
)
def test_what_is_asked_of_one_graph(tiny_encoder_decoder: TinyModel, fields: dict[str, Any], said: str) -> None:
    shape = Checkpoint(tiny_encoder_decoder("BartForConditionalGeneration")).shape
    with pytest.raises(StageError, match=said):
        OnnxQuantize(**fields).predict(Onnx().predict(shape, "cpu")[1], "cpu")


def test_what_is_refused_in_the_plan(tiny_encoder_decoder: TinyModel) -> None:
    shape = Checkpoint(tiny_encoder_decoder("BartForConditionalGeneration")).shape
    with pytest.raises(StageError, match="^onnx.kv_cache: an encoder-decoder of text always has a KV cache. Leave it"):
        Onnx(kv_cache=False).predict(shape, "cpu")
    with pytest.raises(StageError, match="optimum exports decoders here, and BartForConditionalGeneration is none"):
        Onnx(exporter="optimum").predict(shape, "cpu")
    packed = replace(shape, config={**shape.config, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(StageError, match=r"quantized already \(fp8\). Put `- dequantize` before it"):
        Onnx().predict(packed, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_family_by_the_exporter_itself(
    tiny_encoder_decoder: TinyModel, tmp_path: Path, architecture: str
) -> None:
    source, target, report = export(tiny_encoder_decoder(architecture), tmp_path)
    assert max(report.details["difference"], report.details["step_difference"]) < 1e-5
    cost, left = Onnx().predict(Checkpoint(source).shape, "cpu")
    assert cost.disk_bytes == left.size_bytes == pytest.approx((target / "model.onnx.data").stat().st_size, rel=0.05)
    names = set(Format.ONNX.shape(target).tensors)
    assert {name for name in Checkpoint(source).shape.tensors if name.endswith(("proj.bias", "fc1.weight"))} <= names
    check_answers(source, target, tmp_path / "asked")


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_optimum_opens_it(quick: tuple[Path, Path, Any], tmp_path: Path) -> None:
    built = Environments().build("optimum", SilentProgress())
    session: Any = open_session(quick[0])
    reference = measure_encoder_decoder(session, "float32", Task.TRANSLATION)
    request = {**asked_of(reference), "directory": str(quick[1]), "device": "cpu", "logits": str(tmp_path / "logits")}
    request |= {"loader": "AutoModelForSeq2SeqLM", "trust_remote_code": False}
    answer = ask(OPTIMUM, str(built.interpreter), request, tmp_path, 600)
    assert not answer.problem
    found = np.fromfile(tmp_path / "logits", np.float32).reshape(answer.said["logits_shape"])
    assert np.abs(found - reference.outputs.numpy()).max() < 1e-5


def test_the_stage_that_is_for_other_models_is_named(tiny_encoder_decoder: TinyModel) -> None:
    asked = {"dataset": "pairs.jsonl", "input": "input", "field": "target"}
    recipe = {
        "model": str(tiny_encoder_decoder(T5)),
        "stages": ["onnx", "onnx_optimize"],
        "evals": [{"perplexity": asked}, {"answers": asked}],
    }
    with pytest.raises(RecipeError, match="answers is for an encoder-decoder, and onnx_optimize .* is for a"):
        load_recipe(recipe)


@pytest.mark.parametrize("kind", sorted(UNTRACED))
def test_encoder_decoders_that_torch_does_not_export_are_refused_by_the_plan(kind: str) -> None:
    config = {"model_type": kind, "architectures": ["XForConditionalGeneration"], "is_encoder_decoder": True}
    with pytest.raises(StageError, match=r"onnx: X\w+ cannot be written as graphs of its encoder and .*Leave"):
        Onnx().predict(ModelShape(config=config, tensors={}), "cpu")
