"""What may be ranked together, who is picked and why, and what is said of the rest."""

import json
import math
from pathlib import Path
from random import Random

import pytest

from optkit.comparison import Comparison, compare_scorecards, to_csv, to_markdown
from optkit.comparison.axes import Axis
from optkit.comparison.table import bests_text, legend
from optkit.errors import UsageError
from optkit.measure import Metric
from optkit.scorecard import Beside
from tests.support.candidates import BASELINE, FAST, GOOD, LOSSES, SMALL, TURNS, WASTE, compared, made
from tests.support.scorecards import CPU, TEXT, card, decode, divergence, metric, perplexity, size


def test_one_is_dominated_only_by_what_is_measurably_better_and_nowhere_worse() -> None:
    found = compared(GOOD, SMALL, WASTE, FAST)
    assert {entry.label: entry.dominated_by for entry in found.entries} == {
        "good": (),
        "small": (),
        "fast": (),
        "waste": ("small", "good"),
    }
    (group,) = found.groups
    assert set(group.front) == {"good", "small", "fast"}
    assert group.axes == ("perplexity", "size_bytes", "decode_tokens_per_s[batch=1]")
    assert [entry.rank for entry in found.entries] == [1, 2, 3, 4]
    assert found.entries[-1].label == "waste"
    assert group.knee == group.pick == "small"
    assert group.bests == {
        "perplexity": ("good",),
        "size_bytes": ("small",),
        "decode_tokens_per_s[batch=1]": ("fast",),
    }
    assert bests_text(found, group) == "perplexity good; size_bytes small; decode_tokens_per_s fast"


def test_ratios_to_several_unmodified_models_are_told() -> None:
    others = [made(name, 0.03, model=f"large@sha256:{'0a' * 32}") for name in ("big", "huge")]
    assert compared(GOOD, *others).notes == (
        "ratios are to 2 unmodified models: good of small; big, huge of large@sha256:0a0a0a0a0a0a",
    )
    assert compared(*others).notes == ()
    several, one = compared(GOOD, *others), compared(*others)
    assert legend(several, several.groups[0]).startswith("x: ratio to its own unmodified model,")
    assert legend(one, one.groups[0]).startswith("x: ratio to the unmodified model,")


def test_what_fails_is_not_the_best_of_an_axis() -> None:
    found = compared(GOOD, SMALL, FAST, require=["perplexity<=1.1x"])
    (group,) = found.groups
    assert group.bests["decode_tokens_per_s[batch=1]"] == ("small",)
    (group,) = (alone := compared(GOOD)).groups
    assert bests_text(alone, group) == ""


def test_the_best_of_those_that_meet_the_limits_and_the_reason() -> None:
    found = compared(
        GOOD, SMALL, WASTE, FAST, require=["perplexity<=1.1x", "decode_tokens_per_s>=1.8x"], best="size_bytes"
    )
    (group,) = found.groups
    assert (group.pick, found.exit_status) == ("small", 0)
    assert group.why == "small over good: 40% smaller, 15% faster, but 3.0% higher perplexity"
    assert {entry.label: str(entry.meets) for entry in found.entries} == {
        "good": "PASS",
        "small": "PASS",
        "waste": "FAIL",
        "fast": "FAIL",
    }


def test_a_loss_within_the_noise_is_no_measurable_loss() -> None:
    draw = Random(1)
    shaken = [each + 0.02 + draw.gauss(0, 0.03) for each in LOSSES]
    other = card("shaken", [perplexity(shaken), decode([40.0, 40.4, 39.8, 40.2]), size(240e6)], BASELINE)
    (group,) = compared(GOOD, other, best="size_bytes").groups
    assert group.why == "shaken over good: 4.0% smaller, no measurable loss in perplexity and decode_tokens_per_s"


@pytest.mark.parametrize(
    ("limit", "status", "why"),
    [
        ("perplexity<=1.001x", 3, "none passes its gates and what is required"),
        ("perplexity<=1.05127x", 4, "none surely passes its gates and what is required; small may"),
    ],
)
def test_the_exit_status_says_if_none_meets_what_is_required(limit: str, status: int, why: str) -> None:
    found = compared(SMALL, FAST, require=[limit])
    assert (found.exit_status, found.groups[0].pick, found.groups[0].why) == (status, None, why)


