"""config.json against the headers of the weights: what every quantizing stage writes holds, and
each kind of damage is named.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.model.checkpoint import Checkpoint
from optkit.model.schemes import activation_bits
from optkit.recipe.registry import stage_class
from optkit.verification.layers import problems_of_layers
from tests.conftest import TinyModel
from tests.support.changes import change_json, changing
from tests.support.fresh_python import imported_by
from tests.support.running import run_stage

TEXT = {"dataset": "python-reference", "split": "train", "samples": 2, "sequence_length": 64}
UP = "model.layers.1.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"


def quantized(source: Path, target: Path, kind: str, **fields: Any) -> Path:
    run_stage(stage_class(kind).model_validate(fields), source, target)  # type: ignore[attr-defined]
    return target


def change(directory: Path, tensors: Callable[[dict[str, torch.Tensor]], object] | None = None, **words: Any) -> Path:
    """Change tensors, and words of the quantization_config (None removes one)."""
    if tensors:
        with changing(directory) as held:
            tensors(held)
    changed = json.loads((directory / "config.json").read_text())["quantization_config"] | words
    kept = {name: value for name, value in changed.items() if value is not None}
    change_json(directory / "config.json", quantization_config=kept)
    return directory


@pytest.mark.parametrize(
    ("model", "kind", "fields"),
    [
        ("llama", "rtn", {}),
        ("llama", "rtn", {"bits": 3, "group_size": 32, "symmetric": False, "exclude": ["*.0.mlp.*"]}),
        ("qwen2", "rtn", {"bits": 8, "group_size": None}),
        ("mixtral", "rtn", {"group_size": 32}),
        ("qwen2_moe", "rtn", {"group_size": 32}),
        ("gemma3", "rtn", {"group_size": 32}),
        ("opt", "rtn", {"format": "gptq", "group_size": 32, "exclude": ["*.fc1"]}),
        ("gpt2", "rtn", {"format": "gptq"}),
        ("llama bfloat16", "mx", {"type": "nvfp4"}),
        ("llama bfloat16", "mx", {"type": "mxfp4"}),
        ("llama", "nf4", {}),
        ("llama", "nf4", {"type": "fp4", "double_quantization": False}),
        ("qwen2", "int8", {}),
        ("llama", "fp8", {}),
        ("llama", "fp8", {"scales": "tensor", "activations": "static", "calibration": TEXT}),
        ("llama", "smoothquant", {"calibration": TEXT}),
        ("llama", "awq", {"format": "awq", "group_size": 32, "calibration": TEXT}),
        ("llama", "awq", {"group_size": 32, "symmetric": False, "calibration": TEXT}),
    ],
)
def test_what_stages_write_is_what_config_json_says(
    model: str, kind: str, fields: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    made = quantized(tiny_model(model), tmp_path / "made", kind, **fields)
    assert problems_of_layers(Checkpoint(made)) == []


@pytest.mark.parametrize("model", ["llama", "mixtral", "gpt2", "opt", "gpt_oss"])
def test_a_float_checkpoint_has_plain_layers(model: str, tiny_model: TinyModel) -> None:
    assert problems_of_layers(Checkpoint(tiny_model(model))) == []


@pytest.fixture(scope="module")
def packed(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a 4-bit llama in groups of 32, its block 0 attention kept."""
    return quantized(
        tiny_model("llama"), tmp_path_factory.mktemp("packed") / "p", "rtn", group_size=32, exclude=["*.0.self_attn.*"]
    )


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """Return a copy to break."""
    return shutil.copytree(packed, tmp_path / "copy")


def group(**weights: Any) -> dict[str, Any]:
    """Return config_groups with these words of the weights."""
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"group_0": {"targets": ["Linear"], "format": "pack-quantized", "weights": usual | weights}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"config_groups": group(group_size=64)}, "weight_scale [64, 1], and it is [64, 2]"),
        ({"config_groups": group(num_bits=8)}, "weight_packed [64, 16], and it is [64, 8]"),
        (
            {"config_groups": group(symmetric=False)},
            "config.json says pack-quantized, and there is no weight_zero_point",
        ),
        ({"config_groups": group(strategy="diagonal")}, "cannot be pack-quantized: config.json says strategy diagonal"),
        (
            {"config_groups": {"group_0": group()["group_0"] | {"format": "int-quantized"}}},
            "cannot be int-quantized: there is no weight",
        ),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"], "format": "pack-quantized"}}},
            "config.json has no 'weights'",
        ),
        ({"ignore": ["lm_head"]}, f"{Q} cannot be pack-quantized: there is no weight_shape"),
        ({"ignore": ["lm_head", "re:.*layers\\.[01].*"]}, f"{UP}: config.json says plain, and there is no weight"),
        ({"config_groups": {}}, "config.json says plain, which has no weight_packed, weight_scale, weight_shape"),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
            "there is no model.layers.0.self_attn.k_scale",
        ),
    ],
)
def test_words_that_do_not_fit_the_tensors(words: dict[str, Any], said: str, copy: Path) -> None:
    problems = problems_of_layers(Checkpoint(change(copy, **words)))
    assert [problem for problem in problems if said in problem], problems


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            lambda held: held.pop(f"{UP}.weight_scale"),
            f"{UP}: config.json says pack-quantized, and there is no weight_scale",
        ),
        (lambda held: held.pop(f"{UP}.weight_shape"), f"{UP} cannot be pack-quantized: there is no weight_shape"),
        (
            lambda held: held.update({f"{UP}.g_idx": torch.zeros(64)}),
            f"{UP}: config.json says pack-quantized, which has no g_idx",
        ),
        (
            lambda held: held.update({f"{UP}.weight": torch.zeros(128, 64)}),
            f"{UP}: config.json says pack-quantized, which has no weight",
        ),
        (
            lambda held: held.update({f"{Q}.weight_scale": torch.zeros(64, 2)}),
            f"{Q}: config.json says plain, which has no weight_scale",
        ),
        (
            lambda held: held.update({f"{UP}.weight_packed": held[f"{UP}.weight_packed"].long()}),
            f"{UP}: config.json says pack-quantized, and weight_packed is I64, not I32",
        ),
        (
            lambda held: held.update({f"{UP}.weight_shape": torch.tensor([128, 32])}),
            f"{UP}: config.json says pack-quantized with weight_packed [128, 4], and it is [128, 8]",
        ),
        (
            lambda held: held.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}),
            "there is model.layers.0.self_attn.k_scale, and config.json has no kv_cache_scheme",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_words(
    tensors: Callable[[dict[str, torch.Tensor]], object], said: str, copy: Path
) -> None:
    assert said in problems_of_layers(Checkpoint(change(copy, tensors)))


