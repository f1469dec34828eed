"""What is wrong with a damaged file is said with its place, its value and what to do; and what
would wait for ever is not read.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.errors import RecipeError, SourceError
from optkit.model.safetensors_file import read_header
from optkit.recipe.recipe import load_recipe
from optkit.source.directory import check_directory
from optkit.source.models import ModelSource, pin_model
from optkit.source.texts import TextSource
from tests.conftest import TinyModel
from tests.support.changes import change_json, changing
from tests.support.fresh_python import python
from tests.support.planning import plan_of


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "a has the dtype null, which is none of F64"),
        ({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, 'a has the dtype "F33"'),
        ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "a has the shape null, which is no list of sizes"),
        ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, 'a has the shape "2"'),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, r"a has the shape \[2.0\]"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
            r"a lies at \[8, 0\], which is no beginning and end",
        ),
        (
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"},
            "b begins at byte 0 of the data and not at 8",
        ),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, r"a has 8 bytes, and F32 \[3\] needs 12"),
        ({"__metadata__": 5}, "5 is not an object"),
        ([], r"\[\] is not an object"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(tmp_path: Path, header: Any, said: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(
        SourceError, match=rf"x: the header is not safetensors\. .*{said}.* Copy or download it again\."
    ):
        read_header(tmp_path / "x")


def test_a_header_that_is_nested_deeply(tmp_path: Path) -> None:
    text = b"[" * 10**6
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(SourceError, match="the header is not safetensors. It is nested too deeply."):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "5 heads do not divide the hidden size 64",
        ),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` in config.json is 0, not a whole number above 0"),
        ({"num_key_value_heads": 3}, "3 heads of keys and values do not divide the 4 heads"),
        ({"attn_layer_period": 0}, "`attn_layer_period` in config.json is 0, not a whole number above 0"),
        ({"expert_layer_period": None}, "`expert_layer_period` in config.json is null, not a whole number above 0"),
        (
            {"cross_attention_layers": -1},
            "`cross_attention_layers` in config.json is -1, not a list of numbers of blocks",
        ),
        ({"layer_types": 3}, "`layer_types` in config.json is 3, not a list of names"),
        ({"head_dim": [16, 16]}, r"`head_dim` in config.json is \[16, 16\], not a whole number from 0 up"),
        (
            {"intermediate_size": [None]},
            r"`intermediate_size` in config.json is \[null\], not a whole number from 0 up",
        ),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` in config.json is NaN, not a number"),
        ({"rms_norm_eps": 10**400}, "`rms_norm_eps` in config.json is 10{20}.*, not a number"),
        ({"rope_theta": [1e4, "x"]}, r"`rope_theta` in config.json is \[10000.0, \"x\"\], not a number, or one for"),
        ({"rope_parameters": {"rope_theta": "x"}}, 'rope_parameters: `rope_theta` in config.json is "x", not a number'),
        ({"hidden_size": "64"}, '`hidden_size` in config.json is "64", not a whole number above 0'),
        (
            {"vocab_size": 10**15},
            "`vocab_size` in config.json is 1000000000000000, not a whole number above 0 of at most 268,435,456",
        ),
        ({"num_hidden_layers": 10**9}, "is 1000000000, not a whole number above 0 of at most 10,000"),
        ({"num_hidden_layers": 9_999}, "config.json asks for 9,999 layers, and there are 29 tensors"),
        ({"vocab_size": 10**6}, "config.json asks for 1,000,000 words, and no tensor has more than 512 rows"),
        ({"hidden_size": 96}, "config.json asks for a hidden size of 96, which no tensor has"),
        ({"auto_map": ["x"]}, r'`auto_map` in config.json is \["x"\], not an object'),
        ({"text_config": "x"}, '`text_config` in config.json is "x", not an object'),
        ({"torch_dtype": []}, r"`torch_dtype` in config.json is \[\], not a name"),
        ({"dtype": {}}, r"`dtype` in config.json is \{\}, not a name"),
        ({"text_config": {"hidden_size": -1}}, "config.json: text_config: `hidden_size` in config.json is -1"),
        (
            {"architectures": "LlamaForCausalLM"},
            '`architectures` in config.json is "LlamaForCausalLM", not a list of names',
        ),
        ({"bos_token_id": 0.5}, "`bos_token_id` in config.json is 0.5, not the number of a token"),
        (
            {"quantization_config": {"bits": 0}},
            "`quantization_config.bits` in config.json is 0, not a number other than 0",
        ),
    ],
)
def test_what_is_wrong_with_a_config_is_said(model: Path, changes: dict[str, Any], said: str) -> None:
    change_json(model / "config.json", **changes)
    with pytest.raises(SourceError, match=said):
        check_directory(model, trust_remote_code=False)


def test_what_transformers_takes_and_writes_is_taken(model: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = {"model_type": "step3p7_text", "rope_theta": [5e6, 1e4, 10000]}
    (model / "config.json").write_text(
        json.dumps(config | text | {"text_config": text, "max_position_embeddings": 1200.0}), encoding="utf-8"
    )
    check_directory(model, trust_remote_code=False)


@pytest.mark.parametrize(
    ("stage", "dtype", "said"),
    [
        ("rtn", torch.float64, r"down_proj.weight is in F64\. .* put `- cast: float32` before the other stages"),
        ("bf16", torch.int64, r"down_proj.weight is in I64\. Stages read float .* from its source again"),
        ("fp8", torch.bool, r"down_proj.weight is in BOOL\. Stages read float weights of 16 or 32 bits\."),
        ("rtn", None, r"lm_head.weight has the shape \[\]\. The output layer is a matrix\. Take the checkpoint"),
    ],
)
def test_a_weight_that_stages_do_not_read(model: Path, stage: str, dtype: torch.dtype | None, said: str) -> None:
    with changing(model) as tensors:
        name = "model.layers.1.mlp.down_proj.weight" if dtype else "lm_head.weight"
        tensors[name] = tensors[name].to(dtype) if dtype else torch.tensor(1.0)
    with pytest.raises(SourceError, match=said):
        plan_of({"name": "r", "model": str(model), "stages": [stage]}, model / "store")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "notes"])
def test_a_pipe_is_not_waited_for(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(SourceError, match=f"{name} is no regular file. A pipe or a device is not read."):
        pin_model(ModelSource(name=str(model)))


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_a_pipe_is_no_text(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match="is no regular file. A pipe or a device is not read. Copy it to a file."):
        TextSource(dataset=str(tmp_path / name)).pinned(None)


def test_a_name_that_no_system_takes_is_not_found() -> None:
    with pytest.raises(SourceError, match="no such model"):
        pin_model(ModelSource(name="./" + "x" * 900))
    with pytest.raises(RecipeError, match="there is no such recipe"):
        load_recipe("x" * 5000)


RUN_LIMITED = """
import resource, sys
resource.setrlimit(resource.{limit}, ({most}, {most}))
from optkit_cli.main import main
sys.exit(main(["run", "r.yaml", "--device", "cpu", "--quiet", "--store", "store"]))
"""


@pytest.mark.parametrize(
    ("limit", "most", "said"),
    [
        ("RLIMIT_FSIZE", 50_000, "free. Raise that limit, e.g. by `ulimit -f unlimited`."),
        ("RLIMIT_AS", 450 << 20, "error: out of memory."),
    ],
)
def test_limits_of_the_process_are_no_bugs(
    tmp_path: Path, tiny_model: TinyModel, limit: str, most: int, said: str
) -> None:
    (tmp_path / "r.yaml").write_text(
        f"model: {tiny_model('llama')}\nstages: [bf16]\nevals: [footprint]\n", encoding="utf-8"
    )
    done = python("-c", RUN_LIMITED.format(limit=limit, most=most), cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
