"""Numbers beside those of an earlier release, and limits relative to it."""

import math
import random

import pytest
from optkit_cli.output import plain_text
from optkit_cli.scorecard_view import whole_scorecard

from optkit.recipe.gates import Verdict
from optkit.scorecard import Scorecard, build_scorecard, read_json, table_rows, to_json, to_markdown
from tests.support import scorecards
from tests.support.scorecards import decode, size

TEXT = (
    "wikitext2 test (revision abc), first 8 windows of 128 tokens without overlap, token ids 77; exp of the mean loss"
)


def recipe(revision="sha256:1", name="llama"):
    return {"model": {"name": name, "revision": revision}}


def perplexity(losses, protocol=TEXT, **more):
    value = math.exp(sum(losses) / len(losses))
    return scorecards.perplexity(losses, protocol, **{"interval": (value / 1.2, value * 1.2)} | more)


def divergence(windows):
    value = sum(windows) / len(windows)
    return scorecards.divergence(windows, protocol=TEXT, interval=(value * 0.5, value * 1.5))


def speed(turns, machine="CPU, torch 2.13"):
    return decode(turns, labels={}, protocol=f"greedy; wall clock; {machine}", interval=(min(turns), max(turns)))


def card(metrics, gates=None, previous=None, **more):
    fields = {"name": "small", "artifact_key": "0123456789abcdef", "recipe": recipe()} | more
    return build_scorecard(metrics=metrics, gates=gates, previous=previous, comparing={"kl_divergence"}, **fields)


def result(scorecard: Scorecard, of="previous"):
    (found,) = [(gate, row.number(gate.of)) for row in scorecard.rows for gate in row.gates if gate.of == of]
    return found


LOSSES = [3 + random.Random(0).gauss(0, 0.5) for _ in range(16)]


@pytest.mark.parametrize(
    ("added", "verdict"), [(0.0, Verdict.PASS), (0.005, Verdict.PASS), (0.012, Verdict.FAIL), (0.01, None)]
)
def test_perplexities_are_paired_on_the_same_windows(added, verdict):
    noise = random.Random(1)
    ours = [loss + added + noise.gauss(0, 0.001) for loss in LOSSES]
    found, ratio = result(card([perplexity(ours)], {"perplexity": "<= 1.01x of previous"}, card([perplexity(LOSSES)])))
    assert found.verdict is (verdict or Verdict.INCONCLUSIVE)
    assert ratio.value == pytest.approx(math.exp(added), abs=1e-3)
    assert ratio.interval[1] - ratio.interval[0] < 0.005  # windows differ by far more


def test_divergences_are_paired_on_the_same_windows_and_quantiles_are_not():
    windows = [math.exp(random.Random(2).gauss(-3, 1)) for _ in range(16)]
    before, now = divergence(windows), divergence([1.2 * each for each in windows])
    _, ratio = result(card([now], {"kl_divergence": "<= 1.5x of previous"}, card([before])))
    assert ratio.value == pytest.approx(1.2)
    assert ratio.interval == pytest.approx((1.2, 1.2))
    tails = [each.model_copy(update={"value": 2 * each.value}) for each in (now, before)]
    _, ratio = result(card(tails[:1], {"kl_divergence": "<= 1.5x of previous"}, card(tails[1:])))
    assert ratio.interval[1] > 1.4


def test_turns_of_two_runs_were_no_neighbours():
    turns = (20.0, 22.0, 24.0, 26.0)
    found, ratio = result(card([speed(turns)], {"decode_tokens_per_s": ">= 0.95x of previous"}, card([speed(turns)])))
    assert (found.verdict, ratio.value) == (Verdict.INCONCLUSIVE, 1.0)
    assert ratio.interval[0] < 0.9


def test_counts_have_no_error():
    found, ratio = result(card([size(100)], {"size_bytes": "<= 1x of previous"}, card([size(100)])))
    assert (found.verdict, ratio.value, ratio.interval) == (Verdict.PASS, 1.0, None)


LOST = {"failure": "memory ran out on cuda", "interval": None, "samples": ()}


