"""Stage `mx` with `activations: dynamic`: inputs are rounded as transformers rounds them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Report
from optkit.stages.mx import Mx
from tests.conftest import TinyModel
from tests.support.opened import transformers_logits
from tests.support.predictions import predicted
from tests.support.running import run_stage

TOKENS = torch.arange(60).view(2, 30)


def quantize(source: Path, target: Path, **fields: Any) -> Report:
    return run_stage(Mx(**fields), source, target)


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_inputs_are_rounded_as_transformers_rounds_them(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, type: str
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    source, calibrated = tiny_model("qwen2 bfloat16"), {"calibration": text} if type == "nvfp4" else {}
    report = quantize(source, tmp_path / "packed", type=type, activations="dynamic", **calibrated)
    quantize(source, tmp_path / "weights", type=type)
    predicted(Mx.model_validate({"type": type, "activations": "dynamic", **calibrated}), source, tmp_path / "packed")
    assert "rounded_to_nearest" not in report.details
    described = Checkpoint(tmp_path / "packed").quantization
    scheme = QuantizationConfig.model_validate(described).config_groups["group_0"]
    preset = preset_name_to_scheme(type.upper(), ["Linear"])
    assert scheme.weights.model_dump() == preset.weights.model_dump()
    unsaid = {"observer"}  # calibrates in compressed-tensors alone
    assert scheme.input_activations.model_dump(exclude=unsaid) == preset.input_activations.model_dump(exclude=unsaid)
    packed, weights = (open_session(tmp_path / name) for name in ("packed", "weights"))
    expected = transformers_logits(tmp_path / "packed", TOKENS).float()
    assert torch.equal(packed.logits(TOKENS), expected)
    assert not torch.allclose(weights.logits(TOKENS), expected, atol=1e-2)
    assert packed.notes[0].endswith("torch has no kernel for them; inputs are rounded in blocks")


def test_layers_with_one_input_have_one_global_scale_of_it(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path
) -> None:
    quantize(
        tiny_model("qwen2 bfloat16"), tmp_path / "packed", activations="dynamic", rounding="gptq", calibration=text
    )
    tensors = load_file(tmp_path / "packed" / "model.safetensors")

    def scales(*layers: str) -> set[float]:
        return {tensors[f"model.layers.1.{layer}_proj.input_global_scale"].item() for layer in layers}

    assert len(scales("self_attn.q", "self_attn.k", "self_attn.v")) == len(scales("mlp.gate", "mlp.up")) == 1
    assert len(scales("self_attn.q", "self_attn.o", "mlp.up", "mlp.down")) == 4


def test_a_layer_that_no_token_reached_has_no_scale_of_its_inputs(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.stages.quantizing import hessians

    monkeypatch.setattr(hessians, "watch_inputs", lambda *_: {})
    with pytest.raises(StageError) as refused:
        quantize(tiny_model("qwen2 bfloat16"), tmp_path / "packed", activations="dynamic", calibration=text)
    assert str(refused.value) == (
        "model.layers.0.self_attn.q_proj: no token of the calibration text reached the layer. "
        "Exclude it, or set mx.activations to none."
    )
