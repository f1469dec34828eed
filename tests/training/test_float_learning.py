"""`learn: blocks` of `mx` on tiny models: 4-bit floats that learn, as integers do, in the form that they had."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from optkit_cli.progress import LineProgress
from pydantic import ValidationError

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.cast import Cast
from optkit.stages.mx import Mx
from tests.conftest import TinyModel
from tests.support.encoder_decoders import write_pairs
from tests.support.predictions import predicted
from tests.support.running import run_stage


@pytest.fixture(scope="module")
def few(text: Calibration) -> Calibration:
    return text.model_copy(update={"samples": 4})


def quantize(source: Path, target: Path, text: Calibration, steps: int | None = 16, **fields: Any) -> Report:
    learn = {} if steps is None else {"learn": "blocks", "learning_steps": steps, "copies": 0}
    return run_stage(
        Mx(**{**learn, "rounding": "gptq", "batch_size": 2, "calibration": text, **fields}), source, target
    )


@pytest.mark.parametrize(("type", "activations"), [("nvfp4", "dynamic"), ("mxfp4", "none")])
def test_blocks_come_nearer_in_the_same_form(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, type: str, activations: str
) -> None:
    """What is measured is what a session computes, which rounds inputs as it is told."""
    source, fields = tiny_model("qwen2 bfloat16"), {"type": type, "activations": activations}
    report = quantize(source, tmp_path / "learned", few, **fields)
    quantize(source, tmp_path / "gptq", few, None, **fields)
    assert all(after < 0.9 * before for before, after in report.details["block_losses"].values())
    learned, gptq = (Checkpoint(tmp_path / name) for name in ("learned", "gptq"))
    assert learned.tensors == gptq.tensors
    assert learned.config == gptq.config
    tokens = few.tokens(source, None)
    original, ours, theirs = (open_session(place).logits(tokens) for place in (source, *map(tmp_path.joinpath, NAMES)))
    assert (ours - original).square().mean() < 0.9 * (theirs - original).square().mean()
    fixed = "weight_global_scale" if type == "nvfp4" else "layers.0.mlp.down_proj.weight_scale"
    assert all(gptq.read(name).equal(learned.read(name)) for name in gptq.tensors if name.endswith(fixed))
    unlearned = Mx(rounding="gptq", batch_size=2, calibration=few, **fields).predict(Checkpoint(source).shape, "cpu")[0]
    stage = Mx(effort="best", batch_size=2, calibration=few, **fields)
    assert predicted(stage, source, tmp_path / "learned").ram_bytes > unlearned.ram_bytes


NAMES = "learned", "gptq"


def test_an_effort_picks_what_is_not_written(few: Calibration) -> None:
    best, balanced = (Mx(effort=effort, calibration=few).model_dump() for effort in ("best", "balanced"))
    learning = {"learn": "blocks", "learning_steps": 120, "scale_steps": 64, "copies": 3}
    assert best == {**balanced, **learning}
    assert balanced == Mx(rounding="gptq", calibration=few).model_dump()
    assert Mx(type="mxfp4", effort="best", calibration=few).scale_steps == 0
    assert not learning.keys() & balanced.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learn": "blocks"}, "learn: blocks needs a text: add calibration: {dataset: c4}, or take it out"),
        ({"effort": "best"}, "effort needs a text: add calibration: {dataset: c4}, or take it out"),
        ({"copies": 1}, "copies would not be read: take it out, or set learn: blocks"),
        (
            {"type": "mxfp4", "effort": "best", "scale_steps": 8, "calibration": "c4"},
            "scale_steps: those of mxfp4 are powers of two, which no small step changes. Leave it out",
        ),
        (
            {"effort": "best", "devices": 2, "calibration": "c4"},
            "learn, which effort: best picks, has the unmodified model beside it, on one device. Leave out devices, or",
        ),
    ],
)
def test_what_cannot_learn_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Mx.model_validate(fields)
    assert message in str(refused.value)


def test_progress_tells_steps_and_counts_a_block_as_soon_as_it_learned(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration
) -> None:
    lines = io.StringIO()
    fields = {"effort": "best", "learning_steps": 2, "scale_steps": 1, "copies": 1, "batch_size": 2}
    context = Context(progress=LineProgress(lines, interval_s=0, interval_share=0))
    run_stage(Mx(calibration=few, **fields), tiny_model("qwen2 bfloat16"), tmp_path / "learned", context)
    told = [re.sub(r"  (in )?\d+:\d\d.*?(?=  |$)", "", line) for line in lines.getvalue().splitlines()]
    assert [line for line in told if "_proj" not in line] == [
        "mx  0/2 blocks",
        "copies of the text  0/2 blocks",
        "copies of the text  1/2 blocks  50%",
        "copies of the text  2/2 blocks",
        "mx  0/2 blocks  0%  model.layers.0 learns, step 1 of 2",
        "mx  0/2 blocks  0%  model.layers.0 learns, step 2 of 2",
        "mx  1/2 blocks  50%  model.layers.0",
        "mx  1/2 blocks  50%  model.layers.1 learns, step 1 of 2",
        "mx  1/2 blocks  50%  model.layers.1 learns, step 2 of 2",
        "scales  0/1 steps",
        "scales  1/1 steps",
        "mx  2/2 blocks",
    ]


def test_models_that_cannot_learn_are_refused(
    tiny_model: TinyModel, tiny_encoder_decoder: TinyModel, tmp_path: Path, few: Calibration
) -> None:
    bart = tiny_encoder_decoder("BartForConditionalGeneration")
    run_stage(Cast(dtype="bfloat16"), bart, tmp_path / "source" / "bart")
    pairs = few.model_copy(update={"dataset": str(write_pairs(tmp_path / "pairs", False)), "input": "input"})
    translated = pairs.model_copy(update={"field": "target", "samples": 2})
    stage = Mx(type="mxfp4", effort="best", calibration=few)
    refusals = [
        (stage, tiny_model("gpt_oss bfloat16"), "mx.learn: stacked experts are held to their own inputs alone. They "),
        (
            stage.model_copy(update={"calibration": translated}),
            tmp_path / "source" / "bart",
            "mx.learn: blocks of encoder-decoders are not held to those of the unmodified model. ",
        ),
    ]
    for refusing, source, message in refusals:
        with pytest.raises(StageError) as planned:
            refusing.predict(Checkpoint(source).shape, "cpu")
        with pytest.raises(StageError) as run:
            run_stage(refusing, source, tmp_path / source.name)
        assert str(planned.value) == str(run.value)
        assert str(run.value).startswith(message)
