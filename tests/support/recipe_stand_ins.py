"""Stages and evals that stand in for the real ones in tests of recipes, so that these say nothing
of any real field.
"""

from pathlib import Path
from typing import ClassVar, Literal, Self

import pytest
from pydantic import Field

from optkit.common.frozen import Frozen
from optkit.errors import OptkitError, RecipeError
from optkit.measure import Eval
from optkit.recipe import registry
from optkit.recipe.recipe import load_recipe
from optkit.source.calibration import Calibration
from optkit.source.texts import TextSource
from optkit.stage import Format, Setting, Transform


class Pruned(Frozen):
    pattern: str
    revision: str | None = None

    def pinned(self, data: Path | None) -> Self:
        return self.model_copy(update={"revision": f"pinned in {data}"})


class Shrink(Transform):
    """Makes weights small."""

    produces: ClassVar[Format] = Format.QUANTIZED

    bits: Literal[2, 3, 4, 8] = 4
    """Bits of a weight."""
    group_size: int | Literal["channel"] = 64
    damping: float = Field(default=0.01, gt=0, le=1)
    symmetric: bool = True
    include: tuple[str, ...] = ()
    prune: tuple[Pruned, ...] = ()
    calibration: Calibration = Calibration(dataset="python-reference")


class Halve(Transform):
    """Makes weights half."""

    by: int = 2

    def model_post_init(self, context: object) -> None:
        if self.by == 13:
            raise OptkitError("thirteen is not allowed", where="halve")


class Export(Transform):
    """Makes an ONNX model."""

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})
    produces: ClassVar[Format] = Format.ONNX


class Fuse(Transform):
    """Changes an ONNX model."""

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})
    produces: ClassVar[Format] = Format.ONNX


class Threads(Setting):
    """Means something to ONNX Runtime."""

    accepts: ClassVar[frozenset[Format]] = frozenset(Format)


class Providers(Setting):
    """Means nothing to torch."""

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})


class Weigh(Eval):
    """Reads weights."""

    reads_weights: ClassVar[bool] = True


class Tone(Setting):
    """Sets a tone."""

    shorthand: ClassVar[str] = "key"

    key: Literal["major", "minor"]
    loud: bool = False


class Score(TextSource, Eval):
    """Scores a text."""

    metrics: ClassVar[dict[str, str]] = {"score": ""}

    window: int = 16


class Speed(Eval):
    """Times."""

    metrics: ClassVar[dict[str, str]] = {"tokens_per_s": ""}

    batch_sizes: tuple[int, ...] = (1,)
    prompt: int = 128

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        return tuple({"batch": batch, "prompt": self.prompt} for batch in self.batch_sizes)


def register_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recipes know the stand-ins and no real stage, eval or preset."""
    for known, classes in ((registry.STAGES, (Shrink, Halve, Tone)), (registry.EVALS, (Score, Speed))):
        for kind in list(known):
            monkeypatch.delitem(known, kind)
        for each in classes:
            monkeypatch.setitem(known, each.__name__.lower(), f"{__name__}:{each.__name__}")
    for kind in list(registry.PRESETS):
        monkeypatch.delitem(registry.PRESETS, kind)
    monkeypatch.setitem(registry.PRESETS, "major", {"tone": {"key": "major"}})


def register_onnx_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recipes know, beside the stand-ins, those that have to do with ONNX; as `onnx` the
    export, whatever has that name.
    """
    stages = {"onnx": Export, "fuse": Fuse, "threads": Threads, "providers": Providers}
    for known, classes in ((registry.STAGES, stages), (registry.EVALS, {"weigh": Weigh})):
        for kind, each in classes.items():
            monkeypatch.setitem(known, kind, f"{__name__}:{each.__name__}")


GOOD = """\
model: smollm2-135m
stages:
  - shrink: {bits: 8, damping: 1e-5, calibration: {dataset: python-reference, samples: 4}}
  - tone: minor
evals:
  - score: {dataset: python-reference, split: test}
  - speed
gates:
  score: "<= 1.10x"
"""


def problems_of(text: str | dict[str, object], overrides: tuple[str, ...] = (), model: str | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(text, overrides, model)
    return [str(problem) for problem in caught.value.problems]


def one_problem(text: str, *overrides: str) -> str:
    (problem,) = problems_of(text, overrides)
    return problem
