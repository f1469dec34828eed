"""Stage `auto_bits` on tiny models: budgets that are kept, choices that are offered, and what it
says if it cannot work.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import kl_div

from optkit.algorithms import column_kernels
from optkit.errors import SourceError, StageError
from optkit.kernels.cpu.native import why_not_native
from optkit.kernels.open_packed import load_packed
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import layers_of
from optkit.model.skeleton import Skeleton
from optkit.progress import SilentProgress
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages import gptq
from optkit.stages.auto_bits import AutoBits
from optkit.stages.quantizing import hessians
from optkit.stages.rtn import Rtn
from optkit.stages.sensitivity.budget import Choice, make_items
from optkit.stages.sensitivity.held_out import mean_divergences
from tests.conftest import TinyModel, Warnings
from tests.support.running import run_stage

SMALL, MIDDLE, LARGE = (Choice(bits=bits, group_size=32) for bits in (3, 4, 8))  # type: ignore[arg-type]


@pytest.fixture
def text(letters: Path) -> Calibration:
    return Calibration(dataset=str(letters), samples=12, sequence_length=64)


def quantize(source: Path, target: Path, context: Context | None = None, **fields: Any) -> Report:
    return run_stage(AutoBits(**fields), source, target, context)


def test_the_budget_is_kept_and_the_choice_is_better_than_any_single_one(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    report = quantize(tiny_model("llama"), tmp_path / "out", average_bits=6, calibration=text, held_out_samples=4)
    assert report.details["quantized_bits_per_weight"] <= 6
    predicted = report.details["predicted_divergence"]
    assert predicted["uniform"]
    assert all(predicted["chosen"] <= nats for nats in predicted["uniform"].values())
    assert sum(report.details["formats"].values()) == len(report.details["choices"]) == report.changed
    assert report.calibrated_on == (text.identity(),)
    compared = dict(report.details["held_out_divergence"])
    assert compared.pop("tokens") == 4 * 64
    assert len(compared) == 2
    assert compared[report.details["kept"]] == min(compared.values())


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_the_whole_model_fits_the_bytes_and_joined_layers_have_one_form(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, method: str
) -> None:
    source = tiny_model("qwen2")
    shape = Checkpoint(source).shape
    smallest = sum(min(item.sizes) for item in make_items(layers_of(shape), shape, (SMALL, LARGE), True, "auto_bits"))
    largest = sum(max(item.sizes) for item in make_items(layers_of(shape), shape, (SMALL, LARGE), True, "auto_bits"))
    other = shape.size_bytes - sum(shape.tensors[f"{name}.weight"].size_bytes for name in layers_of(shape))
    limit = other + (smallest + largest) // 2
    fields = {
        "size_bytes": limit,
        "choices": (SMALL, LARGE),
        "calibration": text,
        "method": method,
        "held_out_samples": 0,
    }
    report = quantize(source, tmp_path / "out", **fields)
    assert limit - largest // 4 < Checkpoint(tmp_path / "out").shape.size_bytes <= limit
    assert len(set(report.details["choices"].values())) == 2
    for index in range(2):
        form = {
            name.rpartition(".")[2]: label
            for name, label in report.details["choices"].items()
            if f"layers.{index}." in name
        }
        assert form["q_proj"] == form["k_proj"] == form["v_proj"]
        assert form["gate_proj"] == form["up_proj"]
    assert "held_out_divergence" not in report.details
    assert report.details["not_offered"] == {}


def test_the_chosen_forms_learn(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptq.Gptq, "_usual_steps", {"learning_steps": 16, "scale_steps": 16, "copies": 1})
    fields = {"average_bits": 5.0, "choices": (SMALL, LARGE), "calibration": text, "held_out_samples": 0}
    report = quantize(tiny_model("llama"), tmp_path / "out", effort="best", **fields)
    assert set(report.details["formats"]) == {SMALL.form.label, LARGE.form.label}
    before, after = map(sum, zip(*report.details["block_losses"].values(), strict=True))
    assert after < before
    assert report.details["divergence"][1] < report.details["divergence"][0]


def test_the_first_costs_of_a_process_are_those_of_all_later_ones(
    tiny_model: TinyModel, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama")
    stage = AutoBits(average_bits=5, choices=(SMALL, LARGE), calibration=text)

    def costs() -> list[list[float]]:
        items = stage._problem(Checkpoint(source).shape).items
        return stage._costs(source, items, text.tokens(source, None), Context())

    why_not_native()
    expected, kernels = costs(), column_kernels._compiled
    monkeypatch.setattr(column_kernels, "_compiled", None)
    monkeypatch.setattr(hessians, "why_not_native", lambda: column_kernels.use_compiled(kernels))
    assert costs() == expected


def test_the_choice_is_the_best_of_all_that_fit(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    source = tiny_model("qwen2")
    fields = {
        "calibration": text,
        "choices": (SMALL, MIDDLE, LARGE),
        "method": "rtn",
        "held_out_samples": 0,
        "sensitivity_samples": 4,
    }
    stage = AutoBits(average_bits=5.5, include=("model.layers.0.*",), **fields)
    report = run_stage(stage, source, tmp_path / "out")
    problem = stage._problem(Checkpoint(source).shape)
    costs = stage._costs(source, problem.items, text.tokens(source, None)[::3][:4], Context())
    best = min(
        sum(row[index] for row, index in zip(costs, options, strict=True))
        for options in itertools.product(range(3), repeat=len(problem.items))
        if 8 * sum(item.sizes[index] for item, index in zip(problem.items, options, strict=True))
        <= 5.5 * sum(item.weights for item in problem.items)
    )
    assert report.details["predicted_divergence"]["chosen"] == pytest.approx(best)


def test_experts_have_one_form_without_zero_points(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    asymmetric = Choice(bits=8, group_size=32, symmetric=False)
    report = quantize(
        tiny_model("mixtral"),
        tmp_path / "out",
        average_bits=6,
        choices=(SMALL, LARGE, asymmetric),
        calibration=text,
        fused=False,
        held_out_samples=0,
    )
    forms = {label for name, label in report.details["choices"].items() if ".experts." in name}
    assert len(forms) == 1
    assert "asymmetric" not in forms.pop()
    assert report.details["not_offered"] == {"8 bits, groups of 32, asymmetric": 2 * 4 * 3}


def test_held_out_divergence_is_that_of_the_opened_models(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, tokens = tiny_model("llama"), torch.randint(0, 500, (5, 40), generator=torch.Generator().manual_seed(1))
    copies = []
    for bits in (3, 4):
        run_stage(Rtn(bits=bits), source, tmp_path / str(bits))
        copies.append(Checkpoint(tmp_path / str(bits)))
    found = mean_divergences(Skeleton(Checkpoint(source)), copies, tokens, "cpu", SilentProgress())
    skeleton = Skeleton(Checkpoint(source))
    skeleton.load_("", "cpu")
    with torch.no_grad():
        before = skeleton.model(tokens).logits.log_softmax(-1)
        for copy, divergence in zip(copies, found, strict=True):
            model, _ = load_packed(copy, quantized_layers(copy) or {}, "cpu", torch.float32, SilentProgress())
            after = model(tokens).logits.log_softmax(-1)
            assert divergence == pytest.approx(
                float(kl_div(after, before, log_target=True, reduction="none").sum(-1).mean()), rel=1e-3
            )


def test_what_held_out_text_says_is_told(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.stages.sensitivity.held_out.mean_divergences", lambda *_: [0.1, 0.2])
    said: list[str] = []
    monkeypatch.setattr(SilentProgress, "say", lambda _, text: said.append(text))
    fields = {"average_bits": 6, "choices": (SMALL, MIDDLE, LARGE), "calibration": text, "method": "rtn"}
    report = quantize(tiny_model("qwen2"), tmp_path / "out", **fields)
    counts = Counter(report.details["choices"].values()).most_common()
    assert said[0] == f"auto_bits: {'; '.join(f'{count} to {label}' for label, count in counts)}"
    assert said[-1] == (
        "auto_bits: the choice is kept: on held-out text it diverges by 0.1 nats, 4 bits, groups of 32 "
        "throughout by 0.2"
    )


def test_a_single_form_is_kept_where_it_diverges_less(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.stages.sensitivity.held_out.mean_divergences", lambda *_: [0.2, 0.1])
    progress = Warnings()
    fields = {"average_bits": 6, "choices": (SMALL, MIDDLE, LARGE), "calibration": text, "method": "rtn"}
    report = quantize(tiny_model("qwen2"), tmp_path / "out", Context(progress=progress), **fields)
    assert report.details["kept"] == "4 bits, groups of 32"
    assert report.details["formats"] == {"4 bits, groups of 32": report.changed}
    groups = (Checkpoint(tmp_path / "out").quantization or {})["config_groups"]
    assert [group["weights"]["num_bits"] for group in groups.values()] == [4]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    assert progress.lines == [
        "auto_bits: 4 bits, groups of 32 throughout is kept: on held-out text it diverges by "
        "0.1 nats, the choice by 0.2"
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"average_bits": 3.2},
            "auto_bits: average_bits 3.2: the smallest choices take 4.0244 bits a weight."
            " Set average_bits to 4.0244 or more, or add smaller choices.",
        ),
        ({"size_bytes": 1000}, "auto_bits: size_bytes 1,000: the smallest choices take "),
        (
            {"decode_ms": 1e-6, "decode_device": "h200"},
            "auto_bits: decode_ms 1e-06 on NVIDIA H200 SXM: the smallest choices take 0.0001 ms, ",
        ),
        (
            {"average_bits": 10},
            "auto_bits: average_bits 10: the largest choices take 9.0244 bits a weight, which fits. "
            "Nothing is left to choose. Set average_bits below 9.0244, add larger choices, or take gptq with the "
            "largest one.",
        ),
        (
            {"average_bits": 9, "choices": (Choice(bits=4, group_size=48),)},
            "model.layers.0.mlp.down_proj: no choice fits its 128 columns. The group size must divide "
            "the columns, and experts must be symmetric. Add one to auto_bits.choices, or exclude the layer.",
        ),
        ({"average_bits": 9, "exclude": ("*.upproj",)}, "auto_bits.exclude: `*.upproj` matches none"),
    ],
)
def test_it_says_what_is_wrong_before_anything_runs(
    tiny_model: TinyModel, fields: dict[str, Any], message: str
) -> None:
    stage = AutoBits(**{"choices": (SMALL, LARGE), **fields})
    with pytest.raises(StageError) as caught:
        stage.predict(Checkpoint(tiny_model("llama")).shape, "cpu")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing limits the size: give average_bits, size_bytes or decode_ms"),
        ({"decode_ms": 2.0}, "decode_ms and decode_device belong together: give both, or neither"),
        ({"average_bits": 4.5, "decode_device": "h200"}, "decode_ms and decode_device belong together"),
        ({"decode_ms": 2.0, "decode_device": "h20"}, "decode_device 'h20' is none of b200, h200, .* Take one of them"),
        ({"average_bits": 4.5, "effort": "best", "method": "rtn"}, "effort: best is of gptq, and rtn rounds here"),
        ({"average_bits": 4.5, "effort": "balanced", "devices": 2}, "effort: balanced holds the unmodified model too"),
    ],
)
def test_limits_that_say_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AutoBits(**fields)


def test_the_tightest_of_several_limits_decides(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    choices = {"choices": (SMALL, LARGE)}

    def budget(**limits: Any) -> int:
        return AutoBits(**choices, **limits)._problem(shape).budget.size_bytes

    bits, size = {"average_bits": 6.0}, {"size_bytes": shape.size_bytes - 350_000}
    read = shape.size_bytes
    if "lm_head.weight" in shape.tensors:
        read -= shape.tensors["model.embed_tokens.weight"].size_bytes
    time = {"decode_ms": (read - 360_000) / 4.8e12 * 1000, "decode_device": "h200"}
    alone = [budget(**each) for each in (bits, size, time)]
    assert len(set(alone)) == 3
    assert alone[1] - alone[2] == pytest.approx(10_000, abs=2)
    assert budget(**bits, **size, **time) == min(alone)
    assert budget(**bits, **size) == min(alone[:2])
    assert set(AutoBits(**bits).model_dump()) & {"decode_ms", "decode_device"} == set()


def test_the_time_of_experts_is_refused(tiny_model: TinyModel) -> None:
    stage = AutoBits(decode_ms=1.0, decode_device="h200")
    with pytest.raises(StageError) as caught:
        stage.predict(Checkpoint(tiny_model("mixtral")).shape, "cpu")
    assert str(caught.value) == (
        "auto_bits.decode_ms: the model has experts. A token reads some of them alone, so bytes do not tell its "
        "time. Give average_bits or size_bytes."
    )


def test_no_choice_is_there_twice() -> None:
    with pytest.raises(ValidationError, match="is here twice"):
        AutoBits(average_bits=4, choices=(SMALL, SMALL))


def test_a_text_without_windows_to_hold_out_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abcdefgh " * 400, encoding="utf-8")
    short = Calibration(dataset=str(tmp_path / "short.txt"), samples=4, sequence_length=63)
    with pytest.raises((StageError, SourceError), match="held_out_samples: 0|Lower `samples`"):
        quantize(
            tiny_model("llama"),
            tmp_path / "out",
            average_bits=6,
            choices=(SMALL, LARGE),
            calibration=short,
            method="rtn",
        )


def test_the_model_to_compare_with_keeps_its_blocks_too(tiny_model: TinyModel, text: Calibration) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    kept = [
        AutoBits(average_bits=6, calibration=text, held_out_samples=samples).predict(shape, "cpu")[0].kept_bytes
        for samples in (0, 2)
    ]
    assert kept[1] == 2 * kept[0] > 0


def test_windows_that_the_text_does_not_have_need_no_memory(tiny_model: TinyModel, text: Calibration) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    for device in ("cpu", "cuda"):
        all_there, too_many = (
            AutoBits(average_bits=6, calibration=text, sensitivity_samples=samples).predict(shape, device)[0]
            for samples in (text.samples, 1000)
        )
        assert all_there == too_many


def test_what_is_predicted_is_near_what_is_left(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    source = tiny_model("llama")
    stage = AutoBits(average_bits=6, choices=(SMALL, MIDDLE, LARGE), calibration=text, method="rtn")
    cost, left = stage.predict(Checkpoint(source).shape, "cpu")
    run_stage(stage, source, tmp_path / "out")
    written = Checkpoint(tmp_path / "out").shape.size_bytes
    assert abs(left.size_bytes - written) < 0.2 * written
    assert cost.disk_bytes >= written
    assert cost.ram_bytes > 0