@pytest.mark.parametrize(
    ("ours", "before", "verdict", "why"),
    [
        (
            perplexity(LOSSES),
            perplexity(LOSSES, TEXT.replace("128", "256")),
            Verdict.FAIL,
            "no ratio: the protocols differ: 'first 8 windows of 128 tokens without overlap' and, on the earlier "
            "release small, 'first 8 windows of 256 tokens without overlap'; measure that release by these evals",
        ),
        (
            speed((1.0, 2.0)),
            speed((1.0, 2.0), "other, torch 2.12"),
            Verdict.FAIL,
            "no ratio: the protocols differ: 'CPU, torch 2.13' and, on the earlier release small, 'other, torch 2.12'",
        ),
        (size(1), speed((1.0, 2.0)), Verdict.FAIL, "no ratio: it was not measured on the earlier release small"),
        (size(1), size(0), Verdict.FAIL, "no ratio: the earlier release small's value is 0"),
        (
            perplexity(LOSSES),
            perplexity(LOSSES, **LOST),
            Verdict.INCONCLUSIVE,
            "of the earlier release small, memory ran out on cuda",
        ),
    ],
)
def test_what_cannot_be_compared_says_why(ours, before, verdict, why):
    found, ratio = result(card([ours], {ours.name: "<= 1x of previous"}, card([before])))
    assert found.verdict is verdict
    assert found.why.startswith(why)
    assert ratio is None


def test_a_divergence_from_another_model_is_not_compared():
    before = card([divergence([0.1, 0.2]), perplexity(LOSSES)], recipe=recipe("sha256:2", "llama-2"))
    gates = {"kl_divergence": "<= 1x of previous", "perplexity": "<= 1.2x of previous"}
    rows = card([divergence([0.1, 0.2]), perplexity(LOSSES)], gates, before).rows
    assert rows[0].gates[0].why.startswith("no ratio: it compares with another model: llama and, then, llama-2;")
    assert [row.gates[0].verdict for row in rows] == [Verdict.FAIL, Verdict.PASS]
    assert rows[0].beside == ()


@pytest.mark.parametrize("model", ["llama", None, 3])
def test_a_record_that_names_its_model_otherwise_is_another_model(model):
    before = card([divergence([0.1, 0.2])], recipe={"model": model})
    found, _ = result(card([divergence([0.1, 0.2])], {"kl_divergence": "<= 1x of previous"}, before))
    assert f"it compares with another model: llama and, then, {model};" in found.why


def test_samples_that_were_lost_leave_the_intervals():
    before = card([perplexity(LOSSES).model_copy(update={"samples": ()})])
    found, ratio = result(card([perplexity(LOSSES)], {"perplexity": "<= 1.01x of previous"}, before))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert ratio.interval[1] > 1.2


def test_without_an_earlier_release_the_gate_is_skipped():
    scorecard = card([size(1)], {"size_bytes": "<= 1x of previous"})
    found, ratio = result(scorecard)
    assert (found.verdict, found.why, ratio) == (Verdict.SKIPPED, "there is no earlier release", None)
    assert (scorecard.verdict, scorecard.exit_status) == (Verdict.PASS, 0)
    assert plain_text(*whole_scorecard(scorecard)).splitlines()[-1] == "PASS  0 of 0 gates pass, 1 skipped"


def test_the_release_is_shown_if_it_is_there(tmp_path):
    before = card([size(80), perplexity(LOSSES)])
    gates = {"size_bytes": "<= 1x of previous", "perplexity": "<= 1.01x of previous"}
    scorecard = card([size(100), perplexity(LOSSES)], gates, before, baseline=[size(400)])
    rows = [(row.metric, row.baseline, row.artifact, row.ratio, row.gate) for row in table_rows(scorecard)]
    assert rows[:2] == [
        ("size_bytes", "400.0 B", "100.0 B", "0.2500x", "-"),
        ("size_bytes of previous", "80.00 B", "", "1.250x", "<= 1x of previous FAIL"),
    ]
    assert rows[3][3:] == ("1.000x [1.000, 1.000]", "<= 1.01x of previous PASS")
    assert "| size_bytes of previous [1] | 80.00 B |  | 1.250x | <= 1x of previous FAIL |" in to_markdown(scorecard)
    assert f"Of previous: small of {before.created}, `0123456789ab`." in to_markdown(scorecard)
    text = plain_text(*whole_scorecard(scorecard))
    assert ["of", "previous", "80.00", "B", "1.250x", "<=", "1x", "of", "previous", "FAIL"] in [
        line.split() for line in text.splitlines()
    ]
    assert f"previous  small of {before.created}, 0123456789ab" in text
    alone = card([size(100)])
    assert "previous" not in plain_text(*whole_scorecard(alone)) + to_markdown(alone)
    path = tmp_path / "scorecard.json"
    path.write_text(to_json(scorecard), encoding="utf-8")
    assert read_json(path) == scorecard
