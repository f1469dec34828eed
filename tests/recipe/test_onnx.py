"""What a recipe that ends in an ONNX model cannot have is told at its line, before anything runs."""

import pytest

from optkit.recipe import registry
from optkit.recipe.recipe import load_recipe
from optkit.recipe.registry import eval_class, stage_class
from optkit.stage import Format, Setting
from tests.support.recipe_stand_ins import one_problem, problems_of, register_onnx_stand_ins, register_stand_ins


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    register_stand_ins(monkeypatch)
    register_onnx_stand_ins(monkeypatch)


def recipe(*stages: str, evals: tuple[str, ...] = ("speed",)) -> str:
    lines = [
        "model: x/y",
        "stages:",
        *(f"  - {stage}" for stage in stages),
        "evals:",
        *(f"  - {each}" for each in evals),
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("stages", "place", "export"),
    [
        (("onnx", "tone: minor"), "4:5", "onnx (line 3)"),
        (("tone: minor", "onnx"), "3:5", "onnx (line 4)"),
        (("halve", "tone: minor", "onnx", "fuse"), "4:5", "fuse (line 6)"),
    ],
)
def test_a_setting_of_torch_models(stages: tuple[str, ...], place: str, export: str) -> None:
    assert one_problem(recipe(*stages)) == (
        f"recipe:{place}: the setting tone is applied to a torch model when it is opened, and {export} "
        "leaves an ONNX model. Take it out."
    )


@pytest.mark.usefixtures("stand_ins")
def test_a_setting_of_onnx_models() -> None:
    assert one_problem(recipe("providers", "halve")) == (
        "recipe:3:5: the setting providers is applied to an ONNX model when it is opened, and halve "
        "(line 4) leaves a torch model. Put onnx after halve, or take it out."
    )
    assert load_recipe(recipe("onnx", "providers")).settings[0].kind == "providers"
    assert load_recipe(recipe("providers")).settings[0].kind == "providers"


@pytest.mark.usefixtures("stand_ins")
def test_a_preset_of_a_setting_is_refused_where_it_stands() -> None:
    assert one_problem(recipe("onnx", "major")).startswith("recipe:4:5: the setting tone is applied to a torch model")


@pytest.mark.usefixtures("stand_ins")
def test_an_eval_that_reads_weights() -> None:
    assert one_problem(recipe("halve", "onnx", evals=("speed", "weigh"))) == (
        "recipe:7:5: weigh reads the weights of a checkpoint, and onnx (line 4) leaves an ONNX model. Take "
        "it out, or put it in a recipe that ends before the export."
    )


@pytest.mark.usefixtures("stand_ins")
def test_each_is_told_and_without_an_export_none() -> None:
    told = problems_of(recipe("onnx", "tone: minor", evals=("weigh", "speed")))
    assert [problem.split(" ")[0] for problem in told] == ["recipe:4:5:", "recipe:6:5:"]
    assert load_recipe(recipe("halve", "tone: minor", "threads", evals=("weigh", "speed"))).settings[0].kind == "tone"
    assert load_recipe(recipe("halve", "onnx", "fuse", "threads")).settings[0].kind == "threads"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        (
            ("onnx", "halve"),
            "recipe:4:5: halve reads a checkpoint with float weights and onnx leaves an ONNX "
            "model. Put halve before onnx.",
        ),
        (
            ("onnx", "onnx"),
            "recipe:4:5: onnx reads a checkpoint with float weights or one with packed weights "
            "and onnx leaves an ONNX model. Keep one of them.",
        ),
        (
            ("shrink", "fuse"),
            "recipe:4:5: fuse reads an ONNX model and shrink leaves one with packed weights. "
            "Put onnx between them: it exports what shrink leaves.",
        ),
    ],
)
def test_the_order_around_an_export(stages: tuple[str, ...], problem: str) -> None:
    assert one_problem(recipe(*stages)) == problem


@pytest.mark.usefixtures("stand_ins")
def test_packed_weights_can_be_exported_and_then_changed() -> None:
    assert [entry.kind for entry in load_recipe(recipe("shrink", "onnx", "fuse")).transforms] == [
        "shrink",
        "onnx",
        "fuse",
    ]


def test_the_real_settings_and_evals() -> None:
    for kind in ("attention", "compile", "kv_cache"):
        setting = stage_class(kind)
        assert issubclass(setting, Setting)
        assert Format.ONNX not in setting.accepts
    assert {kind for kind in registry.EVALS if eval_class(kind).reads_weights} == {"roofline", "sensitivity"}


def test_the_real_settings_in_front_of_and_behind_the_real_export() -> None:
    told = problems_of(
        recipe("sdpa", "onnx", "compile", "kv_int8", evals=("sensitivity: python-reference", "footprint"))
    )
    assert [problem.split(" is ")[0] for problem in told[:3]] == [
        "recipe:3:5: the setting attention",
        "recipe:5:5: the setting compile",
        "recipe:6:5: the setting kv_cache",
    ]
    assert told[3].startswith(
        "recipe:8:5: sensitivity reads the weights of a checkpoint, and onnx (line 4) leaves an ONNX model."
    )


def test_the_real_stages_around_the_real_export() -> None:
    assert one_problem(recipe("onnx", "rtn", evals=("footprint",))) == (
        "recipe:4:5: rtn reads a checkpoint with float weights and onnx leaves an ONNX model. Put rtn before onnx."
    )
    assert one_problem(recipe("rtn", "onnx_quantize", evals=("footprint",))).endswith(
        "Put onnx between them: it exports what rtn leaves."
    )
