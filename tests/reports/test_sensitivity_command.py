"""`optkit sensitivity`: from the command line to the table, the files and the picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from optkit_cli.main import main

from optkit import pipeline
from optkit.errors import UsageError
from optkit.recipe.recipe import load_recipe
from optkit.reports.sensitivity import LayerRow, SensitivityReport, measured, parse_choices, to_markdown, to_svg
from optkit.reports.sensitivity.report import order_layers
from optkit.source.calibration import Calibration
from optkit.stages.auto_bits import AutoBits
from optkit.stages.dequantize import Dequantize
from optkit.store.store import Store
from tests.conftest import TinyModel
from tests.support.packed_models import fp8, rewritten
from tests.support.running import run_stage

SVG = "{http://www.w3.org/2000/svg}"


def report(blocks: int = 3) -> SensitivityReport:
    rows = [
        LayerRow(
            name=f"model.layers.{block}.{kind}",
            kind=kind,
            block=block,
            weights=4096,
            divergence=(base * (block + 1), base * base, 0.0),
        )
        for block in range(blocks)
        for kind, base in (("mlp.down_proj", 0.01), ("self_attn.q_proj", 0.001))
    ]
    return SensitivityReport(
        model="a & b",
        rounding="gptq",
        protocol="a text",
        choices=("3g64", "4g64", "8g64"),
        labels=("3 bits, groups of 64", "4 bits, groups of 64", "8 bits, groups of 64"),
        bits_per_weight=(3.25, 4.25, 8.25),
        layers=order_layers(rows),
        skipped={"lm_head": "outside the decoder blocks"},
    )


def test_the_command_measures_prints_and_writes(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "sensitivity",
        str(tiny_model("llama")),
        "--samples",
        "3",
        "--sequence-length",
        "32",
        "--choices",
        "4g32,3g64a",
    ]
    words += ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*words, "--quiet"]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    assert len(written["layers"]) == 21
    assert written["choices"] == ["4g32", "3g64a"]
    worst = [row["name"] for row in sorted(written["layers"], key=lambda row: -row["divergence"][0])]
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("model.layers.")] == worst[:20]
    assert "3 bits, groups of 64, asymmetric" in printed
    assert worst[0] in (tmp_path / "out" / "sensitivity.md").read_text()
    assert ElementTree.parse(tmp_path / "out" / "sensitivity.svg").getroot().tag == f"{SVG}svg"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written


def test_the_model_stays_in_the_store_meanwhile(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = str(tiny_model("llama")), Store(tmp_path / "store")
    key = (
        pipeline.plan(load_recipe({"model": model, "evals": ["footprint"]}), device="cpu", store=store.root)
        .steps[0]
        .key
    )
    held = []

    def note(*_: object) -> SensitivityReport:
        with store.idle(key) as idle:
            held.append(not idle)
        return report()

    monkeypatch.setattr(measured, "_measure", note)
    measured.measure_model(
        model, calibration=Calibration(dataset="c4"), choices=parse_choices("4"), device="cpu", store=store.root
    )
    assert held == [True]


def test_a_packed_model_is_measured_as_the_floats_that_it_stands_for(
    tiny_model: TinyModel, letters: Path, tmp_path: Path
) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    source = rewritten(tiny_model("llama"), tmp_path / "fp8", fp8, **config)
    run_stage(Dequantize(), source, tmp_path / "floats")
    text = Calibration(dataset=str(letters), samples=2, sequence_length=32)
    options = {"calibration": text, "choices": parse_choices("4g32"), "device": "cpu", "store": tmp_path / "store"}
    ours, floats = (measured.measure_model(str(each), **options) for each in (source, tmp_path / "floats"))
    assert ours.layers == floats.layers


def test_sums_are_over_the_layers() -> None:
    made = report()
    assert made.totals == pytest.approx((0.066, 3 * (1e-4 + 1e-6), 0))
    assert list(made.by_kind()) == ["mlp.down_proj", "self_attn.q_proj"]
    assert made.by_kind()["mlp.down_proj"] == pytest.approx((0.06, 3e-4, 0))


def test_the_page_holds_every_layer_and_what_was_not_measured() -> None:
    page = to_markdown(report())
    assert all(f"| {row.name} |" in page for row in report().layers)
    assert "- lm_head: outside the decoder blocks" in page
    assert "| sum | 0.066 | 0.000303 | 0 |" in page


def test_the_picture_has_a_point_for_each_layer_that_suffers() -> None:
    root = ElementTree.fromstring(to_svg(report()))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == 12
    assert "model.layers.2.mlp.down_proj: 0.03" in titles
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"mlp.down_proj", "decoder block", "1e-2"} <= set(words)
    assert words[0] is not None
    assert words[0].startswith("a & b:")
    assert max(float(circle.get("cy", 0)) for circle in root.iter(f"{SVG}circle")) < float(root.get("height", 0))


def test_forms_are_read_as_they_are_written_and_as_recipes_say_them() -> None:
    words = "4, 3g32a,8g128,{bits: 4, group_size: 32},{bits: 8, group_size: null}"
    read = parse_choices(words)
    assert [choice.word for choice in read] == ["4g64", "3g32a", "8g128", "4g32", "8g-1"]
    listed = [
        {"bits": 4},
        {"bits": 3, "group_size": 32, "symmetric": False},
        "8g128",
        "4g32",
        {"bits": 8, "group_size": -1},
    ]
    recipe = load_recipe({"model": "m", "stages": [{"auto_bits": {"average_bits": 5, "choices": listed}}]})
    stage = recipe.transforms[0].value
    assert isinstance(stage, AutoBits)
    assert stage.choices == read
    assert parse_choices(",".join(choice.word for choice in read)) == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "4g64,7",
            "--choices: choices.1: '7' is no form of a layer. A form is 2 to 6 or 8 bits, g and a group size, "
            "and a for zero points. A group has at least 8 weights, and 64 if nothing is said. Write it as 4g64, 3g32a "
            "or {bits: 3, group_size: 32}.",
        ),
        ("4g4", "--choices: choices.0: '4g4' is no form of a layer."),
        ("4.5", "--choices: choices.0: '4.5' is no form of a layer."),
        ("{bits: 4, group: 32}", "--choices: unknown field 'choices.0.group'. Did you mean 'group_size'?"),
        (
            "4,4g64",
            '--choices: choices: {"bits": 4, "group_size": 64, "symmetric": true} is here twice. Write it once.',
        ),
        ("[", "--choices: '[' is no list of forms. Write it as 4g64,3g32a,8."),
    ],
)
def test_words_that_are_no_form_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_choices(text)
    assert str(caught.value).startswith(message)


def test_a_group_size_that_fits_no_layer_is_refused(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["sensitivity", str(tiny_model("llama")), "--choices", "4g48", "--store", str(tmp_path), "--device", "cpu"]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert "--choices: no layer can have all of the choices" in said
    assert "4 bits, groups of 48 does not fit its" in said
