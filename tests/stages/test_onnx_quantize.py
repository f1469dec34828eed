import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from pydantic import ValidationError

from optkit.errors import SourceError, StageError
from optkit.onnx.weight_only import BlockForm, quantize_matrix
from optkit.stage import Context, Report
from optkit.stages.onnx_quantize import OnnxQuantize
from tests.support.exported import (
    attributes,
    constants,
    decoder_feeds,
    dequantized,
    exported,
    loaded,
    outputs,
    saved,
    unpacked,
    with_float_matrices,
)
from tests.support.near import near

CONTEXT = Context()
TOKENS = np.random.default_rng(5).integers(0, 512, (2, 17))
HEAD = "/lm_head/MatMul"


@pytest.fixture(scope="module")
def llama(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tiny_model("llama"), tmp_path_factory.mktemp("exported") / "onnx")


def quantize(source: Path, target: Path, **fields: Any) -> Report:
    return OnnxQuantize(**fields).run(source, target, CONTEXT)


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": "rtn", "symmetric": True},
        {"algorithm": "rtn", "symmetric": False, "lm_head": 4},
        {"algorithm": "mse", "block_size": 16, "symmetric": True},
        {"algorithm": "mse", "bits": 8, "symmetric": False, "block_size": 64},
        {"algorithm": "k_quant", "symmetric": False},
        {"algorithm": "k_quant", "symmetric": False, "bits": 8, "lm_head": "keep"},
        {"algorithm": "hqq", "symmetric": False},
        {"algorithm": "hqq", "symmetric": False, "lm_head": 4},
        {"algorithm": "mse", "block_size": 256},
    ],
    ids=str,
)
def test_says_what_its_codes_say(llama: Path, target: Path, fields: dict[str, Any]) -> None:
    report = quantize(llama, target, activations="float", **fields)
    model = loaded(target)
    blocks = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    head = fields.get("lm_head", 8)
    assert report.changed == len(blocks) == 3 * 5 + (head != "keep")
    assert {attributes(node)["bits"] for node in blocks if node.name != HEAD} == {fields.get("bits", 4)}
    assert [attributes(node)["bits"] for node in blocks if node.name == HEAD] == [head] * (head != "keep")
    assert {attributes(node)["block_size"] for node in blocks} == {fields.get("block_size", 32)}
    feeds = decoder_feeds(model, TOKENS)
    assert near(outputs(target, feeds), outputs(with_float_matrices(model), feeds))
    source = constants(loaded(llama))
    for node in blocks:
        weight = source[node.input[1].rpartition("_Q")[0]]
        error = np.linalg.norm(dequantized(node, constants(model)) - weight) / np.linalg.norm(weight)
        assert error < (0.13 if attributes(node)["bits"] == 4 else 0.01)


def test_int8_activations_are_near(llama: Path, target: Path) -> None:
    quantize(llama, target)
    model = loaded(target)
    assert {attributes(node)["accuracy_level"] for node in model.graph.node if node.op_type == "MatMulNBits"} == {4}
    feeds = decoder_feeds(model, TOKENS)
    exact = outputs(with_float_matrices(model), feeds)
    assert 0 < np.abs(outputs(target, feeds) - exact).max() < 0.05 * np.abs(exact).max()


def test_the_search_is_better_than_rounding() -> None:
    weight = np.random.default_rng(0).standard_t(5, (96, 40)).astype(np.float32)
    errors = {}
    for algorithm in ("rtn", "mse"):
        codes = quantize_matrix(weight, BlockForm(4, 32, True, algorithm, 0))
        steps = unpacked(codes.codes, 4).astype(np.float32) - 8
        errors[algorithm] = np.linalg.norm((steps * codes.scales[..., None]).reshape(40, 96).T - weight)
    assert errors["mse"] < 0.98 * errors["rtn"]


@pytest.mark.parametrize("fields", [{}, {"symmetric": True, "lm_head": 4, "algorithm": "rtn"}], ids=["8", "4"])
def test_a_tied_embedding_reads_the_codes_of_lm_head(llama: Path, target: Path, fields: dict[str, Any]) -> None:
    report = quantize(llama, target, embedding="shared", activations="float", **fields)
    model = loaded(target)
    (head,) = [node for node in model.graph.node if node.name == HEAD]
    table = dequantized(head, constants(model)).T
    plain = with_float_matrices(model)
    gather = next(node for node in plain.graph.node if node.op_type == "GatherBlockQuantized")
    plain.graph.initializer.append(helper.make_tensor("table", 1, table.shape, table.tobytes(), raw=True))
    gather.CopyFrom(helper.make_node("Gather", ["table", gather.input[1]], list(gather.output), name=gather.name))
    feeds = decoder_feeds(model, TOKENS)
    assert near(outputs(target, feeds), outputs(plain, feeds))
    assert all(array.shape != (512, 64) or array.dtype != np.float32 for array in constants(model).values())
    assert report.details["quantized"][f"GatherBlockQuantized, {fields.get('lm_head', 8)} bits"]["count"] == 1


def test_a_float_embedding_is_stored_as_it_is_read(llama: Path, target: Path) -> None:
    report = quantize(llama, target)
    assert report.details["nodes_before"]["Transpose"] == 1
    assert "Transpose" not in report.details["nodes_after"]
    np.testing.assert_array_equal(
        constants(loaded(target))["/model/embed_tokens/Transpose/output_0"],
        constants(loaded(llama))["lm_head.MatMul.weight"].T,
    )