def test_what_fails_its_own_gates_is_not_picked() -> None:
    failing = made("failing", 0.05, 2.3, 150e6, gates={"perplexity": "<= 1.01x"})
    found = compared(GOOD, failing, made("worse", 0.06, 2.0, 260e6), best="size_bytes")
    assert (found.groups[0].pick, found.exit_status) == ("good", 0)
    assert found.groups[0].knee == "good"
    assert set(found.groups[0].front) == {"good", "failing"}
    assert compared(failing, best="size_bytes").exit_status == 3
    alone = compared(failing)
    assert (alone.exit_status, alone.groups[0].why) == (0, "none passes its gates")
    assert legend(alone, alone.groups[0]).endswith(
        "Knee: of all, since none surely passes, the nearest to the best of each."
    )


def test_what_was_not_measured_does_not_meet_a_limit() -> None:
    bare = card("bare", [size(1e6)], BASELINE)
    found = compared(GOOD, bare, require=["perplexity<=2x"])
    assert found.entry("bare").requirements[0].why == "it was not measured"
    assert str(found.entry("bare").meets) == "FAIL"


def test_limits_can_be_relative_to_the_same_engine() -> None:
    rows = tuple(
        row.model_copy(update={"beside": (Beside(of="same engine", metric=row.metric, ratio=1.9),)})
        if row.metric.name == "decode_tokens_per_s"
        else row
        for row in GOOD.rows
    )
    found = compared(GOOD.model_copy(update={"rows": rows}), SMALL, require=["decode_tokens_per_s>=1.5x same engine"])
    assert str(found.entry("good").meets) == "PASS"
    assert found.entry("small").requirements[0].why == "there is no ratio to the unmodified model in its engine"


def test_two_on_the_front_are_no_answer_without_saying_what_counts() -> None:
    (group,) = compared(GOOD, SMALL).groups
    assert (group.pick, group.knee) == (None, None)
    assert group.why == (
        "neither small nor good is better in all axes: say what counts, as in --best decode_tokens_per_s"
    )


def test_numbers_of_other_protocols_are_never_ranked_together() -> None:
    longer = TEXT.replace("12 windows of 256", "12 windows of 512")
    other = card("other", [perplexity(LOSSES, longer), decode(TURNS), size(1e6)], BASELINE)
    found = compared(GOOD, SMALL, other)
    assert [set(group.entries) for group in found.groups] == [{"good", "small"}, {"other"}]
    assert legend(found, *found.groups).count("x: ratio to the unmodified model") == 1
    assert found.groups[1].differs == (
        "perplexity: first 12 windows of 512 tokens, not first 12 windows of 256 tokens",
    )
    assert [column.key for column in found.columns if column.name == "perplexity"] == ["perplexity", "perplexity #2"]
    assert found.entry("other").front


def test_timings_of_other_machines_are_never_ranked_together() -> None:
    found = compared(GOOD, SMALL, made("elsewhere", 0.1, 9.0, 1e6, environment=CPU | {"cpu_threads": 64}))
    assert found.groups[1].differs == ("decode_tokens_per_s: cpu_threads 64, not cpu_threads 2",)
    assert found.entry("good").front


def test_what_has_no_speed_is_ranked_apart() -> None:
    quiet = card("quiet", [perplexity(LOSSES), size(1e6)], BASELINE)
    found = compared(GOOD, SMALL, quiet)
    assert found.groups[1].differs == ("decode_tokens_per_s: measured in the first group alone",)
    nothing = compared(GOOD, card("nothing", [size(1).model_copy(update={"name": "zeros", "unit": "fraction"})]))
    assert nothing.entry("nothing").group is None
    assert nothing.notes == ("nothing is not ranked: it has none of the axes",)


def test_divergences_from_other_models_are_two_columns() -> None:
    first = card("first", [divergence([0.1, 0.2, 0.1])])
    second = card("second", [divergence([0.1, 0.2, 0.1])], model="other")
    found = compared(first, second)
    assert len(found.columns) == 2
    assert found.groups[1].differs == ("kl_divergence: unmodified model other, not unmodified model small",)


def noise(name: str, value: float, unit: str, against: str) -> Metric:
    labels = {"against": against}
    return metric(f"noise_{name}", value, unit, "the unmodified model against itself", labels=labels)


def test_a_difference_below_the_noise_floor_is_none() -> None:
    floor = [noise("perplexity", 0.04, "fraction", "batch 8"), noise("perplexity", 0.01, "fraction", "eager")]
    noisy = GOOD.model_copy(
        update={"rows": (*GOOD.rows, *card("n", floor).rows)},
    )
    found = compared(noisy, SMALL)
    (given,) = [each for each in found.floors if each.column == "perplexity"]
    assert (given.value, given.relative, given.source) == (0.04, True, "batch 8, eager")
    assert found.groups[0].front == ("small",)
    assert found.entry("good").cell("perplexity").change == "none"
    assert not any(column.name.startswith("noise") for column in found.columns)


