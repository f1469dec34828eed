"""Quantized checkpoints keep their very codes on the way to ONNX, or are refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import from_bytes, in_bytes, pack
from optkit.errors import StageError
from optkit.kernels.packed_linear import PackedLinear, PackedWeight
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape
from optkit.onnx.builder_input import CodedLinear, _group_alike_, exact_codes
from optkit.onnx.model_file import ModelFile
from optkit.onnx.parity import stored_codes
from optkit.stage import Context, Transform
from optkit.stages.awq import Awq
from optkit.stages.fp8 import Fp8
from optkit.stages.mx import Mx
from optkit.stages.onnx import Onnx
from optkit.stages.rtn import Rtn
from optkit.stages.smoothquant import SmoothQuant
from tests.conftest import TinyModel
from tests.support.exported import attributes
from tests.support.packed_models import save_packed
from tests.support.running import run_stage
from tests.zoo.models import save_model

for package in ("onnx", "onnxruntime", "onnxruntime_genai", "onnxscript"):
    pytest.importorskip(package)
pytestmark = pytest.mark.usefixtures("children_here")

QKV = ("q_proj", "k_proj", "v_proj")
SMALL = {"dataset": "python-reference", "samples": 4, "sequence_length": 32}


def weights_of_source(directory: Path) -> dict[str, Tensor]:
    """Return layer -> float32 [out, in], as optkit's own layer dequantizes it."""
    found = {}
    for name, layer in (quantized_layers(Checkpoint(directory)) or {}).items():
        weight = layer.integers("cpu")
        assert weight is not None
        found[name] = PackedLinear(weight, None, torch.float32).dequantize()
    return found


def weights_of_graph(directory: Path) -> dict[str, Tensor]:
    """Return layer -> float32 [out, in] of each MatMulNBits; q, k and v together are named
    qkv_proj.
    """
    graph = ModelFile(directory)
    nodes = [node.name for node in graph.proto.graph.node if node.op_type == "MatMulNBits"]
    names = {
        node: node.strip("/").replace("/MatMulNBits", "").replace("/", ".").replace(".attn.", ".self_attn.")
        for node in nodes
    }
    return {names[node]: stored_codes(graph, node).dequantize() for node in nodes}


