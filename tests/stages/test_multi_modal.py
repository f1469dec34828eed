"""Models that see images too: their language model is quantized, the rest stays, and what opens
them finds every layer by its name.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from optkit.errors import StageError
from optkit.model.calibration_memory import calibration_bytes
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Layer
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.weights import weights_of
from optkit.session import open_session
from optkit.session.step_bytes import weight_bytes
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.auto_bits import AutoBits
from optkit.stages.awq import Awq
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.kv_scales import KvScales
from optkit.stages.nf4 import Nf4
from optkit.stages.prune_structured import PruneStructured
from optkit.stages.rotate import Rotate
from optkit.stages.rtn import Rtn
from optkit.verification.layers import problems_of_layers
from tests.conftest import TinyModel
from tests.support.crossed import crossed
from tests.support.running import run_stage
from tests.support.vision_models import save_vision_model

# transformers renames what Gemma's file has: `language_model.model.layers` is
# `model.language_model.layers` in the model
WEIGHTS = {
    "gemma3": "language_model.model.layers.",
    "qwen3_5": "model.language_model.layers.",
    "paligemma": "language_model.model.layers.",
}
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
    return {kind: save_vision_model(kind, tmp_path_factory.mktemp(kind)) for kind in (*WEIGHTS, "llava")}


@pytest.mark.parametrize(("kind", "name"), crossed([*WEIGHTS], [*STAGES]))
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
        "layers in their own ways, which optkit cannot hold against the checkpoint's. Take backend: optkit."
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


def test_the_norms_tell_the_decoder_from_a_larger_tower() -> None:
    norms, matrix = {"mind": TensorInfo("F32", (8,)), "eyes": TensorInfo("F32", (6,))}, TensorInfo("F32", (9, 9))
    tensors = {f"{group}.{index}.norm.weight": norm for group, norm in norms.items() for index in range(2)}
    tensors |= {f"eyes.{index}.w.weight": matrix for index in range(2)}
    shape = ModelShape({"text_config": {"num_hidden_layers": 2, "hidden_size": 8}}, tensors)
    assert shape.block("mind.1.norm.weight")
    assert shape.block("eyes.1.w.weight") is None


@pytest.mark.parametrize("tokens", ["model.mind.embed", "lm_head"])
def test_the_embedding_of_tokens_tells_the_decoder_from_an_equal_tower(tokens: str) -> None:
    towers = ("model.mind.layers", "model.eyes.blocks", "a.z.blocks")
    tensors = {f"{each}.{index}.norm.weight": TensorInfo("F32", (8,)) for each in towers for index in range(2)}
    tensors |= {f"{each}.0.w.weight": TensorInfo("F32", (99, 9)) for each in towers[1:]}
    tensors |= {"model.mind.embed.weight": TensorInfo("F32", (50, 8)), f"{tokens}.weight": TensorInfo("F32", (50, 8))}
    nested = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 50}
    shape = ModelShape({"text_config": nested, "vision_config": {"depth": 2}}, tensors)
    assert {name for name in tensors if shape.block(name)} == {f"{towers[0]}.{index}.norm.weight" for index in (0, 1)}


def test_what_is_added_between_blocks_counts_with_images(text: Calibration) -> None:
    config = {"hidden_size": 8, "vision_config": {"deepstack_visual_indexes": [1, 2]}}
    shape = ModelShape(config, {"layers.0.w.weight": TensorInfo("F32", (8, 8))})
    seen = text.model_copy(update={"images": "image"})
    layers = {"w": Layer("w", 8, 8, transposed=False)}
    alone, with_images = (calibration_bytes(shape, layers, each, 1)[0] for each in (text, seen))
    assert with_images == 3 * alone


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_step_reads_the_decoder_and_the_head_alone(models: dict[str, Path], kind: str) -> None:
    shape = Checkpoint(models[kind]).shape
    towers = {name for name in shape.tensors if shape.in_tower(name)}
    assert towers == {name for name in shape.tensors if "vision" in name or "visual" in name or "projector" in name}
    read = {name: info.size_bytes for name, info in shape.tensors.items() if name not in towers}
    embedding = next(name for name in read if name.endswith("embed_tokens.weight"))
    rows = 0 if "lm_head.weight" not in shape.tensors else shape.tensors[embedding].shape[1] * 4 - read[embedding]
    buffers = 256
    assert 0 <= weight_bytes(open_session(models[kind]).model, 1) - sum(read.values()) - rows <= buffers
    assert sum(each.size_bytes for each in weights_of(shape)) == sum(read.values())


REFUSED = [
    (Rotate(), "rotate.residual", "Set rotate.residual to false"),
    (
        PruneStructured(hidden_size=0.5, multiple_of=8),
        "prune_structured.hidden_size",
        "Take remove_layers, intermediate_size and heads",
    ),
]


@pytest.mark.parametrize(("stage", "where", "remedy"), REFUSED)
def test_hidden_states_that_a_projector_writes_stay_as_they_are(
    models: dict[str, Path], stage: Any, where: str, remedy: str
) -> None:
    with pytest.raises(StageError) as raised:
        stage.predict(Checkpoint(models["llava"]).shape, "cpu")
    assert str(raised.value) == (
        f"{where}: LlavaForConditionalGeneration is more than a language model. What it sees or hears enters the "
        f"hidden states as its projector writes them. {remedy}."
    )


def test_blocks_that_text_does_not_reach_are_not_calibrated(text: Calibration) -> None:
    config = {"architectures": ["MllamaForConditionalGeneration"], "vision_config": {"hidden_size": 4}}
    nested = {"cross_attention_layers": [1], "num_hidden_layers": 4}
    shape = ModelShape({**config, "text_config": nested}, {})
    stages = (Rotate(residual=False), KvScales(calibration=text), PruneStructured(remove_layers=1))
    planned = [(stage.kind, lambda stage=stage: stage.predict(shape, "cpu")) for stage in stages]
    for where, fails in (*planned, ("calibration", lambda: calibration_bytes(shape, {}, text, 1))):
        with pytest.raises(StageError) as raised:
            fails()
        assert str(raised.value) == (
            f"{where}: 1 of 4 blocks of MllamaForConditionalGeneration run for images alone. Text does not reach them. "
            "Take a stage without calibration: rtn, fp8, mx, nf4, or prune by magnitude."
        )


def test_names_stay_those_of_the_hub_which_engines_read(models: dict[str, Path], tmp_path: Path) -> None:
    """transformers 5 dropped `vision_model` of CLIP; vLLM, and the files of the hub, have it."""
    source, target = tmp_path / "hub", tmp_path / "made"
    shutil.copytree(models["llava"], source)
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()}
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    report = run_stage(Rtn(group_size=32), source, target)
    written = Checkpoint(target)
    assert {name for name in written.tensors if "vision" in name} == {name for name in renamed if "vision" in name}
    layer = "encoder.layers.0.mlp.fc1"
    assert f"vision_tower.vision_model.{layer}" in report.skipped
    ignored = set(written.config["quantization_config"]["ignore"])
    assert ignored >= {f"vision_tower.vision_model.{layer}", f"model.vision_tower.{layer}"}
    given = {"input_ids": torch.tensor([[1, *[500] * 4, 7, 8]]), "pixel_values": torch.ones(1, 3, 28, 28)}
    theirs = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32, device_map="cpu").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(**given).logits, open_session(target).model(**given).logits)


TOWERS = ("text", "vision")
ROUNDED = {"rtn": Rtn(group_size=16, towers=TOWERS), "fp8": Fp8(towers=TOWERS)}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_tower_that_is_named_is_quantized_too(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    source, stage = Checkpoint(models["llava"]), ROUNDED[name]
    report = stage.run(models["llava"], tmp_path, Context())
    written = Checkpoint(tmp_path)
    assert written.tensors == stage.predict(source.shape, "cpu")[1].tensors
    assert {f"vision_tower.encoder.layers.{index}.mlp.fc1.weight_scale" for index in range(4)} <= set(written.tensors)
    assert "multi_modal_projector.linear_1" in report.skipped
    assert torch.equal(*(each.read("multi_modal_projector.linear_1.weight") for each in (source, written)))
    assert problems_of_layers(written) == []
    image = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    given = {"input_ids": torch.tensor([[1, *[500] * 4, 7, 8]]), "pixel_values": image}
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32, device_map="cpu").eval()
    with torch.no_grad():
        ours = open_session(tmp_path).model(**given).logits
        torch.testing.assert_close(theirs(**given).logits.float(), ours, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda: Gptq(towers=TOWERS, calibration={"dataset": "c4"}), "towers: vision cannot be calibrated, as what is"),
        (lambda: Rtn(towers=("vision",)), "towers: text is always among them. Leave its layers out by `include`"),
        (lambda: Rtn(towers=TOWERS, format="gptq"), "this format is opened in the decoder's blocks alone: take"),
    ],
)
def test_towers_that_no_recipe_can_ask_for(fails: Callable[[], object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        fails()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma3", "Transformers looks for its weight when it opens the model"),
        ("llama", "The model has no blocks of vision or audio"),
    ],
)
def test_no_layer_of_a_tower(models: dict[str, Path], tiny_model: TinyModel, kind: str, why: str) -> None:
    with pytest.raises(StageError) as raised:
        Rtn(group_size=16, towers=TOWERS).predict(Checkpoint(models.get(kind) or tiny_model(kind)).shape, "cpu")
    assert str(raised.value) == (
        f"rtn.towers: no layer of a tower is left. {why}. Take text alone, or the stage fp8 or int8."
    )