def test_the_floor_of_a_timing_is_the_spread_of_the_unmodified_models_turns() -> None:
    (floor,) = compared(GOOD, SMALL).floors
    deviations = [each / 20.05 - 1 for each in TURNS]
    spread = math.sqrt(sum(each**2 for each in deviations) / 3)
    assert floor.value == pytest.approx(3.1824 * spread * math.sqrt(2 / 4), rel=1e-3)


def test_timings_of_one_race_are_paired_by_turns_and_others_by_their_baselines() -> None:
    shared = [1.0, 1.3, 0.8, 1.1]  # what the machine did in each turn, to all alike
    baseline = [perplexity(LOSSES), decode([20 * each for each in shared])]
    racing = [
        card(f"r{speed}", [perplexity(LOSSES), decode([speed * each for each in shared])], baseline)
        for speed in (40, 42)
    ]
    found = compared(*racing)
    (speed,) = [each for each in found.entries[1].differences if "decode" in each.axis]
    assert (speed.value, speed.interval) == (pytest.approx(40 / 42), None)
    slow = [each * 0.5 for each in shared]
    other = card(
        "r84", [perplexity(LOSSES), decode([42 * each for each in slow])], [decode([20 * each for each in slow])]
    )
    found = compared(racing[1], other)
    (speed,) = [each for each in found.entries[1].differences if "decode" in each.axis]
    assert speed.value == pytest.approx(1.0)


def test_the_same_model_twice_is_found_no_different() -> None:
    """Window losses shaken by kernels, speeds by the machine: 95 of 100 pairs show no difference."""
    draw, calm = Random(7), 0
    for _ in range(200):
        pair = []
        for name in "ab":
            losses = [each + draw.gauss(0, 0.004) for each in LOSSES]
            day = draw.gauss(1, 0.1)
            turns = [day * 20 * draw.gauss(1, 0.02) for _ in range(4)]
            own = [day * 40 * draw.gauss(1, 0.02) for _ in range(4)]
            pair.append(card(name, [perplexity(losses), decode(own), size(2e8)], [perplexity(LOSSES), decode(turns)]))
        differences = compared(*pair).entries[1].differences
        calm += all(each.relation == "none" for each in differences)
    assert calm >= 190


def test_names_of_one_recipe_are_told_apart() -> None:
    places = {"made/a": "a", "made/a-large": "a", "b": "b", "x/c": "c", "y/d/c": "c"}
    found = compare_scorecards([(Path(place), made(name)) for place, name in places.items()])
    assert {entry.label for entry in found.entries} == {"a a", "a a-large", "b", "c x/c", "c y/d/c"}


def test_an_axis_that_is_named_twice_counts_once() -> None:
    cards = [made("a"), made("b", 0.01)]
    assert compared(*cards, axes=["perplexity", "perplexity"]) == compared(*cards, axes=["perplexity"])


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["s-rtn-bits4", "s-rtn-bits8", "s-gptq-bits4"], ["rtn-bits4", "rtn-bits8", "gptq-bits4"]),
        (["s-rtn-bits4", "s-rtn-bits8"], ["bits4", "bits8"]),
        (["s-rtn", "s-rtn-bits8"], ["rtn", "rtn-bits8"]),
        (["s-rtn", "t-rtn"], ["s-rtn", "t-rtn"]),
        (["s-rtn"], ["s-rtn"]),
    ],
)
def test_what_all_names_begin_with_is_left_out(names: list[str], labels: list[str]) -> None:
    assert {entry.label for entry in compared(*map(made, names)).entries} == set(labels)


def test_of_several_stages_the_names_and_their_common_fields_differ() -> None:
    rtn = {"bits": 4, "group_size": 32, "scale_search": "minmax"}
    gptq = {"bits": 8, "group_size": 32, "damping": 0.01}
    cards = [made("a", stages=[{"rotate": {"heads": True}}, {"rtn": rtn}])]
    cards += [made(name, stages=[{"rotate": {"heads": True}}, {"gptq": gptq | own}]) for name, own in ONE_FIELD.items()]
    found = compared(*cards)
    assert found.entry("a").fields == {"stages.1": "rtn", "stages.1.rtn.bits": 4}
    assert found.entry("b").fields == {"stages.1": "gptq", "stages.1.gptq.bits": 8, "stages.1.gptq.damping": 0.01}
    assert found.entry("c").fields == {"stages.1": "gptq", "stages.1.gptq.bits": 8, "stages.1.gptq.damping": 0.1}
    assert compared(*cards[:2], made("d", stages=[])).entry("b").fields["stages.0"] == "rotate"


