import json
import math

import pytest
from ruamel.yaml import YAML

from optkit.recipe.gates import Verdict
from optkit.scorecard import (
    Scorecard,
    build_scorecard,
    footnotes,
    format_ratio,
    format_value,
    protocols,
    read_json,
    table_rows,
    to_json,
    to_markdown,
)
from tests.support import scorecards
from tests.support.scorecards import metric, size

RECIPE = {
    "name": "small",
    "model": {"name": "smollm2-135m"},
    "stages": [{"gptq": {"bits": 4}}],
    "gates": {"perplexity": "<= 1.10x"},
}


def perplexity(losses):
    value = math.exp(sum(losses) / len(losses))
    return scorecards.perplexity(losses, "wikitext2 test, 3 windows", interval=(value - 1, value + 1))


def speed(samples, batch=1):
    value = sum(samples) / len(samples)
    told = {"labels": {"batch": batch, "new_tokens": 64}, "interval": (value - 1, value + 1), "samples": samples}
    told |= {"pairing": "independent", "higher_is_better": True}
    return metric("decode_tokens_per_s", value, "tokens/s", "greedy, 3 repeats", **told)


def divergence(value):
    return metric("kl_divergence", value, "nats/token", "wikitext2 test, 3 windows; KL")


OURS = (
    perplexity((3.1, 3.3, 3.5)),
    divergence(0.05),
    speed((24.0, 25.0, 26.0)),
    speed((90.0, 100.0, 110.0), 8),
    size(1.2e8),
)
THEIRS = (perplexity((3.0, 3.2, 3.41)), speed((19.0, 20.0, 21.0)), speed((95.0, 100.0, 105.0), 8), size(5.38e8))


def card(metrics=OURS, baseline=THEIRS, gates=None, **more) -> Scorecard:
    fields = {"name": "small", "artifact_key": "0123456789abcdef", "recipe": RECIPE} | more
    return build_scorecard(metrics=metrics, baseline=baseline, gates=gates, **fields)


def full_card() -> Scorecard:
    report = {
        "changed": 210,
        "skipped": {"lm_head": "left alone"},
        "details": {},
        "calibrated_on": [{"dataset": "c4", "split": "train"}],
    }
    return card(
        gates={"perplexity": "<= 1.20x", "size_bytes": "<= 0.5x", "decode_tokens_per_s[batch=1]": ">= 1.2x"},
        steps=[{"kind": "gptq", "key": "fedcba9876543210", "cached": True, "seconds": 81.25, "report": report}],
        settings=["compile: off on cpu"],
        notes=["int4: 210 of 210 layers use torch's CPU kernel"],
        baseline_notes=["float32"],
        environment={"device": "cpu", "torch": "2.13.0"},
    )


def accuracy(samples):
    value = sum(samples) / len(samples)
    fields = {"labels": {"task": "arc_easy"}, "higher_is_better": True, "pairing": "paired_mean"}
    return metric("acc", value, "fraction", "100 items", samples=samples, **fields)


def test_the_ratio_of_accuracies_is_paired_by_item():
    theirs = accuracy((1.0,) * 60 + (0.0,) * 40)
    (row,) = card(metrics=(accuracy((1.0,) * 58 + (0.0,) * 42),), baseline=(theirs,)).rows
    assert row.ratio == pytest.approx(58 / 60)
    assert 0.9 < row.ratio_interval[0] < row.ratio < row.ratio_interval[1] < 1.03
    (row,) = card(metrics=(theirs,), baseline=(accuracy((0.0,) * 100),)).rows
    assert row.ratio is None


def test_ratios_are_formed_as_each_metric_says():
    rows = {(row.metric.name, row.metric.labels.get("batch")): row for row in card().rows}
    paired = rows["perplexity", None]
    assert paired.ratio == pytest.approx(math.exp(0.29 / 3))
    assert paired.ratio_interval[1] - paired.ratio_interval[0] < 0.05
    assert rows["decode_tokens_per_s", 1].ratio == pytest.approx(1.25)
    assert rows["decode_tokens_per_s", 1].ratio_interval[0] < 1.25 < rows["decode_tokens_per_s", 1].ratio_interval[1]
    assert rows["size_bytes", None].ratio == pytest.approx(1.2 / 5.38)
    assert rows["size_bytes", None].ratio_interval is None
    assert rows["kl_divergence", None].baseline is None
    assert rows["kl_divergence", None].ratio is None


@pytest.mark.parametrize(
    ("gates", "verdict", "status"),
    [
        ({}, Verdict.PASS, 0),
        ({"perplexity": "<= 1.20x", "size_bytes": "<= 0.5x", "kl_divergence": "< 0.1"}, Verdict.PASS, 0),
        ({"perplexity": "<= 1.20x", "size_bytes": "<= 0.1x"}, Verdict.FAIL, 3),
        ({"size_bytes": "<= 2e8", "decode_tokens_per_s[batch=8]": ">= 1x"}, Verdict.INCONCLUSIVE, 4),
        ({"size_bytes": "<= 2e6", "decode_tokens_per_s[batch=8]": ">= 1x"}, Verdict.FAIL, 3),
        ({"perplexity": "<= 27"}, Verdict.INCONCLUSIVE, 4),
    ],
)
def test_verdict_and_exit_status(gates, verdict, status):
    scorecard = card(gates=gates)
    assert (scorecard.verdict, scorecard.exit_status) == (verdict, status)


