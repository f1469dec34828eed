"""What the stage `lora_recover` refuses, and in which recipes it stands."""

from pathlib import Path
from typing import Any

import pytest

from optkit.errors import RecipeError, StageError
from optkit.execute import missing_packages
from optkit.model.checkpoint import Checkpoint
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.stages.fp8 import Fp8
from optkit.stages.int8 import Int8
from optkit.stages.lora_recover import LoraRecover
from optkit.stages.mx import Mx
from optkit.stages.rtn import Rtn
from optkit.stages.smoothquant import SmoothQuant
from optkit.store.store import Store
from tests.conftest import TinyModel
from tests.support.changes import changed_copy
from tests.support.planning import plan_of
from tests.support.recovering import RECOVER, recipe, run, short_training


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    return short_training(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"include": ("*.q_prj",)},
            r"lora_recover.include: `\*.q_prj` matches none of 21 layers. Did you mean '\*.q_proj'",
        ),
        ({"ranks": {"*.wq": 2}}, r"lora_recover.ranks: `\*.wq` matches none"),
        ({"rank": 64}, "lora_recover.rank: .*k_proj: rank 64 is larger than the layer, which is 32 x 64"),
        (
            {"ranks": {"*.q_proj": 65}},
            "lora_recover.ranks: .*q_proj: rank 65 is larger than the layer, which is 64 x 64",
        ),
        ({"sequence_length": 1024}, "sequences of 1,024 tokens, and the model was built for 512"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_at_plan_time(
    tiny_model: TinyModel, fields: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    stage = LoraRecover(**{**fields, **changes})
    with pytest.raises(StageError, match=said):
        stage.predict(Checkpoint(tiny_model("llama")).shape, "cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "dora"}, "DoRA cannot be beside packed weights. .* Set method: lora"),
        ({"keep_zeros": True}, "there are no zeros to keep in packed weights"),
    ],
)
def test_what_packed_weights_do_not_allow_is_refused(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    base = tmp_path / "base"
    run(Rtn(group_size=32), tiny_model("llama"), base)
    stage = LoraRecover(**{**fields, **changes})
    with pytest.raises(StageError, match=said):
        stage.predict(Checkpoint(base).shape, "cpu")
    with pytest.raises(StageError, match=said):
        run(stage, base, tmp_path / "done")


ROUNDED_INPUTS = SmoothQuant(calibration={"dataset": "python-reference", "samples": 8, "sequence_length": 16})
WITHOUT_GRADIENTS = [
    (Fp8(), r"its weights \(fp8\)", "float-quantized weights"),
    (Int8(), "8-bit weights of bitsandbytes", "8-bit weights of bitsandbytes"),
    (ROUNDED_INPUTS, r"its weights \(.*\)", "int-quantized weights"),
    (Mx(type="mxfp4", activations="dynamic"), r"its weights \(mxfp4\)", "mxfp4-pack-quantized weights"),
]


@pytest.mark.parametrize(("stage", "what", "planned"), WITHOUT_GRADIENTS)
def test_weights_without_gradients_are_refused(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], stage: Any, what: str, planned: str
) -> None:
    source, base = tiny_model("llama bfloat16" if isinstance(stage, Mx) else "llama"), tmp_path / "base"
    run(stage, source, base)
    left, origin = stage.predict(Checkpoint(source).shape, "cpu")[1], Checkpoint(source).shape
    with pytest.raises(
        StageError,
        match=rf"lora_recover: there are no gradients through {planned}. Adapters .* Quantize with nf4, rtn,",
    ):
        LoraRecover(**fields).predict_beside(left, "cpu", origin)
    with pytest.raises(
        StageError, match=rf"there are no gradients through {what}.* Quantize with nf4, rtn, gptq or awq"
    ):
        run(LoraRecover(**fields), base, tmp_path / "done", source)


def test_a_base_that_is_no_approximation_has_lost_nothing_that_could_be_made_up_for(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    stage = LoraRecover(**fields, initialization="loftq")
    flipped = changed_copy(tiny_model("llama"), tmp_path, lambda held: {name: -each for name, each in held.items()})
    with pytest.raises(
        StageError, match="its weights are 2.00 of their norm away from those of the recipe's first model"
    ):
        run(stage, flipped, tmp_path / "done", tiny_model("llama"))
    with pytest.raises(
        StageError, match=r"the layer is \[64, 64\], and the recipe's first model has none of that name"
    ):
        run(stage, tiny_model("llama"), tmp_path / "other", tiny_model("gpt2"))


def test_a_teacher_with_other_tokens_is_refused(tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    other = changed_copy(tiny_model("llama"), tmp_path, vocab_size=300)
    with pytest.raises(StageError, match="has a vocabulary of 300 tokens and the student one of 512"):
        LoraRecover(**fields, teacher={"name": str(other)}).predict(Checkpoint(tiny_model("llama")).shape, "cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "dora", "initialization": "loftq"}, "DoRA starts from the lengths of the base's weights"),
        ({"keep_zeros": True, "initialization": "loftq"}, "loftq fills zeros again that keep_zeros keeps"),
        ({"ranks": {"*": 0}}, "(?s)ranks.*greater than or equal to 1"),
        ({"parallel": "fsdp", "devices": 2}, "adapters are too small to be divided"),
        ({"divergence": 0}, "divergence and cross_entropy are both 0"),
    ],
)
def test_fields_that_contradict_each_other(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoraRecover(**changes)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (("nf4", "lora_recover", "lora_recover"), "leaves one with packed weights and an adapter. Keep one of them."),
        (
            ("rtn", "lora_recover", "onnx"),
            "Take one of them out, or put lora_recover before the stage that packs the weights",
        ),
        (
            ("rtn", "lora_recover", "gptq"),
            "gptq reads a checkpoint with float weights and lora_recover leaves one with packed weights and",
        ),
        (
            ("rtn", "lora_recover", "cuda_graphs"),
            "the setting cuda_graphs knows no adapter beside packed weights, and lora_recover leaves",
        ),
        (("rtn", "lora_recover", "onnx_provider: cpu"), "the setting onnx_provider is applied to an ONNX model"),
    ],
)
def test_nothing_drops_an_adapter(tmp_path: Path, tiny_model: TinyModel, stages: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(recipe(tmp_path, tiny_model("llama"), *stages))


def test_formats_follow_what_it_reads(tmp_path: Path, tiny_model: TinyModel) -> None:
    for stages, formats in (
        ((RECOVER, "rtn"), ["checkpoint", "checkpoint", "quantized"]),
        (("rtn: {group_size: 32}", RECOVER, "compile"), ["checkpoint", "quantized", "adapted"]),
    ):
        plan = plan_of(recipe(tmp_path, tiny_model("llama"), *stages), tmp_path / "store")
        assert [step.format for step in plan.steps] == formats


def test_an_adapted_model_takes_no_second_adapter(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    base, done = tmp_path / "base", tmp_path / "done"
    run(Rtn(bits=3, group_size=32), tiny_model("llama"), base)
    run(LoraRecover(**fields), base, done, tiny_model("llama"))
    store = Store(tmp_path / "store")
    with pytest.raises(
        StageError, match="lora_recover reads .*done is one with packed weights and an adapter. Start from"
    ):
        make_plan(load_recipe(recipe(tmp_path, done, RECOVER)).pinned(None), store, "cpu")
    with pytest.raises(StageError, match="cuda_graphs knows no adapter beside packed weights, and .*done has one"):
        make_plan(load_recipe(recipe(tmp_path, done, "cuda_graphs")).pinned(None), store, "cpu")


def test_it_needs_peft(tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.execute.unmet", lambda needs: [need for need in needs if need.startswith("peft")])
    plan = plan_of(recipe(tmp_path, tiny_model("llama"), RECOVER), tmp_path / "store")
    assert [str(missing) for missing in missing_packages(plan)] == [
        "lora_recover: the package `peft>=0.18` is not installed. Run: pip install 'peft>=0.18'."
    ]
