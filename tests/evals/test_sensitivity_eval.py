"""The eval `sensitivity`: its numbers against those of models in which one layer alone, or all of
them, are quantized.
"""

import shutil
from pathlib import Path

import pytest
import torch
from optkit_evals.sensitivity import Sensitivity, quantized_alone
from torch.nn.functional import kl_div

from optkit.errors import EvalError
from optkit.measure import EvalContext, Session
from optkit.model.checkpoint import Checkpoint
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.recipe_stand_ins import problems_of
from tests.support.running import run_stage


@pytest.fixture
def text(letters: Path) -> str:
    return str(letters)


@pytest.fixture
def artifact(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Return a tiny model rounded to 8 bits, whose errors are small enough for the second order."""
    run_stage(Rtn(bits=8, group_size=32, symmetric=False), tiny_model("llama"), tmp_path / "rtn")
    return tmp_path / "rtn"


def mean_divergence(before: Session, after: Session, tokens: torch.Tensor) -> float:
    ours, theirs = (session.logits(tokens).double().log_softmax(-1) for session in (before, after))
    return float(kl_div(theirs, ours, log_target=True, reduction="none").sum(-1).mean())


def test_the_sum_is_what_all_layers_do_and_each_is_what_it_does_alone(
    tiny_model: TinyModel, tmp_path: Path, artifact: Path, text: str
) -> None:
    before, after = open_session(tiny_model("llama")), open_session(artifact)
    evaluation = Sensitivity(dataset=text, window=32, windows=64, worst=21)
    total, *layers = evaluation.run(after, EvalContext(baseline=before))
    tokens = evaluation.cut(before, EvalContext()).tokens
    assert total.name == "predicted_kl_divergence"
    assert total.value == pytest.approx(mean_divergence(before, after, tokens), rel=0.15)
    assert total.value == pytest.approx(sum(layer.value for layer in layers))
    assert [layer.value for layer in layers] == sorted((layer.value for layer in layers), reverse=True)
    assert len({layer.labels["layer"] for layer in layers}) == len(layers) == 21
    for place in (0, 10):
        name = str(layers[place].labels["layer"])
        alone = tmp_path / str(place)
        run_stage(Rtn(bits=8, group_size=32, symmetric=False, include=(name,)), tiny_model("llama"), alone)
        assert layers[place].value == pytest.approx(mean_divergence(before, open_session(alone), tokens), rel=0.35)


def test_the_worst_layers_alone_are_listed(tiny_model: TinyModel, artifact: Path, text: str) -> None:
    before, after = open_session(tiny_model("llama")), open_session(artifact)
    found = Sensitivity(dataset=text, window=32, windows=4, worst=3).run(after, EvalContext(baseline=before))
    assert [metric.name for metric in found] == ["predicted_kl_divergence", *["layer_kl_divergence"] * 3]
    assert all(metric.unit == "nats/token" and metric.interval is None for metric in found)


def test_what_cannot_be_predicted_is_refused(tiny_model: TinyModel, tmp_path: Path, artifact: Path, text: str) -> None:
    before, after = open_session(tiny_model("llama")), open_session(artifact)
    evaluation = Sensitivity(dataset=text, window=32, windows=4)
    with pytest.raises(EvalError, match=r"there is no baseline\. Errors are differences from its weights"):
        evaluation.run(after, EvalContext())
    with pytest.raises(EvalError, match=r"no layer is quantized in a form that optkit reads"):
        evaluation.run(before, EvalContext(baseline=before))
    folded = Path(shutil.copytree(artifact, tmp_path / "folded"))
    with changing(folded) as tensors:
        tensors["model.layers.1.input_layernorm.weight"] *= 1.1
    with pytest.raises(EvalError, match=r"model.layers.1.input_layernorm.weight differs from the unmodified model's"):
        evaluation.run(open_session(folded), EvalContext(baseline=before))
    adapted = Path(shutil.copytree(artifact, tmp_path / "adapted"))
    (adapted / "adapter").mkdir()
    (adapted / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        EvalError,
        match=r"adapted: an adapter lies beside its packed weights\. It makes up for the errors of all layers",
    ):
        quantized_alone(Checkpoint(tiny_model("llama")), Checkpoint(adapted))
    calibrated = {**evaluation.pinned(None).identity()}
    with pytest.raises(EvalError, match="was calibrated on"):
        evaluation.run(after, EvalContext(baseline=before, calibrated_on=(calibrated,)))


def test_an_adapter_is_refused_where_the_recipe_names_the_eval() -> None:
    quantize, recover = {"rtn": {"bits": 4}}, {"lora_recover": {"texts": ["c4"]}}

    def recipe(*stages: object) -> dict[str, object]:
        return {
            "model": "smollm2-135m",
            "stages": [*stages, "sdpa"],
            "evals": [{"sensitivity": {"dataset": "wikitext2"}}],
        }

    assert problems_of(recipe(quantize, recover)) == [
        "sensitivity says what each layer does alone, and the adapter of lora_recover makes "
        "up for all of them together. Take it out, or put it in a recipe that ends before lora_recover."
    ]
    load_recipe(recipe(quantize))
    load_recipe(recipe(recover, quantize))
