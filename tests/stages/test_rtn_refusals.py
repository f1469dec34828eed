"""What the stage `rtn` refuses, or notes about who opens what it leaves."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from optkit.common.out_of_resources import out_of_memory
from optkit.errors import ResourceError, SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import layers_of
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.awq import Awq
from optkit.stages.rtn import Rtn
from optkit.stages.smoothquant import SmoothQuant
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.running import run_stage


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "llama",
            {"include": ("*.up_porj",)},
            r"rtn.include: `\*.up_porj` matches none of 21 layers. Did you mean '\*.up_proj'\?",
        ),
        (
            "llama",
            {"exclude": ("model.layer.0.mlp.up_proj",)},
            r"rtn.exclude: .* Did you mean 'model.layers.0.mlp.up_proj'\?",
        ),
        ("llama", {"include": ("zzz",)}, r"matches none of 21 layers. Known: \*.down_proj, \*.gate_proj"),
        (
            "llama",
            {"include": ("lm_head",)},
            "rtn.include: `lm_head` is outside the decoder blocks. lm_head and embeddings stay",
        ),
        (
            "llama",
            {"exclude": ("*_proj",)},
            "rtn: no layer is left of 21 in the decoder blocks. Widen `include` or narrow",
        ),
        (
            "llama",
            {"group_size": 96},
            r"model.layers.0.\S+_proj: \d+ columns are not a multiple of group_size 96, nor are "
            "those of 20 other layers. Use 64, 32, 16 or 8.",
        ),
        (
            "llama",
            {"group_size": 24, "include": ("*.0.mlp.down_proj",)},
            "down_proj: 128 columns are not .* 24. Use 128, 64, 32, 16 or 8.",
        ),
        ("gpt2", {}, r"rtn.format: 8 layers are Conv1D \(transformer.h.0.attn.c_attn, ...\). .* Set format: gptq."),
        ("mixtral", {"symmetric": False}, r"rtn.symmetric: 24 layers belong to experts .* Set symmetric: true."),
        (
            "mixtral",
            {"exclude": ("*.experts.2.*",)},
            r"rtn.exclude: model.layers.0.\S*experts.2.w1 is left out and other experts",
        ),
        (
            "mixtral",
            {"format": "gptq", "exclude": ("*.experts.2.*",)},
            r"rtn.exclude: model.layers.0.\S*experts.2.w1 is left out and other",
        ),
        ("mixtral", {"include": ("*.gate",)}, "no layer is left"),
        (
            "mixtral",
            {"exclude": ("*.experts.*",)},
            r"rtn.exclude: 24 layers of experts would stay as they are beside packed ones .* leaves them random. "
            "Quantize the experts too, or take fp8",
        ),
    ],
)
def test_refusals_say_what_to_do(
    tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    stage, source = Rtn(**fields), tiny_model(kind)
    with pytest.raises(StageError, match=message):
        stage.run(source, tmp_path, Context())
    assert not list(tmp_path.iterdir())
    with pytest.raises(StageError, match=message):
        stage.predict(Checkpoint(source).shape, "cpu")


def test_experts_of_8_bit_integers_are_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(StageError, match=r"^smoothquant: 24 layers belong to experts .* Take fp8, or rtn with bits: 8"):
        SmoothQuant(calibration=Calibration(dataset="c4")).predict(Checkpoint(tiny_model("mixtral")).shape, "cpu")


@pytest.mark.parametrize(
    "stage",
    [Rtn(format="gptq", group_size=32), Awq(format="awq", group_size=32, calibration=Calibration(dataset="c4"))],
    ids=["gptq", "awq"],
)
def test_who_opens_experts_is_said_where_transformers_does_not(tiny_model: TinyModel, stage: Rtn | Awq) -> None:
    def notes(kind: str) -> list[str]:
        selection = stage.select_layers(layers_of(Checkpoint(tiny_model(kind)).shape), {})
        return stage.deployment_notes(selection, stage.layer_formats(selection))

    assert notes("mixtral") == [
        f"vLLM on GPUs opens experts in the format {stage.format}; transformers and vLLM on CPUs do not "
        "(transformers leaves them random): format: compressed-tensors with symmetric: true is opened by both"
    ]
    assert notes("llama") == []


@pytest.mark.parametrize(
    ("fields", "which"),
    [
        ({}, ""),
        ({"exclude": ("*.0.mlp.*",)}, "model.layers.0.mlp.down_proj is left out"),
        ({"overrides": {"*.down_proj": {"bits": 8}}}, "layers have several forms"),
        ({"overrides": {"*.down_proj": {"bits": 8}}, "format": "compressed-tensors"}, ""),
    ],
)
def test_exceptions_in_gptqs_format_are_told(tiny_model: TinyModel, fields: dict[str, Any], which: str) -> None:
    stage = Rtn(**{"format": "gptq", "group_size": 32} | fields)
    selection = stage.select_layers(layers_of(Checkpoint(tiny_model("llama")).shape), {})
    said = (
        ", which vLLM and gptqmodel read in the format gptq and transformers does not: it "
        "opens format: compressed-tensors"
    )
    assert stage.deployment_notes(selection, stage.layer_formats(selection)) == ([which + said] if which else [])


def test_shapes_that_gptq_kernels_do_not_take(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "vocab_size": 64,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1, **sizes)).save_pretrained(
        tmp_path / "source"
    )
    message = (
        "q_proj: 48 x 48 weights: not both are multiples of 32, and so for 6 other layers. .* Set "
        "rtn.format to compressed-tensors"
    )
    with pytest.raises(StageError, match=message):
        run_stage(Rtn(format="gptq", group_size=16), tmp_path / "source", tmp_path / "packed")


def test_limits_of_gptq_format_are_checked_with_the_recipe() -> None:
    with pytest.raises(
        ValidationError, match="gptqmodel opens group sizes 16, 32, 64, 128, 256, 512, 1024 and null, not 48"
    ):
        Rtn(format="gptq", group_size=48)
    with pytest.raises(
        ValidationError, match="open zero points in this format only from gptqmodel: set symmetric: true"
    ):
        Rtn(format="gptq", symmetric=False)
    assert Rtn(group_size=-1).group_size is None


def test_nan_weights_are_refused_and_nothing_is_left(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(tiny_model("llama"), source)
    with changing(source) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    with pytest.raises(SourceError, match=r"model.layers.1.mlp.up_proj.weight: 1 of 8,192 weights are NaN or Inf"):
        run_stage(Rtn(), source, target)
    assert not list(target.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "model.layers.3: the main memory is full. Lower this."),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the main memory is full. .*Cannot allocate memory. Lower"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "the main memory is full. .*DefaultCPUAllocator",
        ),
        (torch.OutOfMemoryError("CUDA out of memory."), "the memory of cuda is full. CUDA out of memory. Lower this."),
    ],
)
def test_memory_that_ran_out_names_the_layer(error: Exception, message: str) -> None:
    with pytest.raises(ResourceError, match=message), out_of_memory("model.layers.3", "cuda", "Lower this"):
        raise error


def test_other_runtime_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, out_of_memory("x", "cpu", "y"):
        raise RuntimeError("shapes")
    assert not isinstance(caught.value, ResourceError)