def test_reports_and_carries_everything_along(llama: Path, target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    (source / "notes").mkdir()
    (source / "notes" / "licence.txt").write_text("free")
    report = quantize(source, target, exclude=["*/o_proj/*"])
    assert {path.relative_to(source) for path in source.rglob("*")} == {
        path.relative_to(target) for path in target.rglob("*")
    }
    for name in ("genai_config.json", "config.json", "tokenizer.json", "notes/licence.txt"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert report.details["kept"]["excluded"]["nodes"] == [
        f"/model/layers.{layer}/attn/o_proj/MatMul" for layer in range(3)
    ]
    assert report.details["quantized"]["MatMulNBits, 4 bits"]["count"] == 12
    assert report.details["nodes_before"]["MatMul"] == 16
    assert report.details["nodes_after"]["MatMulNBits"] == 13
    assert report.details["nodes_after"]["MatMul"] == 3
    sizes = [sum((place / f"model.onnx{end}").stat().st_size for end in ("", ".data")) for place in (source, target)]
    assert [report.details["size_bytes_before"], report.details["size_bytes_after"]] == sizes
    assert (report.details["opset"], report.details["ir_version"]) == (21, 10)


def test_reads_models_with_several_hard_links(llama: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "linked", copy_function=os.link)
    assert quantize(tmp_path / "linked", target).changed == 16


def test_other_graphs(tmp_path: Path, target: Path) -> None:
    random = np.random.default_rng(1)
    weights = {
        "turned": random.normal(size=(24, 40)),
        "straight": random.normal(size=(24, 24)),
        "stack": random.normal(size=(1, 24, 8)),
    }
    nodes = [
        helper.make_node("Transpose", ["turned"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["a"]),
        helper.make_node("MatMul", ["a", "straight"], ["b"]),
        helper.make_node("MatMul", ["b", "straight"], ["c"]),
        helper.make_node("Gemm", ["c", "straight"], ["d"]),
        helper.make_node("MatMul", ["d", "stack"], ["e"]),
        helper.make_node("Transpose", ["b"], ["bt"], perm=[1, 0]),
        helper.make_node("MatMul", ["bt", "c"], ["f"]),
        helper.make_node("ReduceSum", ["f"], ["g"], keepdims=0),
        helper.make_node("Add", ["e", "g"], ["out"]),
    ]
    source = saved(
        tmp_path / "source", nodes, {name: array.astype(np.float32) for name, array in weights.items()}, 40, "out", 3
    )
    report = quantize(source, target, activations="float", symmetric=False)
    assert dict(report.skipped) == {
        "Gemm:d": "a Gemm, which MatMulNBits cannot replace",
        "MatMul:e": "its weight is no float matrix: [1, 24, 8]",
        "MatMul:f": "no weight: both inputs are computed",
    }
    model = loaded(target)
    assert sorted(constants(model)) == sorted(
        [
            "stack",
            "straight",
            *(f"{name}_Q4{end}" for name in ("straight", "turned") for end in ("", "_scales", "_zeros")),
        ]
    )
    feeds = {"x": random.normal(size=(5, 40)).astype(np.float32)}
    assert near(outputs(target, feeds), outputs(with_float_matrices(model), feeds))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"exclude": ["*/o_prj/*"]},
            "onnx_quantize.exclude: `*/o_prj/*` matches none of 16 nodes. Did you mean '*/o_proj/*'?",
        ),
        ({"include": ["/lm_head/Matmul"]}, "Did you mean '/lm_head/MatMul'?"),
        (
            {"include": ["decoder"]},
            "onnx_quantize.include: `decoder` matches none of 16 nodes. Names look like /model/layers.0/attn/qkv_proj/",
        ),
        ({"exclude": ["*"]}, "onnx_quantize: no node is left to quantize. 16: excluded. Widen `include`"),
        ({"include": ["*lm_head*"], "lm_head": "keep"}, "15: not included; 1: lm_head: keep."),
        ({"embedding": "shared", "exclude": ["*lm_head*"]}, "onnx_quantize.embedding: lm_head is not quantized."),
        ({"embedding": "shared", "block_size": 128}, "its 64 columns are not a multiple of block_size 128."),
    ],
)
def test_what_cannot_be_done_is_told(llama: Path, target: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError) as caught:
        quantize(llama, target, **fields)
    assert message in str(caught.value)


def test_an_untied_embedding_cannot_be_shared(tiny_model, target: Path, tmp_path: Path) -> None:
    source = exported(tiny_model("qwen2"), tmp_path / "onnx")
    with pytest.raises(StageError, match="no embedding reads the weights of lm_head"):
        quantize(source, target, embedding="shared")


def test_a_quantized_model_is_quantized_once(llama: Path, target: Path, tmp_path: Path) -> None:
    quantize(llama, target)
    (tmp_path / "again").mkdir()
    with pytest.raises(StageError, match="16: quantized already"):
        quantize(target, tmp_path / "again")


def test_a_damaged_model(llama: Path, target: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    os.truncate(source / "model.onnx.data", 1000)
    with pytest.raises(SourceError, match=r"model\.onnx\.data: the file has 1,000 bytes"):
        quantize(source, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "hqq", "symmetric": True}, "hqq finds zero points: set symmetric: false"),
        ({"embedding": "shared", "lm_head": "keep"}, "embedding: shared reads the codes of lm_head"),
        ({"algorithm": "hqq", "symmetric": False, "bits": 8}, "zero points of hqq at 4 bits alone"),
        (
            {"embedding": "shared", "algorithm": "hqq", "symmetric": False, "lm_head": 4},
            "an embedding cannot read the zero points of hqq",
        ),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnnxQuantize(**fields)
