"""Models whose code nobody has: stages that compute with weights alone take names and shapes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit import pipeline
from optkit.errors import EvalError, SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.inventory import take_inventory
from optkit.model.task import Task, is_built_in, task_of
from optkit.stage import Context, Transform
from optkit.stages.cast import Cast
from optkit.stages.fp8 import Fp8
from optkit.stages.int8 import Int8
from optkit.stages.mx import Mx
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from tests.support.changes import change_json
from tests.support.predictions import predicted
from tests.support.running import run_stage

STAGES: dict[str, Transform] = {
    "rtn": Rtn(group_size=32),
    "rtn with a head": Rtn(group_size=32, lm_head=True),
    "fp8": Fp8(),
    "mx": Mx(),
    "nf4": Nf4(double_quantization=False),
    "int8": Int8(),
    "cast": Cast(dtype="float16"),
}
TEXT = {"dataset": "python-reference"}
NEEDS = {"nf4": "bitsandbytes", "int8": "bitsandbytes"}


@pytest.fixture(scope="module")
def unknown(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama in bfloat16 under another name, with parts that no Llama has."""
    target = Path(shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("unknown") / "model"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(target / "model.safetensors").items()}
    tensors["model.layers.0.mixer.A_log"] = torch.zeros(64)
    tensors["model.layers.0.mixer.conv"] = torch.zeros(64, 1, 4)
    tensors["model.between.weight"] = torch.ones(64, 64, dtype=torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    told = {"model_type": "frobnicator", "architectures": ["FrobnicatorForCausalLM"], "dtype": "bfloat16"}
    change_json(target / "config.json", **told)
    return target


def test_what_transformers_has() -> None:
    assert all(map(is_built_in, ("llama", "gemma3_text", "xlm-roberta", "gpt2")))
    assert not any(map(is_built_in, ("frobnicator", "")))
    assert task_of({"model_type": "frobnicator"}) is Task.UNKNOWN
    own_code = {"model_type": "frobnicator", "auto_map": {}, "architectures": ["FrobnicatorForCausalLM"]}
    assert task_of(own_code) is Task.GENERATION


@pytest.mark.parametrize("name", STAGES)
def test_names_and_shapes_are_enough(unknown: Path, tmp_path: Path, name: str) -> None:
    if package := NEEDS.get(name):
        pytest.importorskip(package)
    report = STAGES[name].run(unknown, tmp_path, Context())
    before, after = Checkpoint(unknown), Checkpoint(tmp_path)
    found = take_inventory(before.shape, after.shape, report.dropped)
    assert found.lost == []
    predicted(STAGES[name], unknown, tmp_path)
    if name == "cast":
        return
    assert report.changed == (22 if "head" in name else 21)
    assert report.skipped["model.between"] == "outside the decoder blocks"
    assert report.skipped["model.layers.0.mixer.conv"].startswith("not a matrix")
    assert torch.equal(after.read("model.between.weight"), before.read("model.between.weight"))


def test_it_computes_what_it_does_of_a_known_model(unknown: Path, tmp_path: Path) -> None:
    known = Path(shutil.copytree(unknown, tmp_path / "known"))
    tensors = load_file(known / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if "mixer" not in name and "between" not in name}
    save_file(left, known / "model.safetensors")
    change_json(known / "config.json", model_type="llama")
    made = []
    for source in (unknown, known):
        target = tmp_path / f"of {source.name} {len(made)}"
        run_stage(Rtn(group_size=32), source, target)
        made.append(load_file(target / "model.safetensors"))
    assert made[1].keys() <= made[0].keys()
    assert all(torch.equal(tensor, made[0][name]) for name, tensor in made[1].items())


def recipe(unknown: Path, stage: Any, *evals: Any) -> dict[str, Any]:
    return {"model": str(unknown), "stages": [stage], "evals": list(evals)}


def test_a_run_measures_its_files(unknown: Path, tmp_path: Path) -> None:
    from optkit.recipe.recipe import load_recipe

    loaded = load_recipe(recipe(unknown, {"rtn": {"group_size": 32}}, "footprint"))
    scorecard = pipeline.run(loaded, out=tmp_path / "out", store=tmp_path / "store")
    assert {row.metric.name for row in scorecard.rows} >= {"size_bytes", "bits_per_weight"}
    assert "transformers does not have the model's code: its files alone were measured" in scorecard.notes
    assert scorecard.steps[0].report["details"]["tensors"]["packed"] == 21


@pytest.mark.parametrize(
    ("stage", "evals", "error", "message"),
    [
        (
            {"gptq": {"calibration": TEXT}},
            (),
            StageError,
            "gptq is for a causal language model .* is a model whose code transformers does not have",
        ),
        ({"rtn": {"group_size": 32}}, ({"perplexity": TEXT},), EvalError, "perplexity is for a causal language model"),
        (
            {"fp8": {"activations": "static", "calibration": TEXT}},
            (),
            StageError,
            r"fp8.calibration: transformers does not have the code .* Calibration opens and runs the model\. Leave",
        ),
        (
            {"rtn": {"backend": "llmcompressor", "group_size": 32}},
            (),
            StageError,
            r"rtn.backend: transformers does not have the code .* opens and runs the model\. Take backend: optkit",
        ),
    ],
)
def test_what_runs_a_model_is_refused_at_plan(
    unknown: Path, tmp_path: Path, stage: Any, evals: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    from optkit.recipe.recipe import load_recipe

    with pytest.raises(error, match=message):
        pipeline.plan(load_recipe(recipe(unknown, stage, *evals)), store=tmp_path / "store")


def test_code_that_is_not_trusted_is_still_refused(unknown: Path, tmp_path: Path) -> None:
    from optkit.recipe.recipe import load_recipe

    own = Path(shutil.copytree(unknown, tmp_path / "own"))
    change_json(own / "config.json", auto_map={"AutoModelForCausalLM": "m.F"})
    with pytest.raises(SourceError, match="comes with code of its own"):
        pipeline.plan(load_recipe(recipe(own, {"rtn": {"group_size": 32}})), store=tmp_path / "store")
