"""`lm_head: true` of the quantizers: what is written, what opens it, and that GPTQ sees what
lm_head is really given.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from optkit.algorithms.hessian import Hessian
from optkit.algorithms.packing import unpack_compressed_tensors
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape
from optkit.model.skeleton import Skeleton
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.gptq import Gptq
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.near import near
from tests.support.opened import transformers_logits
from tests.support.predictions import predicted
from tests.support.running import run_stage

TOKENS = torch.arange(60).view(2, 30)
FEW = TOKENS[:, :16]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gemma3", "gptj", "opt", "mixtral"])
def test_the_skeleton_gives_what_lm_head_is_given(tiny_model: TinyModel, kind: str) -> None:
    source = tiny_model(kind)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(TOKENS)
    skeleton = Skeleton(Checkpoint(source))
    inputs = skeleton.capture_inputs(TOKENS, "cpu", batch_size=1)
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cpu")
        skeleton.advance_(index, inputs)
        skeleton.release_(block.name)
    assert near(torch.cat(list(skeleton.head_inputs(inputs, "cpu"))), seen[0])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("llama", {}), ("qwen2", {"overrides": {"lm_head": {"bits": 8}}}), ("llama", {"symmetric": False})],
)
def test_rtn_of_lm_head_opens_everywhere(
    tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    source, stage = tiny_model(kind), Rtn(lm_head=True, **fields)
    report = stage.run(source, tmp_path, Context())
    predicted(stage, source, tmp_path)
    written = Checkpoint(tmp_path)
    assert report.skipped == {}
    assert written.config["tie_word_embeddings"] is False
    assert "lm_head.weight" not in written.tensors
    assert "model.embed_tokens.weight" in written.tensors
    expected = transformers_logits(tmp_path, FEW, dtype=torch.float32)
    assert near(open_session(tmp_path).logits(FEW), expected)


def test_gptq_of_lm_head_makes_its_outputs_better_than_rounding(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.stages.gptq.HEAD_ROWS", 200)
    source, text = tiny_model("llama"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away. " * 400)
    calibration = Calibration(dataset=str(text), samples=16, sequence_length=32)
    only_head = {"include": ("lm_head",), "lm_head": True, "bits": 3, "group_size": 32}
    for name, stage in (("gptq", Gptq(calibration=calibration, **only_head)), ("rtn", Rtn(**only_head))):
        assert run_stage(stage, source, tmp_path / name).changed == 1
    inputs = open_session(source).model.base_model(calibration.tokens(source, None)).last_hidden_state
    hessian = Hessian(64, equal_tokens=True)
    hessian.add(inputs)
    weight = Checkpoint(source).read("model.embed_tokens.weight")

    def error(directory: Path) -> float:
        packed = Checkpoint(directory)
        leaves = ("weight_packed", "weight_scale", "weight_shape")
        found = unpack_compressed_tensors({leaf: packed.read(f"lm_head.{leaf}") for leaf in leaves}, 3).dequantize()
        return float(((found - weight) @ hessian.matrix() * (found - weight)).sum())

    assert error(tmp_path / "gptq") < 0.7 * error(tmp_path / "rtn")


def test_nested_configs_are_untied_too(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    nested = {key: value for key, value in shape.config.items() if key not in ("vocab_size", "tie_word_embeddings")}
    nested["text_config"] = {"vocab_size": shape.config["vocab_size"], "tie_word_embeddings": True}
    _, left = Rtn(lm_head=True).predict(ModelShape(config=nested, tensors=shape.tensors), "cpu")
    assert "lm_head.weight_packed" in left.tensors
    assert left.config["text_config"]["tie_word_embeddings"] is False
    assert left.config["tie_word_embeddings"] is False


def test_gptq_format_says_that_lm_head_is_packed(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen2")
    Rtn(lm_head=True, format="gptq", group_size=32, bits=8).run(source, tmp_path, Context())
    written = Checkpoint(tmp_path)
    assert written.quantization is not None
    assert written.quantization["lm_head"] is True
    assert "lm_head.qweight" in written.tensors
    apart = open_session(tmp_path).logits(TOKENS) - open_session(source).logits(TOKENS)
    assert float(apart.abs().max()) < 0.1


def test_a_model_without_lm_head_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="rtn.lm_head: the model has no layer lm_head. Set lm_head: false"):
        Rtn(lm_head=True).select_layers({}, {})
    with pytest.raises(
        StageError, match="rtn.lm_head: lm_head is not included. Add lm_head to `include`, or set lm_head: false"
    ):
        Rtn(lm_head=True, include=("*.mlp.*",)).run(tiny_model("llama"), tmp_path, Context())
    with pytest.raises(StageError, match="`lm_head` is outside the decoder blocks"):
        Rtn(include=("lm_head",)).run(tiny_model("llama"), tmp_path, Context())