ONE_FIELD = {"b": {}, "c": {"damping": 0.1}}


def test_the_fields_of_recipes_that_differ() -> None:
    bits = [made(f"b{bits}", stages=[{"rtn": {"bits": bits, "group_size": 64}}]) for bits in (3, 4)]
    found = compared(*bits, made("plain"))
    assert found.entry("b3").fields == {"stages.0": "rtn", "stages.0.rtn.bits": 3}
    assert compared(*bits).entry("b4").fields == {"stages.0.rtn.bits": 4}


def test_a_thousand_are_ranked_by_one_pass_over_each_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    against = Axis.against
    monkeypatch.setattr(Axis, "against", lambda self, other: passes.append(other) or against(self, other))
    draw = Random(1)
    cards = [made(f"r{index}", draw.random(), 1 + draw.random(), 1e8 * (1 + draw.random())) for index in range(1000)]
    found = compared(*cards)
    assert [entry.rank for entry in found.entries] == list(range(1, 1001))
    assert len(passes) < 3 * 1000 + 40
    assert 0 < len(found.groups[0].front) < 300


def test_scores_of_tasks_are_compared_across_machines() -> None:
    told = {"labels": {"task": "squad"}, "interval": (0.4, 0.6), "pairing": "independent"}
    score = metric("f1", 0.5, "fraction", "squad", higher_is_better=True, **told)
    better = score.model_copy(update={"value": 0.9, "interval": (0.85, 0.95)})
    found = compared(card("a", [score]), card("b", [better], environment={"device": "cuda"}))
    (group,) = found.groups
    assert (group.axes, group.pick) == (("f1[task=squad]",), "b")
    assert found.entry("a").dominated_by == ("b",)


def test_numbers_that_are_not_above_zero_are_subtracted() -> None:
    scores = [size(value).model_copy(update={"name": "score", "unit": "points"}) for value in (-1.0, 0.0, 2.0)]
    found = compared(*(card(f"r{index}", [each]) for index, each in enumerate(scores)), axes=["score"])
    assert found.groups[0].front == ("r0",)
    assert [each.differences[0].value for each in found.entries[1:]] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"require": ["perplexity"]}, "--require: 'perplexity' is no limit. Write it as perplexity<=1.05x."),
        ({"require": ["perplexity<=x"]}, "--require: '<=x' is no limit."),
        ({"require": ["perplexty<=1"]}, "--require: no scorecard has 'perplexty'. Did you mean 'perplexity'?"),
        ({"best": "sze_bytes"}, "--best: no scorecard has 'sze_bytes'. Did you mean 'size_bytes'?"),
        ({"axes": ["acc"]}, "--axis: no scorecard has 'acc'. Known: decode_tokens_per_s"),
        ({"best": "decode_tokens_per_s[batch=9]"}, "--best: no scorecard has 'decode_tokens_per_s"),
        ({"best": "1x"}, "--best: '1x' names no metric."),
    ],
)
def test_metrics_that_nobody_has(options: dict, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compared(GOOD, SMALL, **options)
    assert str(caught.value).startswith(message)


def test_csv_and_markdown_have_every_scorecard() -> None:
    found = compared(GOOD, SMALL, WASTE, best="size_bytes")
    lines = to_csv(found).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("label,place,model,device,group,rank,stands,front,verdict,meets,perplexity.value,")
    assert lines[1].startswith("small,artifacts/small,small,cpu AMD EPYC,0,1,pick,True,PASS,PASS,")
    text = to_markdown(found)
    assert "| **small** | pick |" in text
    assert "150.0 MB 0.3000x" in text
    assert "small over good: 40% smaller" in text


def test_json_is_the_record_and_can_be_read_again() -> None:
    found = compared(GOOD, SMALL)
    said = json.loads(json.dumps(found.model_dump(mode="json")))
    assert (said["schema"], said["exit_status"]) == (1, 0)
    fields = {key: value for key, value in said.items() if key not in ("verdict", "exit_status")}
    assert Comparison.model_validate(fields) == found
