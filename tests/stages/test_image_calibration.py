"""Calibration on prompts with images: block by block as the whole model, no padding, towers untouched."""

from pathlib import Path

import pytest
import torch

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.source.calibration import Calibration
from optkit.stage import Context, Transform
from optkit.stages.auto_bits import AutoBits
from optkit.stages.awq import Awq
from optkit.stages.fp8 import Fp8
from optkit.stages.gguf import Gguf
from optkit.stages.gptq import Gptq
from optkit.stages.kv_scales import KvScales
from optkit.stages.prune import Prune
from optkit.stages.quantizing.hessians import collect_hessians
from optkit.stages.sensitivity.budget import Choice
from optkit.stages.smoothquant import SmoothQuant
from tests.support.processors import save_pairs, save_processor, without_videos
from tests.support.running import run_stage
from tests.support.tiny_models import save_tiny_model
from tests.support.vision_models import save_vision_model

KINDS = ("gemma3", "llava", "qwen2_5_vl")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: save_vision_model(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    for kind, directory in made.items():
        save_processor(kind, directory)
    return made


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    file = save_pairs(tmp_path_factory.mktemp("pairs"), 3)
    return Calibration(dataset=str(file), images="image", samples=3, sequence_length=90)


@pytest.fixture(autouse=True)
def _loadable(monkeypatch: pytest.MonkeyPatch) -> None:
    without_videos(monkeypatch)


def test_only_the_tokens_of_prompts_enter_hessians(models: dict[str, Path], pairs: Calibration) -> None:
    skeleton, prompts = Skeleton(Checkpoint(models["gemma3"])), pairs.inputs(models["gemma3"], None)
    lengths = [prompt["input_ids"].shape[1] for prompt in prompts]
    inputs = skeleton.capture_inputs(prompts, "cpu")
    assert inputs.hidden.shape == (3, 90, 64)
    assert max(lengths) < 90
    with skeleton.loaded(skeleton.blocks[0], "cpu", ""):
        found = collect_hessians(skeleton, 0, inputs, skeleton.linears(skeleton.blocks[0]), equal_tokens=True)
    assert {hessian.tokens for hessian in found.values()} == {sum(lengths)}


def stages(text: Calibration) -> dict[str, Transform]:
    return {
        "gptq": Gptq(group_size=32, include=("*.self_attn.*",), calibration=text),
        "awq": Awq(group_size=32, include=("*.mlp.*",), calibration=text),
        "smoothquant": SmoothQuant(alpha=0.5, calibration=text),
        "fp8": Fp8(activations="static", scales="tensor", calibration=text),
        "wanda": Prune(method="wanda", calibration=text),
        "owl": Prune(method="sparsegpt", allocation="owl", calibration=text),
        "sensitivity": Prune(method="wanda", allocation="sensitivity", calibration=text),
        "auto_bits": AutoBits(
            average_bits=6, choices=FORMS, calibration=text.model_copy(update={"samples": 2}), held_out_samples=1
        ),
        "kv_scales": KvScales(calibration=text),
    }


FORMS = Choice(bits=4, group_size=32), Choice(bits=8, group_size=32)
CASES = {
    "gemma3": ("gptq", "awq", "wanda", "kv_scales"),
    "llava": ("gptq", "owl", "auto_bits"),
    "qwen2_5_vl": ("gptq", "smoothquant", "fp8", "sensitivity"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CASES.items() for name in names])
def test_stages_see_images_and_leave_what_makes_them(
    models: dict[str, Path], pairs: Calibration, tmp_path: Path, kind: str, name: str
) -> None:
    pytest.importorskip("compressed_tensors")
    report = stages(pairs)[name].run(models[kind], tmp_path, Context())
    source, written = Checkpoint(models[kind]), Checkpoint(tmp_path)
    towers = [each for each in source.tensors if "vision" in each or "visual" in each or "projector" in each]
    assert towers
    assert all(torch.equal(source.read(each), written.read(each)) for each in towers)
    assert report.changed
    assert report.calibrated_on == (pairs.identity(),)
    read = [next(iter(pairs.inputs(each, None))) for each in (models[kind], tmp_path)]
    assert all(torch.equal(value, read[1][key]) for key, value in read[0].items())


def test_images_make_other_weights_than_their_text_alone(
    models: dict[str, Path], pairs: Calibration, tmp_path: Path
) -> None:
    text = Calibration(dataset=pairs.dataset, samples=3, sequence_length=10)
    for name, given in (("images", pairs), ("text", text)):
        run_stage(Gptq(group_size=32, include=("*.self_attn.*",), calibration=given), models["gemma3"], tmp_path / name)
    both = [Checkpoint(tmp_path / name) for name in ("images", "text")]
    names = [name for name in both[0].tensors if name.endswith("weight_packed")]
    assert not all(torch.equal(both[0].read(name), both[1].read(name)) for name in names)


def test_a_stage_that_reads_text_alone_says_so(pairs: Calibration) -> None:
    with pytest.raises(ValueError, match=r"imatrix.images: gguf reads text alone. Leave it out"):
        Gguf(type="Q4_K_M", imatrix=pairs)
    with pytest.raises(ValueError, match="allocation sensitivity is for causal language models, which read no pairs"):
        Prune(allocation="sensitivity", calibration={"dataset": "pairs.jsonl", "input": "input"})


def test_a_model_without_a_tower_takes_no_images(pairs: Calibration, tmp_path: Path) -> None:
    save_processor("gemma3", save_tiny_model("llama", tmp_path))
    prompts = pairs.inputs(tmp_path, None)
    with pytest.raises(StageError, match=r"LlamaForCausalLM takes no images. Leave out calibration.images"):
        Skeleton(Checkpoint(tmp_path)).capture_inputs(prompts, "cpu")
