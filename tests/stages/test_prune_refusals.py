"""What the stage `prune` refuses, before it runs or while it does."""

from pathlib import Path
from typing import Any

import pytest

from optkit.algorithms.sparsity_pattern import Pattern
from optkit.errors import ResourceError, SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Layer
from optkit.recipe.field_faults import validate
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.prune import Prune
from optkit.stages.pruning import blocks as block_pruner
from optkit.stages.pruning.fitting import refuse_unfit
from tests.conftest import TinyModel
from tests.support.changes import changed_copy, replacing
from tests.support.pruning import prune


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sparsity": 1.0}, "sparsity 1 leaves no weight: it is the share that becomes 0, such as 0.5"),
        ({"sparsity": 50}, "sparsity 50 leaves no weight"),
        ({"sparsity": 0}, "sparsity: 0 is not greater than 0"),
        (
            {"sparsity": 0.6, "pattern": "2:4"},
            "sparsity 0.6 contradicts pattern 2:4, which makes 0.5 of the weights 0: leave sparsity out",
        ),
        (
            {"pattern": "2:4", "allocation": "owl"},
            "pattern 2:4 gives every layer the same sparsity: set allocation: uniform, or pattern:",
        ),
        ({"pattern": "3:4"}, "pattern: '3:4' is not one of 'unstructured', '2:4', '4:8'"),
        ({"method": "wanda", "damping": 0.1}, "damping would not be read: take it out, or set method: sparsegpt"),
        ({"method": "wanda", "refinements": 3}, "refinements would not be read"),
        ({"method": "magnitude", "equal_tokens": True}, "equal_tokens would not be read"),
        (
            {"method": "magnitude", "calibration": "c4"},
            "calibration would not be read: take it out, or set method: wanda or sparsegpt",
        ),
        (
            {"allocation_spread": 0.1},
            "allocation_spread would not be read: take it out, or set allocation: owl or sensitivity",
        ),
        (
            {"allocation": "sensitivity", "outlier_threshold": 3},
            "outlier_threshold would not be read: take it out, or set allocation: owl",
        ),
        ({"allocation": "owl", "sensitivity_samples": 3}, "sensitivity_samples would not be read"),
        (
            {"allocation": "owl", "sparsity": 0.95},
            "layers of 0.87 to 1.03 zeros: set allocation_spread below 0.05 for sparsity 0.95",
        ),
        (
            {"allocation": "owl", "sparsity": 0.05},
            "layers of -0.03 to 0.13 zeros: set allocation_spread below 0.05 for sparsity 0.05",
        ),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused(fields: dict[str, Any], message: str) -> None:
    faults = validate(Prune, fields)
    assert isinstance(faults, list)
    assert [message in fault.message for fault in faults] == [True]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"include": ("*.up",)}, "prune.include: `*.up` matches none of 21 layers"),
        (
            "llama",
            {"exclude": ("*_proj",)},
            "prune: no layer is left of 21 in the decoder blocks. Widen `include` or narrow `exclude`",
        ),
        ("llama", {"include": ("lm_head",)}, "prune.include: `lm_head`"),
        (
            "llama",
            {"sparsity": 0.995},
            "a sparsity of 0.995 leaves none of the 64 weights of an output. Lower prune.sparsity, "
            "or exclude the layer",
        ),
        ("llama", {"sparsity": 0.002}, "weights of an output. Raise prune.sparsity, or exclude the layer"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_it_runs(
    tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    stage = Prune(method="magnitude", **fields)
    with pytest.raises(StageError) as planned:
        stage.predict(Checkpoint(tiny_model(kind)).shape, "cpu")
    with pytest.raises(StageError) as ran:
        stage.run(tiny_model(kind), tmp_path, Context())
    assert message in str(planned.value)
    assert message in str(ran.value)


def test_a_pattern_that_does_not_divide_the_inputs_is_refused() -> None:
    layers = {"a": Layer("a", 8, 12, transposed=False), "b": Layer("b", 8, 10, transposed=False)}
    refuse_unfit(layers, None, 0.5, 0.5, "prune")
    with pytest.raises(StageError) as error:
        refuse_unfit(layers, Pattern(4, 8), 0.5, 0.5, "prune")
    assert str(error.value) == (
        "a: 12 inputs are not a multiple of 8, nor are those of 1 other layers. The pattern 4:8 is of 8 "
        "neighbouring inputs. Exclude the layer, or set prune.pattern: unstructured."
    )


def test_weights_that_are_nan_are_refused(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    broken = changed_copy(tiny_model("llama"), tmp_path, replacing("model.layers.1.mlp.up_proj.weight", float("nan")))
    for fields in ({"method": "magnitude"}, {"method": "wanda", "calibration": text}):
        with pytest.raises(
            SourceError, match="model.layers.1.mlp.up_proj.weight: 8,192 of 8,192 weights are NaN or Inf"
        ):
            prune(broken, tmp_path / f"{fields['method']}", **fields)


def test_full_memory_says_what_to_lower(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(block_pruner, "sparsegpt", full)
    with pytest.raises(
        ResourceError,
        match=r"model.layers.0: the main memory is full.*Lower prune.batch_size, prune.calibration.samples or "
        r"prune.calibration.sequence_length: `optkit plan` says what that gains",
    ):
        prune(tiny_model("llama"), tmp_path / "pruned", calibration=text)
