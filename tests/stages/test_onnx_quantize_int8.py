from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper
from pydantic import ValidationError

from optkit.errors import StageError
from optkit.recipe.recipe import load_recipe
from optkit.stage import Context, Report
from optkit.stages.onnx_quantize import OnnxQuantize
from tests.support.exported import constants, decoder_feeds, exported, loaded, outputs, saved
from tests.support.tiny_models import save_tokenizer

TOKENS = np.random.default_rng(5).integers(0, 512, (2, 17))
CALIBRATION = {"dataset": "python-reference", "samples": 4, "sequence_length": 32}


@pytest.fixture(scope="module")
def llama(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tiny_model("llama"), tmp_path_factory.mktemp("exported") / "onnx")


@pytest.fixture
def product(tmp_path: Path) -> Path:
    weight = np.random.default_rng(0).normal(size=(48, 24)).astype(np.float32)
    return saved(
        tmp_path / "product", [helper.make_node("MatMul", ["x", "w"], ["logits"], name="product")], {"w": weight}, 48
    )


def quantize(source: Path, target: Path, **fields: Any) -> Report:
    return OnnxQuantize(**fields).run(source, target, Context())


def in_int8(
    x: NDArray[np.float32], weight: NDArray[np.float32], low: float, high: float, per_channel: bool, top: int = 127
) -> NDArray[np.float32]:
    """x @ weight with uint8 inputs of one scale, which reaches from low to high, and int8 weights."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(x / scale) + zero, 0, 255)
    largest = np.abs(weight).max(0 if per_channel else None)
    rounded = np.rint(weight / (largest / top)) * (largest / top)
    return ((codes - zero) * scale @ rounded).astype(np.float32)


@pytest.mark.parametrize(("per_channel", "top"), [(True, 127), (False, 127), (True, 64)])
def test_dynamic_says_what_numpy_says(product: Path, target: Path, per_channel: bool, top: int) -> None:
    report = quantize(product, target, method="dynamic", per_channel=per_channel, reduce_range=top == 64)
    assert report.details["quantized"] == {"MatMul, int8, dynamic": {"count": 1, "nodes": ["product"]}}
    assert report.calibrated_on == ()
    x = np.random.default_rng(1).normal(size=(5, 48)).astype(np.float32)
    want = in_int8(x, constants(loaded(product))["w"], x.min(), x.max(), per_channel, top)
    np.testing.assert_allclose(outputs(target, {"x": x}), want, atol=2e-4)
    weight = next(
        array for name, array in constants(loaded(target)).items() if array.dtype == np.int8 and array.size > 24
    )
    assert weight.shape == (48, 24)
    assert abs(weight).max() == top
    scales = next(array for name, array in constants(loaded(target)).items() if name.endswith("_scale"))
    assert scales.size == (24 if per_channel else 1)


def test_dynamic_on_a_decoder(llama: Path, target: Path) -> None:
    report = quantize(llama, target, method="dynamic", exclude=["*lm_head*"])
    assert report.changed == 15
    assert dict(report.skipped) == {"/lm_head/MatMul": "excluded"}
    assert report.details["nodes_after"]["MatMulInteger"] == 15
    assert report.details["nodes_after"]["MatMul"] == 1
    assert "Transpose" not in report.details["nodes_after"]
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in llama.iterdir())
    feeds = decoder_feeds(loaded(llama), TOKENS)
    close(outputs(target, feeds), outputs(llama, feeds), 0.99)


def test_an_embedding_in_int8(llama: Path, target: Path) -> None:
    report = quantize(llama, target, method="dynamic", op_types=["Gather"])
    assert report.details["quantized"]["Gather, int8, dynamic"]["nodes"] == ["/model/embed_tokens/Gather"]
    assert report.details["kept"]["Gather without a float weight"]["count"] == 1
    feeds = decoder_feeds(loaded(llama), TOKENS)
    close(outputs(target, feeds), outputs(llama, feeds), 0.99)


@pytest.mark.parametrize("ranges", ["min-max", "entropy", "percentile"])
def test_static_scales_come_from_the_text(llama: Path, target: Path, ranges: str) -> None:
    report = quantize(llama, target, method="static", calibration=CALIBRATION, ranges=ranges)
    assert report.changed == 16
    assert [text["dataset"] for text in report.calibrated_on] == ["python-reference"]
    kinds = report.details["nodes_after"]
    assert (kinds["QuantizeLinear"], kinds["DequantizeLinear"]) == (13, 13 + 16)
    feeds = decoder_feeds(loaded(llama), TOKENS)
    close(outputs(target, feeds), outputs(llama, feeds), 0.9 if ranges == "entropy" else 0.98)


def test_static_reaches_the_largest_input(llama: Path, target: Path) -> None:
    OnnxQuantize(method="static", calibration=CALIBRATION, include=["*lm_head*"]).run(llama, target, Context())
    from optkit.source.calibration import Calibration

    inner = loaded(llama)
    (head,) = [node for node in inner.graph.node if node.name == "/lm_head/MatMul"]
    del inner.graph.output[:]
    inner.graph.output.append(helper.make_tensor_value_info(head.input[0], 1, None))
    seen = [
        outputs(inner, decoder_feeds(inner, row[None].numpy()))
        for row in Calibration(**CALIBRATION).tokens(llama, None)
    ]
    low, high = min(each.min() for each in seen), max(each.max() for each in seen)
    (scale,) = [array for name, array in constants(loaded(target)).items() if name == f"{head.input[0]}_scale"]
    assert float(scale) == pytest.approx((high - low) / 255, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"method": "dynamic", "exclude": ["*o_prj*"]},
            "onnx_quantize.exclude: `*o_prj*` matches none of 16 nodes. Did you mean '*/o_proj/*'?",
        ),
        (
            {"method": "dynamic", "op_types": ["Conv"]},
            "onnx_quantize: no node is left to quantize. The graph has none of the kind.",
        ),
        (
            {"method": "static", "calibration": CALIBRATION, "exclude": ["*"]},
            "no node is left to quantize. 16: excluded.",
        ),
    ],
)
def test_what_cannot_be_done_is_told(llama: Path, target: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError) as caught:
        quantize(llama, target, **fields)
    assert message in str(caught.value)
    assert not (target / "model.onnx").exists()


def test_text_needs_an_input_for_tokens(product: Path, target: Path) -> None:
    save_tokenizer(product)
    with pytest.raises(StageError, match="the graph has no input input_ids"):
        quantize(product, target, method="static", calibration=CALIBRATION)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "dynamic", "bits": 8}, "bits means nothing for method: dynamic, only for method: weights"),
        (
            {"method": "dynamic", "ranges": "entropy"},
            "ranges means nothing for method: dynamic, only for method: static",
        ),
        ({"per_channel": False}, "per_channel means nothing for method: weights, only for method: dynamic or static"),
        (
            {"method": "dynamic", "calibration": CALIBRATION},
            "calibration means nothing for method: dynamic, only for method: static",
        ),
        ({"calibration": CALIBRATION}, "calibration means nothing for method: weights, only for method: static"),
        (
            {"method": "static"},
            "method: static needs a text: add calibration: {dataset: c4, samples: 32}, or set method: dynamic",
        ),
        ({"method": "static", "calibration": CALIBRATION, "percentile": 99}, "set ranges: percentile"),
        ({"method": "dynamic", "op_types": ["Gemm"]}, "method: dynamic cannot quantize Gemm. It has MatMul, Conv"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnnxQuantize(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, None),
        ({"method": "dynamic"}, None),
        ({"method": "static", "calibration": {"dataset": "python-reference"}}, "python-reference"),
    ],
)
def test_a_text_is_pinned_only_where_it_is_read(fields: dict[str, Any], text: str | None) -> None:
    pinned = load_recipe({"model": "smollm2-135m", "stages": ["onnx", {"onnx_quantize": fields}]}).pinned(None)
    resolved = pinned.resolved()["stages"][1]["onnx_quantize"]["calibration"]
    assert (resolved and resolved["dataset"]) == text
    assert load_recipe(pinned.resolved()) == pinned


def close(found: NDArray[np.float32], want: NDArray[np.float32], least: float) -> None:
    cosine = (found * want).sum() / np.linalg.norm(found) / np.linalg.norm(want)
    assert least < cosine < 1 - 1e-9