def test_more_specific_targets_come_first(copy: Path) -> None:
    eight = group(num_bits=8)["group_0"] | {"targets": ["re:.*up_proj"]}
    problems = problems_of_layers(Checkpoint(change(copy, config_groups={**group(), "group_1": eight})))
    assert problems
    assert all("up_proj: " in problem for problem in problems)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"bits": 8}, "qweight [16, 64], and it is [8, 64]"),
        ({"group_size": 64}, "scales [1, 64], and it is [2, 64]"),
        ({"dynamic": {}}, f"{Q} cannot be gptq: there is no qweight"),
        ({"dynamic": {"-:.*": {}}}, "config.json has a quantization_config, and no layer is packed"),
        (
            {"dynamic": {"+:.*up_proj": {"bits": 2}}},
            f"{UP}: config.json says gptq with qweight [4, 128], and it is [8, 128]",
        ),
    ],
)
def test_words_of_gptq(words: dict[str, Any], said: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    fields = {"format": "gptq", "group_size": 32, "exclude": ["*.0.self_attn.*"]}
    made = quantized(tiny_model("llama"), tmp_path / "made", "rtn", **fields)
    problems = problems_of_layers(Checkpoint(change(made, **words)))
    assert [problem for problem in problems if said in problem], problems


def test_words_of_bitsandbytes(tiny_model: TinyModel, tmp_path: Path) -> None:
    made = quantized(tiny_model("llama"), tmp_path / "made", "nf4", double_quantization=False)
    problems = problems_of_layers(Checkpoint(change(made, bnb_4bit_use_double_quant=True)))
    assert (
        "cannot be bitsandbytes: config.json says bnb_4bit_use_double_quant, and its quant_state "
        "has no nested_blocksize" in problems[0]
    )
    problems = problems_of_layers(Checkpoint(change(made, bnb_4bit_use_double_quant=False, bnb_4bit_quant_type="fp4")))
    assert "there is no weight.quant_state.bitsandbytes__fp4" in problems[0]


def test_a_format_that_is_not_known_is_said(copy: Path) -> None:
    with pytest.raises(ValueError, match="^quant_method exl3$"):
        problems_of_layers(Checkpoint(change(copy, quant_method="exl3")))
    with pytest.raises(ValueError, match="^compressed-tensors format sparse$"):
        problems_of_layers(
            Checkpoint(change(copy, quant_method="compressed-tensors", config_groups={"a": {"format": "sparse"}}))
        )


@pytest.mark.parametrize(
    ("words", "bits"),
    [
        ({}, 0),
        ({"config_groups": group()}, 0),
        ({"config_groups": {**group(), "group_1": {"targets": [], "input_activations": {"num_bits": 8}}}}, 8),
        ({"kv_cache_scheme": {"num_bits": 8}, "config_groups": {"a": {"input_activations": {"num_bits": 4}}}}, 4),
        ({"kv_cache_scheme": {"num_bits": 8}}, 8),
        ({"load_in_8bit": True}, 8),
        ({"load_in_4bit": True}, 0),
    ],
)
def test_to_how_few_bits_models_round_their_activations(words: dict[str, Any], bits: int) -> None:
    assert activation_bits(words) == bits


def test_awq_as_autoawq_writes_it(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The layout of AutoAWQ's WQLinear_GEMM: qweight [in, out / 8], qzeros [in / group, out / 8],
    scales [in / group, out].
    """
    made = shutil.copytree(tiny_model("llama"), tmp_path / "made")
    with changing(made) as held:
        for name in [name for name in held if name.endswith("_proj.weight") and ".1." not in name]:
            outputs, inputs = held.pop(name).shape
            layer = name.removesuffix(".weight")
            held[f"{layer}.qweight"] = torch.zeros(inputs, outputs // 8, dtype=torch.int32)
            held[f"{layer}.qzeros"] = torch.zeros(inputs // 32, outputs // 8, dtype=torch.int32)
            held[f"{layer}.scales"] = torch.zeros(inputs // 32, outputs, dtype=torch.float16)
    words = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    change_json(made / "config.json", quantization_config=words | {"modules_to_not_convert": ["layers.1."]})
    assert problems_of_layers(Checkpoint(made)) == []
    problems = problems_of_layers(Checkpoint(change(made, group_size=64)))
    assert any("scales [1, 64], and it is [2, 64]" in problem for problem in problems)


def test_no_torch_is_needed(packed: Path) -> None:
    code = (
        "import pathlib; from optkit.model.checkpoint import Checkpoint; from optkit.verification.layers "
        f"import problems_of_layers; assert problems_of_layers(Checkpoint(pathlib.Path({str(packed)!r}))) == []"
    )
    assert "torch" not in imported_by(code)
