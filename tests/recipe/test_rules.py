"""The rules of recipes, for a model of which a plan knows what it is."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from optkit.measure import Eval
from optkit.model.task import ENCODING, Task
from optkit.recipe.rules import Start, broken_rules
from optkit.source.calibration import Calibration
from optkit.stage import Format, Setting, Transform
from optkit.stages.auto_bits import AutoBits
from optkit.stages.awq_scale import AwqScale
from optkit.stages.cast import Cast
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.mx import Mx
from optkit.stages.onnx import Onnx
from optkit.stages.onnx_quantize import OnnxQuantize
from optkit.stages.rtn import Rtn
from tests.support.recipe_stand_ins import Fuse, Providers, Speed, Threads, Tone, Weigh


@dataclass(frozen=True)
class Entry:
    kind: str
    value: Any


class Alone(Eval):
    """Says what each layer does alone."""

    layers_alone: ClassVar[bool] = True


class Packed(Setting):
    """Knows no adapter."""

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})


class Encoding(Transform):
    """Is for encoders."""

    for_tasks: ClassVar[frozenset[Task]] = ENCODING


def told(*values: Any, **known: Any) -> list[str]:
    entries = [Entry(type(value).__name__.lower(), value) for value in values]
    stages = [entry for entry in entries if not isinstance(entry.value, Eval)]
    evals = [entry for entry in entries if isinstance(entry.value, Eval)]
    found = broken_rules(stages, evals, Start("it", **known), ("cpu",), lambda entry: "")
    return [message for _, message in found]


@pytest.mark.parametrize(
    ("value", "format", "message"),
    [
        (Weigh(), Format.ONNX, "weigh reads the weights of a checkpoint, and it is an ONNX model. Take it out."),
        (Tone(key="major"), Format.ONNX, "the setting tone is applied to a torch model when it is opened, and it is an "
         "ONNX model. Take it out."),
        (Providers(), Format.CHECKPOINT, "the setting providers is applied to an ONNX model when it is opened, and it "
         "is a torch model. Put onnx into the recipe, or take it out."),
        (Alone(), Format.ADAPTED, "alone says what each layer does alone, and the adapter makes up for all of them "
         "together. Take it out."),
        (Packed(), Format.ADAPTED, "the setting packed knows no adapter beside packed weights, and it has one. Take it "
         "out."),
        (Fuse(), Format.CHECKPOINT, "fuse reads an ONNX model and it is a checkpoint with float weights. Put onnx "
         "before it."),
    ],
)  # fmt: skip
def test_a_model_of_a_format_that_does_not_fit(value: Any, format: Format, message: str) -> None:
    assert told(value, format=format) == [message]


@pytest.mark.parametrize("format", [None, *Format])
def test_what_fits_is_not_mentioned(format: Format | None) -> None:
    assert told(Threads(), Speed(), format=format) == []


def test_a_model_for_another_task() -> None:
    (message,) = told(Encoding(), tasks=frozenset({Task.GENERATION}), phrase="a causal language model (Llama)")
    assert message.startswith(
        "encoding is for an encoder of text, and it is a causal language model (Llama). Take it out"
    )
    assert "; there are " in message
    assert ", rtn" in message
    assert "attention" not in message
    assert told(Encoding(), tasks=frozenset({Task.FEATURES})) == []


def test_two_of_a_setting_without_places() -> None:
    said = "the setting tone is given twice. Only one can be in force; remove the other."
    assert told(Tone(key="major"), Tone(key="minor")) == [said]
    assert told(Speed(), Speed(prompt=1), Speed()) == [
        "the eval speed is here twice with the same fields. Remove one of them."
    ]


NVFP4, C4 = {"type": "nvfp4"}, Calibration(dataset="c4")


@pytest.mark.parametrize(
    ("scales", "quantizer", "own", "theirs"),
    [
        ({}, Gptq(bits=3), "bits: 4", "bits: 3"),
        ({"bits": 3, "symmetric": False}, Gptq(bits=3, group_size=None),
         "group_size: 64, symmetric: false", "group_size: null, symmetric: true"),
        ({}, Rtn(), "rounding: gptq", "rounding: nearest"),
        ({}, Mx(rounding="gptq", calibration=C4), "type: int", "type: nvfp4"),
        (NVFP4, Gptq(), "type: nvfp4", "type: int"),
        (NVFP4, Mx(type="mxfp4"), "type: nvfp4, rounding: gptq", "type: mxfp4, rounding: nearest"),
        (NVFP4, Mx(effort="best", activations="dynamic", calibration=C4), "activations: none", "activations: dynamic"),
        ({}, Fp8(), "type: int", "type: fp8"),
        ({"bits": 3, "symmetric": False, "rounding": "nearest"}, OnnxQuantize(block_size=64), "bits: 3", "bits: 4"),
        (NVFP4, AutoBits(average_bits=4.5), "type: nvfp4", "type: int"),
    ],
)  # fmt: skip
def test_scales_for_another_grid_than_that_of_the_quantizer(
    scales: Any, quantizer: Transform, own: str, theirs: str
) -> None:
    between = Onnx() if isinstance(quantizer, OnnxQuantize) else Cast(dtype="bfloat16")
    (message,) = told(AwqScale(**scales), between, quantizer)
    kind = type(quantizer).__name__.lower()
    assert message == (
        f"awqscale prepares weights for {own}, and {kind} has {theirs}. Each grid needs other scales. Let both say "
        "the same, or take awqscale out."
    )


def test_scales_for_the_grid_of_the_quantizer() -> None:
    floats = {"type": "mxfp4", "activations": "dynamic"}
    for scales, behind in (
        ({}, [Gptq(), Gptq(bits=3)]),
        ({"bits": 3, "group_size": None, "rounding": "nearest"}, [Rtn(bits=3, group_size=None)]),
        (floats, [Mx(effort="best", calibration=C4, **floats)]),
        ({}, [AutoBits(average_bits=4.5)]),
        ({}, []),
    ):
        messages = told(AwqScale(**scales), *behind)
        assert not any("prepares" in message for message in messages)
