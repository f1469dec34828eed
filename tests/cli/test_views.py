"""Tables: what is in them, that they fit 100 and 80 columns, and that colour stays on terminals."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optkit_cli.output import plain_text
from optkit_cli.scorecard_view import short_scorecard, whole_scorecard
from optkit_cli.tables import definition_list, plain_table, size_text
from rich.console import Console
from rich.text import Text

from optkit.measure import Metric
from optkit.scorecard import Scorecard, StepLine, build_scorecard, first_rows
from tests.support.scorecards import metric

WINDOWS = "python-reference test, joined, 15 windows of 1024 tokens, no BOS, revision sha256:ab12cd34"
TIMING = (
    "batch {batch}, prompt of 128 random tokens, 64 new tokens, 2 warm-up runs, 5 repeats, "
    "perf_counter, device synchronised"
)


LATER = -1, -2, 1, 0, 2


def perplexity(value: float, shift: float) -> Metric:
    losses = tuple(3.0 + 0.01 * index + shift + 0.001 * (index % 3) * shift for index in range(15))
    interval = (value * 0.9, value * 1.1)
    return metric("perplexity", value, "perplexity", WINDOWS, samples=losses, pairing="paired_log", interval=interval)


def decode(value: float, batch: int, shifts: tuple[int, ...] = (-2, -1, 0, 1, 2)) -> Metric:
    rates = tuple(value * (1 + 0.01 * shift) for shift in shifts)
    labels: dict[str, int | str] = {"batch": batch, "prompt": 128, "new_tokens": 64}
    protocol = TIMING.format(batch=batch)
    told = {"higher_is_better": True, "labels": labels, "samples": rates, "pairing": "paired_turns"}
    return metric("decode_tokens_per_s", value, "tokens/s", protocol, **told)


def card(name: str = "llama_int4", decode_gate: str = ">= 1.75x", gated: bool = True) -> Scorecard:
    gates = {"perplexity": "<= 1.40x", "size_bytes": "<= 0.2x", "decode_tokens_per_s[batch=1]": decode_gate}
    size = "all files of the directory"
    return build_scorecard(
        name=name,
        artifact_key="ab" * 32,
        recipe={"model": {"name": "smollm2-135m"}},
        metrics=[
            perplexity(23.41, 0.14),
            decode(54.9, 1),
            metric("kl_divergence", 0.1032, "nats/token", "the baseline's tokens", interval=(0.0992, 0.1072)),
            decode(439.2, 8),
            metric("size_bytes", 171_091_640, "bytes", size),
            metric("bits_per_quantized_weight", 4.5, "bits", "tensors of the quantized layers"),
        ],
        baseline=[
            perplexity(20.52, 0),
            decode(31.2, 1, LATER),
            decode(249.6, 8, LATER),
            metric("size_bytes", 538_091_640, "bytes", size),
        ],
        gates=gates if gated else {},
        steps=[
            SimpleNamespace(kind="model", key="cd" * 32, cached=True, seconds=12.3, report={"changed": 272}),
            SimpleNamespace(
                kind="gptq",
                key="ef" * 32,
                cached=False,
                seconds=252.3,
                report={"changed": 210, "skipped": {"lm_head": "x"}},
            ),
        ],
        settings=["attention: sdpa"],
        notes=["int4: 210 of 210 layers use torch's CPU kernel"],
        baseline_notes=["attention: sdpa"],
        environment={"device": "cpu", "device_name": "AMD EPYC"},
    )


def lines_of(scorecard: Scorecard, width: int) -> list[str]:
    return plain_text(*whole_scorecard(scorecard, Path("artifacts/llama_int4")), width=width).splitlines()


def test_at_100_columns_each_number_is_one_line() -> None:
    lines = lines_of(card(), 100)
    assert max(map(len, lines)) <= 100
    table = [" ".join(line.split()) for line in lines]
    start = table.index("baseline artifact ratio or ± [95%] gate") + 1
    assert table[start : start + 11] == [
        "perplexity [1] 20.52 23.41 1.150x [1.150, 1.151] <= 1.4x PASS",
        "decode_tokens_per_s",
        "batch 1 [2] 31.20 tok/s 54.90 tok/s 1.760x [1.738, 1.782] >= 1.75x",
        "INCONCLUSIVE",
        "batch 8 [4] 249.6 tok/s 439.2 tok/s 1.760x [1.738, 1.782]",
        "kl_divergence [3] - 0.1032 nats/token ± 0.0040",
        "size_bytes [5] 538.1 MB 171.1 MB 0.3180x <= 0.2x FAIL",
        "bits_per_quantized_weight - 4.500 bits -",
        "[6]",
        "",
        "[1] python-reference test, joined, 15 windows of 1024 tokens, no BOS, revision sha256:ab12cd34",
    ]


def test_at_80_columns_nothing_is_cut() -> None:
    lines = lines_of(card(), 80)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    numbers = ("20.52", "[1.150, 1.151]", "± 0.0040", "0.1032", "nats/token", "171.1 MB")
    for part in (*numbers, "INCONCLUSIVE", "FAIL", "decode_tokens_per_s", "bits_per_quantized_weight"):
        assert part in text
    assert "…" not in text
    assert "…" not in "".join(lines_of(card(), 30)), "lines are longer then"


def test_a_path_is_neither_cut_nor_broken() -> None:
    path = "/deep" * 40
    for part in (plain_table("", rows=[[path]]), definition_list([("file", f"see {path}")]), Text(f"see {path} there")):
        assert path in plain_text(part, width=80)


@pytest.mark.parametrize("render", [short_scorecard, whole_scorecard])
def test_at_80_columns_no_verdict_is_broken(render: Callable[..., Any]) -> None:
    (timed,) = [row for row in card().rows if row.gates and row.gates[0].verdict == "INCONCLUSIVE"]
    labels = {"batch": 1, "prompt": 128, "new_tokens": 64, "engine": "vllm", "task": "arc_easy"}
    long = timed.model_copy(update={"metric": timed.metric.model_copy(update={"labels": labels})})
    other = long.model_copy(update={"metric": long.metric.model_copy(update={"labels": {**labels, "batch": 8}})})
    text = plain_text(*render(card().model_copy(update={"rows": (long, other)})), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("INCONCLUSIVE") >= 2


def test_what_made_it_stands_above_and_the_verdict_below() -> None:
    lines = lines_of(card(), 100)
    assert lines[1] == "llama_int4  smollm2-135m · cpu AMD EPYC"
    assert "  model    272 changed, from the store (it took 0:12)" in lines
    assert "  gptq     210 changed, 1 skipped: lm_head (x), in 4:12" in lines
    assert "  setting  attention: sdpa" in lines
    assert "  note  int4: 210 of 210 layers use torch's CPU kernel" in lines
    assert "  note  baseline: attention: sdpa" in lines
    assert "  [3]  the baseline's tokens" in lines
    assert lines[-2:] == [
        "FAIL  1 of 3 gates pass  artifacts/llama_int4",
        "too noisy to tell: decode_tokens_per_s[batch=1]; run again with --retime on a quiet machine",
    ]


def test_without_an_open_gate_on_a_timing_nothing_is_asked_for() -> None:
    assert lines_of(card(decode_gate=">= 1.2x"), 100)[-1] == "FAIL  2 of 3 gates pass  artifacts/llama_int4"
    assert lines_of(card(decode_gate=">= 9x"), 100)[-1].startswith("FAIL  1 of 3 gates pass")


@pytest.mark.parametrize(
    ("skipped", "text"),
    [
        ({}, ""),
        ({"lm_head": "outside the decoder blocks"}, "1 skipped: lm_head (outside the decoder blocks)"),
        ({"a": "x", "b": "y", "c": "x"}, "3 skipped: a, c (x), b (y)"),
        ({str(index): "a router" for index in range(30)}, "30 skipped (a router)"),
        (
            {str(index): "a router" if index else "excluded" for index in range(30)},
            "30 skipped: 1 (excluded), 29 (a router)",
        ),
        ({str(index): f"reason {index}" for index in range(30)}, "30 skipped"),
    ],
)
def test_what_was_skipped_and_why(skipped: dict[str, str], text: str) -> None:
    assert (
        StepLine(kind="gptq", key="k", cached=False, seconds=1, report={"changed": 1, "skipped": skipped}).skipped
        == text
    )


def test_forms_are_told_if_they_differ() -> None:
    forms = {"3 bits, groups of 64": 7, "4 bits, groups of 64": 5}
    for told, text in (
        (forms, "12 changed (7 to 3 bits, groups of 64; 5 to 4 bits, groups of 64)"),
        ({"4 bits": 12}, "12 changed"),
        ("damaged", "12 changed"),
    ):
        report = {"changed": 12, "details": {"formats": told}}
        step = StepLine(kind="gptq", key="k", cached=False, seconds=1, report=report)
        assert step.changed == step.did == text


def told(scorecard: Scorecard, directory: Path | None = Path("artifacts/llama_int4")) -> list[str]:
    return [" ".join(line.split()) for line in plain_text(*short_scorecard(scorecard, directory)).splitlines()]


def test_the_short_scorecard_is_the_numbers_that_decide_and_the_verdict() -> None:
    assert told(card()) == [
        "",
        "llama_int4 smollm2-135m · cpu AMD EPYC",
        "",
        "baseline artifact ratio or ± [95%] gate",
        "decode_tokens_per_s, batch 1 31.20 tok/s 54.90 tok/s 1.760x [1.738, 1.782] >= 1.75x",
        "INCONCLUSIVE",
        "size_bytes 538.1 MB 171.1 MB 0.3180x <= 0.2x FAIL",
        "perplexity 20.52 23.41 1.150x [1.150, 1.151] <= 1.4x PASS",
        "kl_divergence - 0.1032 nats/token ± 0.0040",
        "",
        "more 2 numbers, 2 notes, protocols: optkit show artifacts/llama_int4 --verbose, or scorecard.html",
        "there",
        "",
        "FAIL 1 of 3 gates pass artifacts/llama_int4",
        "too noisy to tell: decode_tokens_per_s[batch=1]; run again with --retime on a quiet machine",
    ]
    assert "more 2 numbers, 2 notes, protocols: --verbose" in told(card(), None)


def test_of_what_asks_to_act_the_short_scorecard_tells_three_and_counts_the_rest() -> None:
    warnings = tuple(f"warning {index}" for index in range(5))
    warned = card().model_copy(update={"warnings": warnings, "notes": (*warnings, "aside")})
    lines = told(warned)
    assert [line for line in lines if "act on" in line] == [f"act on warning {index}" for index in range(3)]
    assert "more 2 numbers, 2 warnings, 2 notes, protocols:" in " ".join(lines)
    whole = lines_of(warned, 100)
    assert "  act on  warning 4" in whole
    assert "  note  aside" in whole
    assert "  note  warning 4" not in whole


def test_no_broken_gate_is_left_out_and_six_numbers_are_told_at_most() -> None:
    sizes = [metric("size_bytes", 10.0 + index, "bytes", "files", labels={"part": index}) for index in range(9)]
    plain = [metric(f"plug_in_{index}", 1.0, "things", "counted") for index in range(9)]
    broken = build_scorecard(
        name="x", artifact_key="k", recipe={}, metrics=[*plain, *sizes], gates={"size_bytes": "<= 1"}
    )
    assert first_rows(broken.rows) == list(broken.rows[9:])
    kept = build_scorecard(
        name="x", artifact_key="k", recipe={}, metrics=[*plain, *sizes], gates={"size_bytes": "<= 99"}
    )
    assert first_rows(kept.rows) == list(kept.rows[9:15])
    assert first_rows(kept.rows[:9]) == list(kept.rows[:6])


def test_without_gates_there_is_no_verdict() -> None:
    assert lines_of(card(gated=False), 100)[-1] == "no gates  artifacts/llama_int4"


def test_a_scorecard_without_numbers_says_so() -> None:
    empty = build_scorecard(name="bare", artifact_key="ab" * 32, recipe={}, metrics=[])
    assert plain_text(*whole_scorecard(empty)) == "\nbare\n\nnothing was measured\n\nno gates\n"


def draw(scorecard: Scorecard, **settings: object) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=100, force_terminal=True, highlight=False, **settings)
    for part in whole_scorecard(scorecard):
        console.print(part)
    return buffer.getvalue()


def test_colour_on_a_terminal_only_and_not_against_the_users_wish() -> None:
    assert "\x1b[1;31mFAIL" in draw(card(), color_system="standard", _environ={})
    assert "\x1b[3" not in draw(card(), color_system="standard", _environ={"NO_COLOR": "1"})
    assert "\x1b" not in "".join(lines_of(card(), 100))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "-"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (538_060_000, "538 MB"),
        (999_600_000, "999.6 MB"),
        (16_060_000_000, "16.1 GB"),
    ],
)
def test_size_text(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
