"""genai_config.json beside what torch exported: ONNX Runtime GenAI generates with it, in a process
of its own, what transformers does.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from optkit.onnx.directory import OnnxDirectory
from optkit.onnx.genai_config import write_genai_config
from optkit.stage import Report
from optkit.verification.agreement import compare_logits, read_logits
from optkit.verification.engines import ONNXRUNTIME_GENAI, ask
from optkit.verification.onnx_configs import problems_of_genai
from tests.conftest import TinyModel
from tests.support.changes import change_json
from tests.support.onnx_changes import change_graph

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime_genai")
pytestmark = pytest.mark.usefixtures("children_here")
TOKENS = list(range(40, 60))


@pytest.fixture
def exported(torch_gpt2: tuple[Path, Report]) -> Path:
    """Return the tiny GPT-2 as torch exports it: neither its architecture nor its config's words
    are GenAI's.
    """
    return torch_gpt2[0]


def test_it_generates_what_transformers_does(exported: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    request = {
        "directory": str(exported),
        "tokens": TOKENS,
        "new_tokens": 6,
        "device": "cpu",
        "logits": str(tmp_path / "logits.f32"),
    }
    answer = ask(ONNXRUNTIME_GENAI, sys.executable, request, tmp_path, 120)
    assert answer.problem == ""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("gpt2"))
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        ours = model(tokens).logits[0]
        going_on = model.generate(tokens, do_sample=False, max_new_tokens=6, pad_token_id=1)
    assert (
        compare_logits(ours, read_logits(tmp_path / "logits.f32", answer.said["logits_shape"])).max_logit_difference
        < 1e-4
    )
    wanted = going_on[0, len(TOKENS) :].tolist()
    assert len(wanted) > 3
    assert answer.said["generated"][: len(wanted)] == wanted


def test_what_it_says(exported: Path) -> None:
    assert problems_of_genai(OnnxDirectory(exported)) == []
    model = json.loads((exported / "genai_config.json").read_text())["model"]
    config = json.loads((exported / "config.json").read_text())
    assert (model["type"], model["vocab_size"], model["context_length"]) == (
        "decoder",
        config["vocab_size"],
        config["n_positions"],
    )
    assert (model["decoder"]["num_attention_heads"], model["decoder"]["hidden_size"]) == (
        config["n_head"],
        config["n_embd"],
    )
    assert "position_ids" not in model["decoder"]["inputs"]


def test_graphs_that_are_not_for_it(exported: Path, tmp_path: Path) -> None:
    def other_heads(graph: object) -> None:
        port = next(each for each in graph.graph.input if each.name == "past_key_values.1.value")  # type: ignore[attr-defined]
        port.type.tensor_type.shape.dim[3].dim_value = 7

    odd = shutil.copytree(exported, tmp_path / "odd")
    change_graph(odd, other_heads)
    assert write_genai_config(odd) == "its KV cache has one shape in all layers, and that of the graph has several"
    named = shutil.copytree(exported, tmp_path / "named")
    change_graph(named, lambda model: setattr(model.graph.input[1], "name", "mask"))
    assert write_genai_config(named) == "it has nothing for the input mask"
    silent = shutil.copytree(exported, tmp_path / "silent")
    change_json(silent / "config.json", lambda config: config.pop("n_positions"))
    (silent / "genai_config.json").unlink()
    assert write_genai_config(silent) == "config.json does not say for how many tokens the model was built"
