"""What the stage `gguf` refuses, by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from optkit_cli.output import plain_text
from optkit_cli.plan_view import plan_view

from optkit.errors import MissingPackageError, StageError
from optkit.execute import missing_packages
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape
from optkit.stages.gguf import Gguf
from tests.conftest import TinyModel
from tests.stages.test_gguf_stage import WRITTEN, YARN, save
from tests.support.changes import changing
from tests.support.packed_models import save_packed
from tests.support.planning import plan_of
from tests.support.running import run_stage

pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")


def refuse(stage: Gguf, source: Path, message: str, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=message):
        run_stage(stage, source, tmp_path / "gguf")


def test_another_architecture(tiny_model: TinyModel, tmp_path: Path) -> None:
    message = (
        "gguf: OPTForCausalLM cannot be written as GGUF. optkit writes LlamaForCausalLM, MistralForCausalLM, "
        "MixtralForCausalLM"
    )
    refuse(Gguf(), tiny_model("opt"), message, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "gguf: hidden_act is gelu. optkit writes models with silu as GGUF"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is dynamic. optkit writes models with default, linear, yarn, llama3 as GGUF",
        ),
        ({"mlp_bias": True}, r"mlp.\w+_proj.bias: llama.cpp has no such tensor in a plain llama"),
    ],
)
def test_what_llama_cpp_computes_otherwise(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    refuse(Gguf(), save("llama", tmp_path / "source", **fields), message, tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor is 2.0. optkit writes"),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast is 16. optkit writes models with 32"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False. optkit writes models with True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"0.mlp.\w+.weight: llama.cpp has no such tensor in a plain qwen3moe"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings is False. optkit writes models with True"),
        ("gemma2", {"query_pre_attn_scalar": 5}, "query_pre_attn_scalar is 5. optkit writes models with 16"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is not set. llama.cpp caps"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 7}, "layer_types is .*full_attention"),
    ],
)
def test_what_it_computes_otherwise_of_others(tmp_path: Path, kind: str, fields: dict[str, Any], message: str) -> None:
    refuse(Gguf(), save(kind, tmp_path / "source", **{**WRITTEN[kind], **fields}), message, tmp_path)


def test_experts_of_several_shapes(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = save("mixtral", tmp_path / "source", **WRITTEN["mixtral"])
    held, name = load_file(source / "model.safetensors"), "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    held[name] = held[name][1:].contiguous()
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    message = r"blk.1.ffn_gate_exps.weight: its experts are F32 \[127, 64\] and F32 \[128, 64\]. llama.cpp has them"
    refuse(Gguf(), source, message, tmp_path)


def test_a_text_for_experts(tmp_path: Path) -> None:
    source = save("mixtral", tmp_path / "source", **WRITTEN["mixtral"])
    stage = Gguf(type="Q4_0", imatrix={"dataset": "python-reference"})
    refuse(stage, source, "gguf.imatrix: imatrix cannot weigh experts. A text reaches", tmp_path)


def test_fields_that_mean_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    refuse(Gguf(type="F16"), tmp_path / "packed", "gguf.type: type means nothing here: the codes", tmp_path)
    message = "gguf.embedding: embedding means nothing here: the model has float weights. Leave it out"
    refuse(Gguf(embedding="F16"), tmp_path / "plain", message, tmp_path / "b")
    text = {"dataset": "python-reference"}
    message = "gguf.imatrix: imatrix means nothing here: nothing is rounded by llama.cpp. Leave it out, or take a"
    refuse(Gguf(type="F16", imatrix=text), tmp_path / "plain", message, tmp_path / "c")


def test_a_type_that_llama_cpp_would_not_take(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    message = (
        "model.embed_tokens.weight: rows of 64 numbers are no multiple of the 256 that Q4_K_M packs. llama.cpp "
        "would store it as another type with more bits. Take Q4_0, .* or set allow_fallback: true"
    )
    with pytest.raises(StageError, match=message):
        Gguf(type="Q4_K_M").predict(shape, "cpu")
    narrow = {name: type(info)(info.dtype, (*info.shape[:-1], 40)) for name, info in shape.tensors.items()}
    with pytest.raises(StageError, match="rows of 40 numbers are no multiple of the 32 that Q8_0 packs. Take F16"):
        Gguf(type="Q8_0").predict(ModelShape(shape.config, narrow), "cpu")


def test_weights_that_are_no_codes(tiny_model: TinyModel, tmp_path: Path) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "nf4")
    config = Checkpoint(tmp_path / "nf4").config | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "nf4" / "config.json").write_text(json.dumps(config))
    refuse(Gguf(), tmp_path / "nf4", "no type of GGUF has the weights of bitsandbytes. Put gptq", tmp_path)


def test_rows_that_are_not_those_of_config_json(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    with changing(source) as held:
        held["model.layers.0.self_attn.q_proj.weight"] = held["model.layers.0.self_attn.q_proj.weight"][1:].contiguous()
    message = "q_proj.weight: its 63 rows are not 4 heads. In config.json num_attention_heads is 4. Take"
    refuse(Gguf(), source, message, tmp_path)


def test_numbers_beyond_float16(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    with changing(source) as held:
        held["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e5
    message = "model.layers.1.mlp.up_proj.weight: some weights lie outside of float16. Take BF16"
    refuse(Gguf(type="F16"), source, message, tmp_path)


def test_what_evals_of_a_file_need_is_said_before_it_is_made(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.execute.unmet", lambda needs: [need for need in needs if need.startswith("llama")])
    asked = {"model": str(tiny_model("llama")), "stages": ["gguf"]}
    for evals in ([], ["footprint"]):
        plan = plan_of(asked | {"evals": evals}, tmp_path / "store")
        if not evals:
            assert list(missing_packages(plan)) == []
            continue
        assert [type(missing) for missing in missing_packages(plan)] == [MissingPackageError]
        said = " ".join(plain_text(*plan_view(plan)).split())
        assert "not here evals of gguf: the package `llama-cpp-python` is not installed. Run: pip install" in said