def test_a_bare_name_judges_every_row_of_it():
    scorecard = card(gates={"decode_tokens_per_s": "> 30"})
    assert [gate.verdict for row in scorecard.rows for gate in row.gates] == [Verdict.FAIL, Verdict.PASS]
    assert scorecard.exit_status == 3


def test_a_gate_that_nothing_was_measured_for_fails_and_the_scorecard_is_there():
    scorecard = card(gates={"energy_per_token_j": "<= 1", "perplexity": "<= 1.20x"}, environment={"device": "cpu"})
    row = scorecard.rows[-1]
    assert (row.metric.name, row.gates[0].verdict, scorecard.exit_status) == ("energy_per_token_j", Verdict.FAIL, 3)
    assert row.gates[0].why == "no number: energy_per_token_j was not measured on cpu"
    assert table_rows(scorecard)[-1].artifact == "failed"
    (row,) = card(gates={"decode_tokens_per_s[batch=2]": ">= 1"}).rows[-1:]
    assert "was not measured; measured: decode_tokens_per_s[batch=1,new_tokens=64]" in row.gates[0].why
    (row,) = card(metrics=(), gates={"perplexity": "<= 1"}).rows
    assert row.gates[0].verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("measured", "gates", "why"),
    [
        ({}, {"kl_divergence": "<= 1.1x"}, "no ratio: it was not measured on the baseline; set a limit without x"),
        (
            {"metrics": (size(1),), "baseline": (size(2, "some files"),)},
            {"size_bytes": "<= 1x"},
            "no ratio: the protocols differ: 'all files'",
        ),
        (
            {"metrics": (size(1),), "baseline": (size(0),)},
            {"size_bytes": "<= 1x"},
            "no ratio: the baseline's value is 0",
        ),
    ],
)
def test_a_relative_gate_without_a_ratio_fails_and_says_why(measured, gates, why):
    scorecard = card(**measured, gates=gates)
    (result,) = [gate for row in scorecard.rows for gate in row.gates]
    assert result.verdict is Verdict.FAIL
    assert result.why.startswith(why)


def test_numbers_of_another_protocol_are_no_baseline():
    (row,) = card(metrics=(size(1),), baseline=(size(2, "some files"),)).rows
    assert row.baseline is None
    assert row.ratio is None


def test_json_comes_back_as_it_was(tmp_path):
    scorecard = full_card()
    path = tmp_path / "scorecard.json"
    path.write_text(to_json(scorecard), encoding="utf-8")
    assert read_json(path) == scorecard
    record = json.loads(path.read_text())
    assert (record["schema"], record["verdict"], record["exit_status"]) == (1, "INCONCLUSIVE", 4)
    assert record["recipe"] == RECIPE
    assert record["rows"][0]["metric"]["samples"] == [3.1, 3.3, 3.5]
    assert scorecard.model_dump(mode="json") == record
    assert Scorecard.model_validate(record) == scorecard


def test_table_rows():
    rows = table_rows(full_card())
    assert [row.metric for row in rows] == [
        "perplexity",
        "kl_divergence",
        "decode_tokens_per_s, batch 1, new tokens 64",
        "decode_tokens_per_s, batch 8, new tokens 64",
        "size_bytes",
    ]
    assert [row.artifact for row in rows] == [
        "27.11 ± 1.0",
        "0.05000 nats/token",
        "25.00 ± 1.0 tok/s",
        "100.0 ± 1.0 tok/s",
        "120.0 MB",
    ]
    assert [row.baseline for row in rows] == ["24.61 ± 1.0", "-", "20.00 ± 1.0 tok/s", "100.0 ± 1.0 tok/s", "538.0 MB"]
    assert rows[0].ratio.startswith("1.101x [1.0")
    assert [row.change for row in rows] == ["worse", "", "better", "", "better"]
    assert [row.gate for row in rows] == ["<= 1.2x PASS", "-", ">= 1.2x INCONCLUSIVE", "-", "<= 0.5x PASS"]
    assert [row.verdict for row in rows] == [Verdict.PASS, None, Verdict.INCONCLUSIVE, None, Verdict.PASS]
    assert [row.protocol for row in rows] == [1, 2, 3, 3, 4]
    assert protocols(full_card())[2] == "greedy, 3 repeats"


