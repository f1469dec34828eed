"""`overrides:` of the quantizers: which pattern decides, what is written for each layer, and what
is refused.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from optkit.errors import StageError
from optkit.kernels.cpu.native import exact_products
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing.overrides import Override, override_of
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.near import near
from tests.support.opened import transformers_logits
from tests.support.predictions import predicted
from tests.support.running import run_stage
from tests.zoo.models import TOKENS as LETTERS
from tests.zoo.models import plain_logits, save_model

OVERRIDES = {
    "*.down_proj": {"bits": 8, "group_size": 32},
    "model.layers.0.mlp.*": {"bits": 8},
    "model.layers.1.self_attn.o_proj": "keep",
}


def quantize(source: Path, target: Path, **fields: Any) -> Checkpoint:
    stage = Rtn(**fields)
    report = run_stage(stage, source, target)
    predicted(stage, source, target)
    assert sum(report.details["formats"].values()) == report.changed
    return Checkpoint(target)


def test_the_longest_pattern_decides() -> None:
    overrides: dict[str, Any] = {"*.down_proj": Override(bits=8), "model.layers.0.*": Override(bits=3), "*": "keep"}
    assert override_of("model.layers.0.mlp.down_proj", overrides, "rtn") == Override(bits=3)
    assert override_of("model.layers.1.mlp.down_proj", overrides, "rtn") == Override(bits=8)
    assert override_of("model.layers.1.mlp.up_proj", overrides, "rtn") == "keep"
    assert override_of("x", {"y": "keep"}, "rtn") is None
    with pytest.raises(
        StageError, match=r"rtn.overrides: `a\*` and `\*b` both match ab and say different things. The longest"
    ):
        override_of("ab", {"a*": "keep", "*b": Override(bits=2)}, "rtn")
    assert override_of("ab", {"a*": "keep", "*b": "keep"}, "rtn") == "keep"


def test_each_layer_has_the_form_that_its_pattern_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    packed = quantize(tiny_model("qwen2"), tmp_path / "packed", overrides=OVERRIDES)
    width = {name: info.shape[1] for name, info in packed.tensors.items() if name.endswith("weight_packed")}
    assert width["model.layers.0.mlp.up_proj.weight_packed"] == 64 * 8 // 32
    assert width["model.layers.1.mlp.up_proj.weight_packed"] == 64 * 4 // 32
    # groups of 64: the longer pattern
    assert packed.tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (64, 2)
    assert packed.tensors["model.layers.1.mlp.down_proj.weight_scale"].shape == (64, 4)
    assert "model.layers.1.self_attn.o_proj.weight" in packed.tensors
    config = packed.quantization
    assert config is not None
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    listed = {name: group["weights"] for group in config["config_groups"].values() for name in group["targets"]}
    assert listed["model.layers.1.mlp.down_proj"]["group_size"] == 32
    assert "model.layers.1.self_attn.o_proj" in config["ignore"]


def test_every_reader_opens_the_mixture(tiny_model: TinyModel, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")

    packed = quantize(tiny_model("qwen2"), tmp_path / "packed", overrides=OVERRIDES).directory
    tokens = torch.arange(32).view(2, 16)
    expected = transformers_logits(packed, tokens, dtype=torch.float32)
    assert near(open_session(packed).logits(tokens), expected)


def test_gptq_rounds_the_layers_that_ask_for_it_to_nearest(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away. " * 400)
    calibration = Calibration(dataset=str(text), samples=16, sequence_length=32)
    stage = Gptq(calibration=calibration, overrides={"*.o_proj": {"method": "rtn", "bits": 8}})
    report = run_stage(stage, source, tmp_path / "out")
    plain = quantize(source, tmp_path / "rtn", bits=8)
    name = "model.layers.0.self_attn.o_proj.weight_packed"
    assert torch.equal(Checkpoint(tmp_path / "out").read(name), plain.read(name))
    assert "model.layers.0.self_attn.o_proj" not in report.details["losses"]
    assert report.details["formats"] == {"4 bits, groups of 64": 18, "8 bits, groups of 64": 3}


def test_layers_that_vllm_joins_are_named_where_they_differ(tiny_model: TinyModel, tmp_path: Path) -> None:
    stage = Rtn(overrides={"*.q_proj": {"bits": 8}, "model.layers.1.mlp.up_proj": "keep"})
    notes = stage.run(tiny_model("qwen2"), tmp_path, Context()).notes
    assert notes == (
        "vLLM joins model.layers.0.self_attn.q_proj with k_proj, v_proj and opens them in one form "
        "only, and so in 2 other places; transformers opens this model",
    )


def test_gptq_format_lists_what_is_different(tiny_model: TinyModel, tmp_path: Path) -> None:
    fields = {"format": "gptq", "group_size": 32, "overrides": {"*.down_proj": {"bits": 8, "group_size": -1}}}
    packed = quantize(tiny_model("llama"), tmp_path / "packed", **fields)
    assert packed.quantization is not None
    dynamic = packed.quantization["dynamic"]
    assert dynamic[r"+:^model\.layers\.0\.mlp\.down_proj$"] == {"bits": 8, "group_size": -1}
    assert packed.tensors["model.layers.0.mlp.down_proj.scales"].shape == (1, 64)
    tokens = torch.arange(60).view(2, 30)
    found = open_session(packed.directory).logits(tokens)
    assert (
        torch.nn.functional.cosine_similarity(found, open_session(tiny_model("llama")).logits(tokens), dim=-1).min()
        > 0.9
    )


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "llama",
            {"overrides": {"*.up_porj": "keep"}},
            r"rtn.overrides: `\*.up_porj` matches none of 21 layers. Did you mean",
        ),
        ("llama", {"overrides": {"lm_head": "keep"}}, "rtn.overrides: `lm_head` is outside the decoder blocks"),
        ("llama", {"overrides": {"*": "keep"}}, "rtn: no layer is left of 21"),
        (
            "llama",
            {"overrides": {"*.down_proj": {"group_size": 96}}},
            "128 columns are not a multiple of group_size 96, .* 2 other",
        ),
        (
            "mixtral",
            {"overrides": {"*.experts.1.*": {"bits": 8}}},
            r"rtn.overrides: model.layers.0.\S*experts.1.w1 has 8 bits, groups of 64 and \S*experts.0.w1 "
            r"has 4 bits, groups of 64",
        ),
        (
            "mixtral",
            {"overrides": {"model.layers.0.*.experts.*": {"bits": 8}}},
            r"layers.1.\S*experts.0.w1 has 4 bits.* has 8 bits.* transformers opens all experts of a model in one form",
        ),
        (
            "mixtral",
            {"overrides": {"*.experts.1.*": {"symmetric": False}}},
            "rtn.symmetric: 6 layers belong to experts",
        ),
    ],
)
def test_refusals(tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any], message: str) -> None:
    source = shutil.copytree(tiny_model(kind), tmp_path / "source")
    with pytest.raises(StageError, match=message):
        Rtn(**fields).predict(Checkpoint(source).shape, "cpu")


@pytest.mark.parametrize("most", [True, False])
def test_experts_of_a_form_of_their_own_are_opened_by_transformers(tmp_path: Path, most: bool) -> None:
    """It reads all experts in one form: that of a pattern that names them, or of most layers."""
    source = save_model("qwen2_moe", tmp_path / "model", num_experts=4 if most else 2)
    packed = quantize(source, tmp_path / "out", group_size=32, overrides={"*.experts.*": {"bits": 8}})
    assert packed.quantization is not None
    of_experts = packed.quantization["config_groups"]["group_0" if most else "group_1"]
    assert of_experts["weights"]["num_bits"] == 8
    assert of_experts["targets"] == (["Linear"] if most else [r"re:.*\.experts\..*"])
    with exact_products():
        assert near(open_session(packed.directory).logits(LETTERS), plain_logits(packed.directory))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overrides": {"*": {}}}, "says nothing: give bits, group_size, symmetric or method, or write keep"),
        (
            {"overrides": {"*": {"group_size": 4}}},
            "group_size 4: use at least 8, or -1 for one scale per output channel",
        ),
        (
            {"format": "gptq", "overrides": {"*": {"symmetric": False}}},
            "open zero points in this format only from gptqmodel",
        ),
        ({"format": "gptq", "overrides": {"*": {"group_size": 48}}}, "gptqmodel opens group sizes 16, .* not 48"),
        (
            {"format": "gptq", "overrides": {"*": {"bits": 6}}},
            "open 2, 3, 4 and 8 bits in this format, not 6: take one, or",
        ),
        ({"overrides": {"*": "drop"}}, "Input should be 'keep'"),
    ],
)
def test_fields_that_cannot_be_meant(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rtn(**fields)
