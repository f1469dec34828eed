from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from optkit.common import plug_ins
from optkit.errors import OptkitError
from optkit.measure import Eval
from optkit.recipe.registry import EVALS, PRESETS, STAGES, eval_class, names_of, stage_class, summary
from optkit.stage import Setting, Stage, Transform
from optkit.stages.smoothquant import SmoothQuant
from tests.support.fresh_python import imported_by

ROOT = Path(__file__).parents[2]


class Smooth(Setting):
    """Smooths things.

    At length.
    """

    fields_of_note: ClassVar[int] = 0


class Other(Eval):
    """Has the name of something else."""

    kind: ClassVar[str] = "another"


class Like(SmoothQuant):
    """Inherits from a built-in stage, and with it no name."""


class Bare(Stage):
    """Neither a transform nor a setting."""


@pytest.fixture(autouse=True)
def forget_plug_ins() -> Iterator[None]:
    plug_ins.plugged_in.cache_clear()
    yield
    plug_ins.plugged_in.cache_clear()


def plug_in(
    monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str], group: str = "optkit.stages", name: str = "plugged-in"
) -> None:
    found = [SimpleNamespace(name=kind, value=value, dist=SimpleNamespace(name=name)) for kind, value in points]
    monkeypatch.setattr(plug_ins, "entry_points", lambda *, group: found if group == wanted else [])
    plug_ins.plugged_in.cache_clear()
    wanted = group


def test_listing_imports_nothing() -> None:
    loaded = imported_by("from optkit.recipe.registry import *; names_of('stage'), names_of('eval')")
    assert "optkit.recipe.registry" in loaded
    assert (
        not {"torch", "transformers", "numpy", *(target.partition(":")[0] for target in (STAGES | EVALS).values())}
        & loaded
    )


def test_names_are_sorted() -> None:
    assert names_of("stage") == sorted(STAGES)
    assert names_of("eval") == sorted(EVALS)


@pytest.mark.parametrize("kind", sorted(STAGES))
def test_every_stage_can_be_imported(kind: str) -> None:
    assert issubclass(stage_class(kind), Transform | Setting)
    assert stage_class(kind).kind == kind
    assert stage_class(kind).__name__.lower() == kind.replace("_", "")
    assert summary(stage_class(kind)).endswith((".", "`"))


@pytest.mark.parametrize("kind", sorted(EVALS))
def test_every_eval_can_be_imported(kind: str) -> None:
    assert issubclass(eval_class(kind), Eval)
    assert eval_class(kind).kind == kind
    assert eval_class(kind).metrics
    assert summary(eval_class(kind))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_a_stage(preset: str) -> None:
    ((kind, fields),) = PRESETS[preset].items()
    assert stage_class(kind).model_validate(fields)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(OptkitError, match="there is no stage 'gtpq'. Did you mean 'gptq'?"):
        stage_class("gtpq")
    with pytest.raises(OptkitError, match=f"there is no eval 'xyz'. Known: {', '.join(sorted(EVALS))}."):
        eval_class("xyz")


def test_a_plug_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, ("smooth", f"{__name__}:Smooth"))
    assert "smooth" in names_of("stage")
    assert "smooth" not in names_of("eval")
    assert stage_class("smooth") is Smooth
    assert summary(Smooth) == "Smooths things."


def test_the_name_of_the_entry_point_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, ("smooth", f"{__name__}:Smooth"), ("like", f"{__name__}:Like"))
    assert stage_class("smooth").kind == "smooth"
    assert stage_class("like").kind == "like"
    assert SmoothQuant.kind == "smoothquant"


def test_a_plug_in_cannot_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, ("other", f"{__name__}:Other"), group="optkit.evals")
    with pytest.raises(OptkitError) as caught:
        eval_class("other")
    assert str(caught.value) == (
        f"the eval 'other' ({__name__}:Other of plugged-in) calls itself 'another'. Messages and scorecards"
        ' would use another name than recipes. Set `kind = "other"` in its class, or rename the entry point.'
    )


def test_a_name_taken_twice_is_refused_with_both_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, ("gptq", "elsewhere:Gptq"))
    with pytest.raises(OptkitError) as caught:
        names_of("stage")
    assert str(caught.value) == (
        "the stage 'gptq' is there twice: optkit.stages.gptq:Gptq of optkit and elsewhere:Gptq of plugged-in."
        " A recipe could mean either. Uninstall one of them: pip uninstall plugged-in."
    )


def test_a_preset_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, ("sdpa", "elsewhere:Sdpa"))
    with pytest.raises(OptkitError, match="the stage 'sdpa' of plugged-in has the name of a preset. Rename it there."):
        names_of("stage")


def test_a_plug_in_that_cannot_be_imported_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, ("smooth", "no_such_module:Smooth"), ("rough", f"{__name__}:Rough"))
    assert "smooth" in names_of("stage")
    with pytest.raises(OptkitError) as caught:
        stage_class("smooth")
    assert str(caught.value) == (
        "the stage 'smooth' cannot be imported (no_such_module:Smooth of plugged-in)."
        " ModuleNotFoundError: No module named 'no_such_module'. Reinstall the package plugged-in."
    )
    with pytest.raises(OptkitError, match="AttributeError: module .* has no attribute 'Rough'"):
        stage_class("rough")


def test_a_plug_in_that_is_no_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, ("bare", f"{__name__}:Bare"), ("number", f"{__name__}:ROOT"))
    with pytest.raises(OptkitError, match="the stage 'bare' .* is no Transform or Setting of optkit"):
        stage_class("bare")
    with pytest.raises(OptkitError, match="is no Transform or Setting of optkit"):
        stage_class("number")
    plug_in(monkeypatch, ("bare", f"{__name__}:Bare"), group="optkit.evals")
    with pytest.raises(OptkitError, match="is no Eval of optkit"):
        eval_class("bare")
