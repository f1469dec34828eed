"""Models that see images too: their language model is quantized, the rest stays, and what opens
them finds every layer by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape, TensorInfo
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.auto_bits import AutoBits
from optkit.stages.awq import Awq
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from optkit.verification.layers import problems_of_layers
from tests.support.tiny_models import SIZES, save_tokenizer

SEES = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {**SIZES, "head_dim": 16, "sliding_window": 8},
    "vision_config": {**SEES, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 28},
    "mm_tokens_per_image": 4,
    **{f"{name}_token_index": 500 + number for number, name in enumerate(("image", "boi", "eoi"))},
}
"""transformers renames what the file has: `language_model.model.layers` is
`model.language_model.layers` in the model.
"""
QWEN: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {**SIZES, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_key_head_dim": 2, "linear_value_head_dim": 2, "linear_num_key_heads": 32, "linear_num_value_heads": 32},
    "vision_config": {**SEES, "depth": 3, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
}
"""As a causal language model it has no layers for images, although the file does."""
WEIGHTS = {"gemma3": "language_model.model.layers.", "qwen3_5": "model.language_model.layers."}
STAGES: dict[str, Callable[[Calibration], Any]] = {
    "rtn": lambda text: Rtn(group_size=32, exclude=("*.0.mlp.*",)),
    "rtn in two forms": lambda text: Rtn(group_size=32, overrides={"*.up_proj": {"bits": 8}}),  # type: ignore[dict-item]
    "gptq": lambda text: Gptq(group_size=32, exclude=("*.0.mlp.*",), calibration=text),
    "awq": lambda text: Awq(group_size=32, exclude=("*.0.mlp.*",), calibration=text),
    "nf4": lambda text: Nf4(exclude=("*.0.mlp.*",)),
    "fp8": lambda text: Fp8(exclude=("*.0.mlp.*",)),
}
NEEDS = {"nf4": "bitsandbytes"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for config in (GEMMA3, QWEN):
        directory = tmp_path_factory.mktemp(config["model_type"])
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, parameter.shape[-1] ** -0.5 if "embed" not in name else 1.0)
        model.save_pretrained(directory)
        save_tokenizer(directory)
        made[config["model_type"]] = directory
    return made


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_language_model_is_quantized_and_the_rest_stays(
    models: dict[str, Path], text: Calibration, tmp_path: Path, kind: str, name: str
) -> None:
    pytest.importorskip(NEEDS.get(name, "compressed_tensors"))
    source, stage = Checkpoint(models[kind]), STAGES[name](text)
    predicted = stage.predict(source.shape, "cpu")[1]
    report = stage.run(models[kind], tmp_path, Context())
    written = Checkpoint(tmp_path)
    assert set(written.tensors) == set(predicted.tensors)
    kept = {name for name in source.tensors if not name.startswith(WEIGHTS[kind])}
    assert all(torch.equal(source.read(name), written.read(name)) for name in kept)
    assert any("vision" in name or "visual" in name for name in report.skipped)
    assert problems_of_layers(written) == []
    tokens = torch.arange(48)[None]
    ours = open_session(tmp_path).logits(tokens)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32, device_map="cpu").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=tokens).logits.float(), ours, atol=0.05, rtol=0)


def test_auto_bits_chooses_among_the_layers_of_the_language_model(
    models: dict[str, Path], text: Calibration, tmp_path: Path
) -> None:
    stage = AutoBits(average_bits=6, calibration=text, sensitivity_samples=2, held_out_samples=0)
    report = stage.run(models["gemma3"], tmp_path, Context())
    assert all(name.startswith(WEIGHTS["gemma3"]) for name in report.details["choices"])


def test_a_layer_of_the_other_blocks_cannot_be_chosen(models: dict[str, Path], tmp_path: Path) -> None:
    stage, shape = Rtn(include=("*vision_tower*",)), Checkpoint(models["gemma3"]).shape
    for fails in (lambda: stage.predict(shape, "cpu"), lambda: stage.run(models["gemma3"], tmp_path, Context())):
        with pytest.raises(StageError, match=r"^rtn.include: `\*vision_tower\*` is outside the decoder blocks"):
            fails()


def test_other_libraries_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(StageError) as raised:
        Rtn(backend="llmcompressor", group_size=32).run(models["gemma3"], tmp_path, Context())
    assert str(raised.value) == (
        "rtn.backend: Gemma3ForConditionalGeneration is more than a language model. Libraries name its "
        "layers in their own ways, which"
        " optkit cannot hold against the checkpoint's. Take backend: optkit."
    )


def test_the_blocks_are_those_that_config_json_counts() -> None:
    matrix = TensorInfo("F32", (2, 2))
    tensors = {
        f"{group}.{index}.w.weight": matrix
        for group, count in (("eyes", 5), ("mind", 3), ("ears", 3))
        for index in range(count)
    }
    tensors["mind.0.more.weight"] = matrix
    shape = ModelShape({"text_config": {"num_hidden_layers": 3}}, tensors)
    assert (shape.block("mind.2.w.weight"), shape.block("ears.2.w.weight"), shape.block("eyes.1.w.weight")) == (
        ("mind", 2),
        None,
        None,
    )
    assert shape.outside_bytes == 8 * matrix.size_bytes
    assert ModelShape({}, tensors).block("eyes.1.w.weight") == ("eyes", 1)