def joined_attention(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined = {name: weight for name, weight in weights.items() if name.rpartition(".")[2] not in QKV}
    for name in weights:
        parent, _, leaf = name.rpartition("q_proj")
        if parent and not leaf and all(parent + part in weights for part in QKV):
            joined[f"{parent}qkv_proj"] = torch.cat([weights[parent + part] for part in QKV])
    return joined


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("llama", {"bits": 4, "group_size": 32, "symmetric": False}),
        ("qwen2", {"bits": 4, "group_size": 16, "symmetric": False, "method": "gptq"}),
        ("gemma", {"bits": 8, "group_size": 64, "symmetric": True}),
    ],
)
def test_every_weight_is_the_sources_bit_for_bit(
    tiny_model: TinyModel, tmp_path: Path, kind: str, form: dict[str, Any]
) -> None:
    save_packed(tiny_model(kind), tmp_path / "packed", tmp_path / "plain", **form)
    report = run_stage(Onnx(lm_head="keep", activations="float"), tmp_path / "packed", tmp_path / "onnx")
    assert same(weights_of_graph(tmp_path / "onnx"), joined_attention(weights_of_source(tmp_path / "packed")))
    assert max(report.details["logits_apart"].values()) < 2e-6
    nodes = [node for node in ModelFile(tmp_path / "onnx").proto.graph.node if node.op_type == "MatMulNBits"]
    assert {len(node.input) for node in nodes} == {3 if form["symmetric"] else 4}
    assert {(attributes(node)["bits"], attributes(node)["block_size"]) for node in nodes} == {
        (form["bits"], form["group_size"])
    }
    assert {attributes(node)["accuracy_level"] for node in nodes} == {0}
    config = json.loads((tmp_path / "onnx" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "onnx" / "quantize_config.json").exists()


def test_layers_of_several_layers_are_cut_up(tmp_path: Path) -> None:
    """And two lengths of sequences without LongRoPE, as in this config, are no LongRoPE."""
    source = save_model("phi3", tmp_path / "phi3", num_key_value_heads=2, original_max_position_embeddings=256)
    run_stage(Rtn(group_size=32, symmetric=False), source, tmp_path / "packed")
    report = run_stage(Onnx(lm_head="keep", activations="float"), tmp_path / "packed", tmp_path / "onnx")
    assert max(report.details["logits_apart"].values()) < 2e-6
    found = weights_of_graph(tmp_path / "onnx")
    for name in [name for name in found if name.endswith("gate_proj")]:
        pair = found.pop(name), found.pop(name.replace("gate", "up"))
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat(pair)
    assert same(found, weights_of_source(tmp_path / "packed"))


def test_awq_and_a_head_in_8_bits(tiny_model: TinyModel, tmp_path: Path) -> None:
    run_stage(
        Awq(format="awq", group_size=32, symmetric=False, calibration=SMALL), tiny_model("llama"), tmp_path / "awq"
    )
    source = Checkpoint(tmp_path / "awq")
    assert (source.quantization or {})["quant_method"] == "awq"
    stage = Onnx(embedding="keep")
    report = run_stage(stage, tmp_path / "awq", tmp_path / "onnx")
    found = weights_of_graph(tmp_path / "onnx")
    head = found.pop("lm_head")
    assert same(found, joined_attention(weights_of_source(tmp_path / "awq")))
    embedding = source.read("model.embed_tokens.weight")
    assert float((head - embedding).norm() / embedding.norm()) == pytest.approx(
        report.details["lm_head_error"], rel=1e-3
    )
    assert report.details["lm_head_error"] < 0.01
    assert 0 < report.details["divergence"] < 0.1
    assert report.notes[0].startswith(
        "lm_head is rounded to 8 bits for the export; ONNX Runtime rounds the inputs of quantized layers to 8 "
    )
    assert (report.details["lm_head"], report.details["embedding"], report.details["activations"]) == (
        "8 bits",
        "as in the source",
        "int8",
    )
    assert stage.predict(source.shape, "cpu")[0].disk_bytes == (tmp_path / "onnx" / "model.onnx.data").stat().st_size


def test_layers_of_many_forms_and_a_quantized_head(tiny_model: TinyModel, tmp_path: Path) -> None:
    overrides = {
        "*.0.self_attn.k_proj": {"group_size": 16},
        "*.1.self_attn.v_proj": {"bits": 8},
        "*.2.self_attn.v_proj": "keep",
        "*.1.mlp.down_proj": "keep",
        "*.mlp.up_proj": {"group_size": -1, "symmetric": True},
    }
    run_stage(
        Rtn(bits=4, group_size=32, symmetric=False, lm_head=True, overrides=overrides),
        tiny_model("llama"),
        tmp_path / "rtn",
    )
    report = run_stage(Onnx(), tmp_path / "rtn", tmp_path / "onnx")
    wanted, found = weights_of_source(tmp_path / "rtn"), weights_of_graph(tmp_path / "onnx")
    assert torch.equal(found["lm_head"], wanted["lm_head"])
    assert torch.equal(
        found["model.layers.0.self_attn.qkv_proj"], joined_attention(wanted)["model.layers.0.self_attn.qkv_proj"]
    )
    assert torch.equal(found["model.layers.1.self_attn.v_proj"], wanted["model.layers.1.self_attn.v_proj"])
    assert torch.equal(found["model.layers.2.mlp.up_proj"], wanted["model.layers.2.mlp.up_proj"])
    assert report.details["nodes"]["MatMul"] == 2
    assert max(report.details["logits_apart"].values()) < 2e-6
    assert report.details["lm_head"] == "as in the source"


def test_the_embedding_reads_the_codes_of_the_head(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain", symmetric=False)
    stage = Onnx()
    report = run_stage(stage, tmp_path / "packed", tmp_path / "onnx")
    assert report.notes[0].startswith(
        "lm_head and the embedding that is tied to it are rounded to 8 bits for the export; "
    )
    kinds = report.details["nodes"]
    assert (kinds["GatherBlockQuantized"], kinds.get("MatMul", 0)) == (1, 0)
    assert "model.embed_tokens.weight" not in ModelFile(tmp_path / "onnx").initializers
    predicted = stage.predict(Checkpoint(tmp_path / "packed").shape, "cpu")[0].disk_bytes
    assert predicted == (tmp_path / "onnx" / "model.onnx.data").stat().st_size
    assert max(report.details["logits_apart"].values()) < 2e-6


def test_a_head_in_4_bits_can_cost_too_much(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.onnx.parity.DIVERGENCE_LIMIT", 1e-3)
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    said = (
        r"^onnx: the divergence from the source is 0.\d+ nats a token, and 0.001 is the limit. The export "
        r"itself agrees; what is rounded "
        r"beside it costs that: lm_head in 4 bits and inputs of layers in 8 bits. Set lm_head: "
        r"keep or activations: float.$"
    )
    with pytest.raises(StageError, match=said):
        run_stage(Onnx(lm_head=4), tmp_path / "packed", tmp_path / "onnx")


@settings(max_examples=50)
@given(st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_bytes_and_back(bits: int, rows: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = in_bytes(codes, bits, fill=1)
    assert packed.shape == (rows, -(-count * bits // 8))
    assert torch.equal(from_bytes(packed, bits, count), codes)


def random_weight(outputs: int, inputs: int, group_size: int, bits: int = 4) -> QuantizedWeight:
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (outputs, inputs // group_size), dtype=torch.uint8)
    return QuantizedWeight(codes, torch.rand(zeros.shape), zeros, bits)


@pytest.mark.parametrize(("group_size", "told"), [(32, 32), (96, 32), (512, 256), (192, 64), (16, 16)])
def test_a_group_is_told_as_several_of_the_same_scale(group_size: int, told: int) -> None:
    inputs = group_size * 2
    weight = random_weight(3, inputs, group_size)
    layer = CodedLinear(weight, None)
    assert (layer.group_size, tuple(layer.qweight.shape)) == (told, (3, inputs // told, told // 2))
    again = QuantizedWeight(from_bytes(layer.qweight.flatten(1), 4, inputs), layer.scales, layer.zeros, 4)
    assert torch.equal(again.dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="cannot be cut into groups of 24"):
        layer.narrow_(24)


def test_layers_that_become_one_are_grouped_alike() -> None:
    layers = [CodedLinear(random_weight(4, 64, size), None) for size in (64, 16, 32)]
    _group_alike_(layers)
    assert [layer.group_size for layer in layers] == [16, 16, 16]
    mixed = [CodedLinear(random_weight(4, 64, 64), None), nn.Linear(64, 4), CodedLinear(random_weight(4, 64, 16), None)]
    _group_alike_(mixed)
    assert [getattr(layer, "group_size", None) for layer in mixed] == [64, None, 16]


REMEDY = r"Give it 4 or 8 bits in groups of 16, 32, 64, 128 or 256 inputs \(or multiples\), or exclude it.$"


def unfit(why: str) -> str:
    return f"^(model.layers.0.[a-z_.]+|the model): ONNX Runtime has no operator for its weight. {why}. {REMEDY}"


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        (Rtn(bits=3, group_size=32), "It has 3 bits"),
        (Rtn(bits=2, group_size=32), "It has 2 bits"),
        (Rtn(bits=4, group_size=8), "Its groups of 8 inputs are no multiple of 16"),
        (Fp8(), "Its weights are float-quantized, not integer codes in groups"),
        (SmoothQuant(calibration=SMALL), "Its weights are int-quantized, not integer codes in groups"),
    ],
)
def test_codes_without_an_operator_are_refused_before_anything_runs(
    tiny_model: TinyModel, tmp_path: Path, stage: Transform, why: str
) -> None:
    run_stage(stage, tiny_model("llama"), tmp_path / "quantized")
    with pytest.raises(StageError, match=unfit(why)):
        Onnx().predict(Checkpoint(tmp_path / "quantized").shape, "cpu")


def test_nvfp4_and_bitsandbytes_are_refused(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    fours = Mx(type="mxfp4").layer_format(None)  # type: ignore[arg-type]
    groups = {"group_0": {"targets": ["Linear"], **fours.scheme()}}
    for quantization, why in (
        (
            {"quant_method": "compressed-tensors", "config_groups": groups},
            "Its weights are mxfp4-pack-quantized, not integer codes in groups",
        ),
        ({"quant_method": "bitsandbytes"}, "Its weights are those of bitsandbytes, not integer codes in groups"),
    ):
        with pytest.raises(StageError, match=unfit(why)):
            Onnx().predict(type(shape)({**shape.config, "quantization_config": quantization}, shape.tensors), "cpu")


def packed(zeros: Tensor | None = None, order: Tensor | None = None) -> PackedWeight:
    return PackedWeight(pack(torch.zeros(2, 32, dtype=torch.uint8), 4, 1), torch.ones(2, 2), zeros, order, 4, 32)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (None, "Its weight is not integer codes with scales"),
        (packed(order=torch.arange(32) % 2), r"Its inputs are grouped out of order \(activation order\)"),
        (packed(zeros=torch.full((2, 2), 16, dtype=torch.uint8)), "It has the zero point 16, which 4 bits cannot say"),
    ],
)
def test_codes_that_only_the_tensors_tell_of(weight: PackedWeight | None, why: str) -> None:
    with pytest.raises(StageError, match=f"^a.layer: ONNX Runtime has no operator for its weight. {why}. {REMEDY}"):
        exact_codes("a.layer", weight)


@pytest.mark.parametrize(
    ("stage", "fields", "said"),
    [
        (
            Rtn(lm_head=True, group_size=32),
            {"lm_head": 4},
            "^onnx.lm_head: lm_head is quantized already. Leave it out: its codes are kept.$",
        ),
        (
            Rtn(lm_head=True, group_size=32),
            {"embedding": "shared"},
            "^onnx.embedding: the embedding and lm_head are two matrices. .* Set embedding: keep.$",
        ),
    ],
)
def test_a_head_that_is_quantized_already(
    tiny_model: TinyModel, tmp_path: Path, stage: Transform, fields: dict[str, Any], said: str
) -> None:
    run_stage(stage, tiny_model("llama"), tmp_path / "rtn")
    with pytest.raises(StageError, match=said):
        Onnx(**fields).predict(Checkpoint(tmp_path / "rtn").shape, "cpu")


def test_what_is_left_out_follows_the_target(tiny_model: TinyModel, tmp_path: Path) -> None:
    run_stage(Rtn(group_size=32), tiny_model("llama"), tmp_path / "rtn")
    shape = Checkpoint(tmp_path / "rtn").shape

    def order(**fields: Any) -> tuple[str, int | None, bool, bool]:
        found = Onnx(**fields)._order(shape, Path(), Path(), Context())
        return found.dtype, found.head_bits, found.shared_embedding, found.float_activations

    assert order() == ("float32", 8, True, False)
    assert order(embedding="keep") == ("float32", 8, False, False)
    assert order(activations="float") == ("float32", None, False, True)
    assert order(activations="float", lm_head=4) == ("float32", 4, False, True)
    assert order(lm_head="keep") == ("float32", None, False, False)
    assert order(target="cuda") == ("float16", 8, False, True)
    assert order(target="cuda", activations="int8", dtype="bfloat16") == ("bfloat16", 8, False, False)
    narrow = ModelShape({**shape.config, "hidden_size": 72}, shape.tensors)
    assert Onnx()._order(narrow, Path(), Path(), Context()).head_bits is None
    said = "^onnx.lm_head: lm_head cannot be rounded: its groups of 8 inputs are no multiple of 16. Set lm_head: keep.$"
    with pytest.raises(StageError, match=said):
        Onnx(lm_head=8)._order(narrow, Path(), Path(), Context())
