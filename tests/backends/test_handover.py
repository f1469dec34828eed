"""What is handed to another transformers is right for it, and a model that is read as another one
is found out.
"""

import json
import runpy
import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from optkit.backends.older_transformers import both_spellings, check_same_model, hand_over, logits_here
from optkit.backends.process import LAUNCH
from optkit.errors import StageError
from optkit.model.config_file import read_config
from tests.conftest import TinyModel
from tests.support.changes import change_json
from tests.support.near import near


@pytest.mark.parametrize(
    ("rope", "old"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_scaling": None},
        ),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ],
    ids=["plain", "scaled", "partial", "per layer type"],
)
def test_positions_are_spelled_as_both_versions_read_them(rope: dict[str, object], old: dict[str, object]) -> None:
    config = {"model_type": "llama", "dtype": "bfloat16", "rope_parameters": rope}
    assert both_spellings(config) == {**config, "torch_dtype": "bfloat16", **old}
    assert both_spellings({"text_config": config})["text_config"] == both_spellings(config)


def test_nothing_is_added_where_there_is_nothing_to_say() -> None:
    assert both_spellings({"model_type": "gpt2", "rope_theta": 1.0}) == {"model_type": "gpt2", "rope_theta": 1.0}


def test_a_reader_of_the_same_major_version_gets_the_checkpoint_itself(tiny_model: TinyModel, tmp_path: Path) -> None:
    assert hand_over(tiny_model("llama"), tmp_path / "given", "5.23.0") == tiny_model("llama")
    assert not (tmp_path / "given").exists()


@pytest.mark.parametrize("version", ["5.23.0", "4.51.3"])
def test_a_model_with_a_soft_cap_is_opened_with_eager_attention(
    tiny_model: TinyModel, tmp_path: Path, version: str
) -> None:
    given = hand_over(tiny_model("gemma2"), tmp_path / "given", version)
    model = AutoModelForCausalLM.from_pretrained(given)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        logits = model(torch.arange(20)[None]).logits[0]
    assert near(logits_here(tiny_model("gemma2"), range(20), "float32"), logits)
    assert AutoModelForCausalLM.from_pretrained(tiny_model("gemma2")).config._attn_implementation == "sdpa"


def test_an_older_reader_gets_links_and_its_own_config(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model("llama"), source)
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "x"}')
    given = hand_over(source, tmp_path / "given", "4.51.3")
    assert {path.name for path in given.iterdir()} == {path.name for path in source.iterdir()}
    assert (given / "model.safetensors").resolve() == (source / "model.safetensors").resolve()
    assert json.loads((given / "config.json").read_text())["rope_theta"] == 10000.0
    assert json.loads((given / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "x",
    }
    tokens = list(range(40))
    # and ours reads it too
    assert torch.equal(logits_here(given, tokens, "float32"), logits_here(source, tokens, "float32"))


def test_lost_frequencies_are_found_by_the_logits(tiny_model: TinyModel, tmp_path: Path) -> None:
    """What transformers 4.57 does with `rope_parameters`: it turns the positions with 10000
    whatever is written there.
    """
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for directory, theta in ((right, 1e6), (wrong, 1e4)):
        shutil.copytree(tiny_model("llama"), directory)
        change_json(directory / "config.json", rope_parameters={"rope_type": "default", "rope_theta": theta})
    tokens = list(range(100, 228))
    here = logits_here(right, tokens, "float32")
    assert check_same_model(here, here + 1e-6, "float32", "autoawq", "4.51.3") < 1e-4
    for dtype in ("float32", "bfloat16"):
        said = (
            r"backend autoawq: the logits of transformers 4.57.6 and 5\.\S+ are \S+ apart, \S+ "
            r"is the limit. They read the"
        )
        with pytest.raises(StageError, match=said):
            check_same_model(here, logits_here(wrong, tokens, "float32"), dtype, "autoawq", "4.57.6")


def test_numbers_that_are_none_and_another_vocabulary_are_other_models() -> None:
    here = torch.randn(4, 8)
    with pytest.raises(StageError, match="are nan apart"):
        check_same_model(here, here * float("nan"), "float32", "toy", "5.0")
    with pytest.raises(
        StageError,
        match=r"transformers 5.0 gives logits \[4, 9\] and 5\.\S+ gives \[4, 8\]. They read the checkpoint as",
    ):
        check_same_model(here, torch.randn(4, 9), "float32", "toy", "5.0")


def test_gemma_3_that_gptqmodel_saved_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gptqmodel", "gptqmodel.quantization", "gptqmodel.quantization.config"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    worker = runpy.run_path(str(LAUNCH.with_name("gptqmodel.py")))
    config = Gemma3TextConfig(num_hidden_layers=6)
    given = json.loads(json.dumps(config.rope_parameters))
    config.rope_parameters |= {"rope_type": "default", "rope_theta": dict(config.default_theta)}  # as 7.6 adds them
    worker["_drop_added_rope"](config)
    config.save_pretrained(tmp_path)
    assert read_config(tmp_path / "config.json")["rope_parameters"] == given