def test_markdown_says_everything():
    text = to_markdown(full_card())
    lines = text.splitlines()
    assert lines[0] == "# small"
    assert lines[2].startswith("**INCONCLUSIVE** · 20")
    assert "| size_bytes [4] | 538.0 MB | 120.0 MB | 0.2230x | <= 0.5x PASS |" in lines
    assert "4. all files" in lines
    assert (
        "| gptq | 81.2 | yes | 210 changed, 1 skipped: lm_head (left alone), calibrated on "
        "c4 train | `fedcba987654` |" in lines
    )
    for line in (
        "- compile: off on cpu",
        "- int4: 210 of 210 layers use torch's CPU kernel",
        "- baseline: float32",
        "- torch: 2.13.0",
    ):
        assert line in lines
    assert YAML(typ="safe").load(text.split("```yaml\n")[1].split("```")[0]) == RECIPE


def test_markdown_of_nothing():
    text = to_markdown(card(metrics=(), baseline=()))
    assert "No gates" in text
    assert "Nothing was measured." in text
    assert "## Steps" not in text


def test_a_pipe_in_a_cell_does_not_break_the_table():
    metric = size(1).model_copy(update={"labels": {"file": "a|b"}})
    assert "| size_bytes, file a\\|b [1] |" in to_markdown(card(metrics=(metric,), baseline=()))


@pytest.mark.parametrize(
    ("value", "unit", "interval", "text"),
    [
        (20.518999, "perplexity", (18.6, 22.4), "20.52 ± 1.9"),
        (538_090_408, "bytes", None, "538.1 MB"),
        (999, "bytes", None, "999.0 B"),
        (4.8e12, "bytes/s", None, "4.800 TB/s"),
        (0.036239, "s", (0.035425, 0.037053), "36.24 ± 0.81 ms"),
        (0.00000271, "s", None, "2.710 µs"),
        (1234.5678, "tokens/s", None, "1,235 tok/s"),
        (0.8450980, "fraction", (0.80293, 0.88727), "84.51 ± 4.2 %"),
        (4.284, "bits", None, "4.284 bits"),
        (0.0, "nats/token", (0.0, 0.0), "0 ± 0 nats/token"),
        (0.8011, "fraction", (0.5449, 1.0), "80.11 [54.5, 100] %"),
        (1.0, "fraction", (0.99, 1.0), "100.0 [99.0, 100] %"),
        (0.1413, "nats/token", (0.0, 0.3379), "0.1413 [0, 0.338] nats/token"),
        (0.00004, "nats/token", None, "4.000e-05 nats/token"),
        (9.99996, "bits", None, "10.00 bits"),
    ],
)
def test_numbers_as_people_read_them(value, unit, interval, text):
    assert format_value(value, unit, interval) == text


def test_ratios_as_people_read_them():
    assert format_ratio(1.1721, (1.15, 1.195)) == "1.172x [1.150, 1.195]"
    assert format_ratio(0.223048) == "0.2230x"
    assert format_ratio(12.3456) == "12.35x"


def test_footnotes_write_out_a_long_beginning_once():
    text = "wikitext2 test, first 15 windows of 2048 tokens"
    assert footnotes(
        [f"{text}; exp of the mean", "all files", f"{text}; KL", "greedy; 2 repeats", "greedy; 3 repeats", text]
    ) == [
        f"{text}; exp of the mean",
        "all files",
        "as [1] up to its first semicolon; KL",
        "greedy; 2 repeats",
        "greedy; 3 repeats",
        text,
    ]
    assert footnotes([text, f"{text}; flips"]) == [text, "as [1]; flips"]


def test_what_could_not_be_measured_fails_its_gates_and_says_why():
    lost = speed((0.0,), 8).model_copy(update={"failure": "memory ran out on cuda", "samples": (), "interval": None})
    gates = {"decode_tokens_per_s[batch=8]": ">= 1.2x", "decode_tokens_per_s": ">= 1"}
    scorecard = card(metrics=(speed((24.0, 25.0, 26.0)), lost), gates=gates)
    assert scorecard.verdict is Verdict.FAIL
    assert scorecard.rows[1].ratio is None
    assert [gate.why for gate in scorecard.rows[1].gates] == ["memory ran out on cuda"] * 2
    row = table_rows(scorecard)[1]
    assert (row.artifact, row.ratio) == ("failed", "-")
    assert row.gate == ">= 1.2x FAIL (memory ran out on cuda), >= 1 FAIL (memory ran out on cuda)"
    assert "| failed | - |" in to_markdown(scorecard)
    json.loads(to_json(scorecard))


def test_a_limit_relative_to_a_baseline_that_could_not_be_measured_stays_open():
    lost = speed((0.0,), 8).model_copy(update={"failure": "memory ran out on cuda", "samples": (), "interval": None})
    scorecard = card(
        metrics=(speed((24.0, 25.0, 26.0), 8),), baseline=(lost,), gates={"decode_tokens_per_s": ">= 1.2x"}
    )
    assert table_rows(scorecard)[0].baseline == "failed"
    assert table_rows(scorecard)[0].gate == ">= 1.2x INCONCLUSIVE (of the baseline, memory ran out on cuda)"
