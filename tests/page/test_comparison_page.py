"""The page of a comparison says which to take, and draws what the comparison says and nothing else."""

import json
import os
from pathlib import Path

import pytest
from optkit_cli.compare_view import comparison_view
from optkit_cli.main import main
from rich.console import Console

from optkit.comparison import Comparison, compare_scorecards, to_markdown
from optkit.comparison.table import legend, not_kept, warning_lines
from optkit.page import comparison_page, report
from optkit.page.charts.chart import log_scale
from optkit.scorecard import Scorecard, to_json
from tests.page.test_scorecard_page import EVIL, Page, numbers
from tests.support.candidates import compared, made
from tests.support.full_scorecards import full_scorecard, sweep

Cards = list[tuple[Path, Scorecard]]


@pytest.fixture(scope="module")
def cards() -> Cards:
    return sweep()


@pytest.fixture(scope="module")
def comparison(cards: Cards) -> Comparison:
    return compare_scorecards(cards, require=["perplexity<=1.10x"], best="size_bytes")


@pytest.fixture(scope="module")
def page(comparison: Comparison) -> Page:
    return Page(comparison_page(comparison))


@pytest.fixture
def artifacts(cards: Cards, tmp_path: Path) -> Path:
    for place, card in cards:
        (tmp_path / "sweep" / place.name).mkdir(parents=True)
        (tmp_path / "sweep" / place.name / "scorecard.json").write_text(to_json(card), encoding="utf-8")
    return tmp_path / "sweep"


def test_every_number_is_in_the_comparison(comparison: Comparison, page: Page) -> None:
    known = {*numbers(comparison.model_dump(mode="json"))}
    floors = {floor.column: floor for floor in comparison.floors}
    bands = {end for floor in floors.values() for end in (1 - floor.value, 1 + floor.value)}
    drawn = set(page.drawn)
    assert len(drawn) > 100
    assert drawn <= known | bands | {0.0, 1.0}
    assert {float(value) for value in page.attributes("data-value") if value} <= known


def test_the_pick_is_called_so_even_behind_one_that_does_not_pass(comparison: Comparison) -> None:
    pick = next(entry for entry in comparison.entries if entry.pick)
    other = next(entry for entry in comparison.entries if entry.front and not entry.pick)
    behind = pick.model_copy(update={"dominated_by": (other.label,)})
    entries = tuple(behind if entry is pick else entry for entry in comparison.entries)
    page = Page(comparison_page(comparison.model_copy(update={"entries": entries})))
    row = page.text.split(f"{pick.rank}. {pick.label}")[1].split(f"{pick.rank + 1}. ")[0]
    assert "pick" in row
    assert "behind" not in row


def test_the_answer_comes_first_with_its_reason(comparison: Comparison, page: Page) -> None:
    (group,) = comparison.groups
    words = " ".join(page.text.split())
    assert "Which of 12 artifacts of smollm2-135m? cpu Intel(R) Xeon(R)" in words
    assert f"required: perplexity<=1.10x Take {group.why}." in words
    assert words.index(group.why) < words.index("Noise floor")
    assert [chart["x"]["label"] for name, chart in page.charts.items() if name.startswith("against")] == [
        "size_bytes ↓, bytes",
        "decode_tokens_per_s ↑, x unmodified",
        "peak_memory_bytes ↓, x unmodified",
    ]


def test_tiles_say_whose_they_are(comparison: Comparison, page: Page) -> None:
    assert f"{comparison.groups[0].pick} beside the unmodified model (32 bits per weight) perplexity" in " ".join(
        page.text.split()
    )


def test_heads_say_limits_and_protocols_and_the_unmodified_model_stands_first(page: Page) -> None:
    words = " ".join(page.text.split())
    head, first = words[: words.index("1. gptq-4-128")], words[words.index("1. gptq-4-128") :]
    assert "artifact stage, bits, group_sizestandsgates" in head
    assert "perplexity ↓ [1] gate <= 1.1x required <= 1.1xsize_bytes ↓ [2]decode_tokens_per_s ↑ [3]" in head
    assert "unmodified9.803540.0 MB 32 bits per weight62.93 tok/s" in head
    assert first.startswith("1. gptq-4-128 gptq, 4, 128pickPASS")
    assert "12 artifacts" in words
    assert "perplexity: python-reference test, 12 windows of 1024 tokens" in words
    assert [tag for tag, _ in page.tags].count("tbody") == 2


def test_legend_and_terminal_say_the_same(comparison: Comparison, page: Page) -> None:
    (group,) = comparison.groups
    words = legend(comparison, group)
    assert words in " ".join(page.text.split())
    assert "at least as good in perplexity, size_bytes and decode_tokens_per_s and measurably better in one" in words
    assert "Pick: of those that pass, the best by size_bytes." in words
    assert words in to_markdown(comparison)
    assert words in printed(comparison, 400)


def printed(comparison: Comparison, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as said:
        console.print(*comparison_view(comparison))
    return said.get()


def test_all_forms_say_which_gates_are_not_kept() -> None:
    gates = {"perplexity": "<= 1.1x", "size_bytes": "<= 0.6x"}
    found = compared(made("good", 0.02, 2.0, 250e6, gates=gates), made("bad", 0.2, 3.0, 400e6, gates=gates))
    (bad,) = (entry for entry in found.entries if entry.label == "bad")
    assert not_kept(bad.gates) == "perplexity, size_bytes"
    assert not_kept(found.entry("good").gates) == ""
    for text in (Page(comparison_page(found)).text, to_markdown(found), printed(found)):
        assert "FAIL perplexity, size_bytes" in " ".join(text.split())
        assert "PASS perplexity" not in text


def test_all_forms_say_what_to_act_on_and_how_many_say_so() -> None:
    busy, lost = "other processes used more than 5% of the cores", "no kernel for q_proj"
    cards = [made(name, 0.02, 2.0, 250e6) for name in ("a", "b", "c")]
    warned = [card.model_copy(update={"warnings": (lost, busy)[index:]}) for index, card in enumerate(cards)]
    found = compared(*warned)
    assert (
        json.loads(found.model_dump_json())["warnings"]
        == [
            {"text": lost, "entries": ["a"]},
            {"text": busy, "entries": ["a", "b"]},
        ][::-1]
    )
    for text in (Page(comparison_page(found)).text, to_markdown(found), printed(found)):
        assert "act on" in text
        assert f"{busy} (2 of 3 artifacts)" in text
        assert f"a: {lost}" in text
    warnings = tuple(f"layer {index}" for index in range(20))
    many = [cards[0].model_copy(update={"warnings": warnings}), cards[1]]
    assert warning_lines(compared(*many))[-1] == "10 more, in --json"
    assert "act on" not in printed(compared(*cards))


def test_differences_have_ticks_on_both_sides_of_no_difference(page: Page) -> None:
    scales = [chart["x"] for name, chart in page.charts.items() if name.startswith("beside")]
    even = [scale for scale in scales if scale["type"] == "linear"]
    assert even
    for scale in even:
        assert 1.0 in scale["ticks"]
        assert scale["domain"] == [scale["ticks"][0], scale["ticks"][-1]]
        assert 3 <= len(scale["ticks"]) <= 7


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((1.0, 5.5, 7.5), [1, 2, 3, 5, 10]),
        ((0.3, 4.2), [0.2, 0.3, 0.5, 1, 2, 3, 5]),
        ((2e8, 1e9, -1.0), [2e8, 3e8, 5e8, 1e9]),
    ],
)
def test_a_logarithmic_scale_has_ticks_on_both_sides_of_all_values(values: tuple[float, ...], ticks: list) -> None:
    scale = log_scale(values)
    assert scale == {"type": "log", "domain": [ticks[0], ticks[-1]], "ticks": ticks}


def test_of_several_unmodified_models_none_is_drawn() -> None:
    page = Page(comparison_page(compared(made("a", 0.1), made("b", 0.2, model="other"))))
    marks = [mark for name, chart in page.charts.items() if name.startswith("against-") for mark in chart["marks"]]
    assert {record["label"] for mark in marks if mark["kind"] == "dot" for record in mark["data"]} == {"a", "b"}
    assert "diamond" not in page.attributes("class")


def test_the_unmodified_model_has_one_shape_in_the_chart_and_its_legend(page: Page) -> None:
    dots = [mark["options"] for mark in page.charts["against-0-0"]["marks"] if mark["kind"] == "dot"]
    assert [each["fill"] for each in dots if each.get("symbol") == "diamond"] == ["var(--orange)"]
    assert page.attributes("class").count("diamond") == 3


def test_points_stand_as_the_comparison_says_and_a_hover_tells_the_recipe(comparison: Comparison, page: Page) -> None:
    drawn = {
        record["label"]: record
        for mark in page.charts["against-0-0"]["marks"]
        if mark["kind"] == "dot"
        for record in mark["data"]
    }
    assert drawn.keys() == {entry.label for entry in comparison.entries} | {"unmodified"}
    for entry in comparison.entries:
        wanted = "pick" if entry.pick else "front" if entry.front else "behind"
        assert drawn[entry.label]["stands"] == (wanted if entry.passes == "PASS" else "refused")
        assert drawn[entry.label]["rank"] == str(entry.rank)
    assert "gptq.bits 4\ngptq.group_size 128" in drawn["gptq-4-128"]["hint"]


def test_groups_that_cannot_be_ranked_together_say_what_differs(cards: Cards) -> None:
    other = [
        (place.with_name(f"{place.name}-gpu"), card.model_copy(update={"environment": {"device": "cuda"}}))
        for place, card in cards[:3]
    ]
    comparison = compare_scorecards([*cards, *other])
    assert len(comparison.groups) == 2
    page = Page(comparison_page(comparison))
    for line in comparison.groups[1].differs:
        assert line in page.text
    assert {name.split("-")[1] for name in page.charts} == {"0", "1"}


def test_fields_of_two_stages_are_told_apart(cards: Cards) -> None:
    pruned = [
        (
            place,
            card.model_copy(
                update={"recipe": {**card.recipe, "stages": [{"prune": {"bits": at > 0}}, *card.recipe["stages"]]}}
            ),
        )
        for at, (place, card) in enumerate(cards[:2])
    ]
    text = " ".join(Page(comparison_page(compare_scorecards(pruned))).text.split())
    assert "stages.0.bits, stage, stages.1.bits" in text
    assert "false, rtn, 8" in text
    assert "true, gptq, 4" in text


def test_any_number_of_scorecards_fits() -> None:
    page = comparison_page(compare_scorecards(sweep(160)))
    assert len(page.encode()) < 1_400_000
    assert "60 more, ranked lower" in page


def test_markup_in_labels_is_text() -> None:
    cards = [(Path(f"{EVIL}{index}"), full_scorecard(EVIL, bits)) for index, bits in enumerate((3, 4, 8))]
    page = Page(comparison_page(compare_scorecards(cards)))
    assert len(page.scripts) == 3
    assert "img" not in [tag for tag, _ in page.tags]


def test_report_writes_a_page_of_what_lies_below(
    artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    words = ["report", str(artifacts), "--out", str(out), "--require", "perplexity<=1.10x", "--best", "size_bytes"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"{out}  12 scorecards, take gptq-4-128  ")
    page = Page(out.read_text(encoding="utf-8"))
    assert "optkit run gptq-4-128.yaml" in page.text
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"report": str(out), "size_bytes": out.stat().st_size, "scorecards": 12, "picks": ["gptq-4-128"]}


def test_report_of_one_scorecard_is_its_page(artifacts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", str(artifacts / "gptq-4-128"), "--out", str(artifacts / "one.html")]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"{artifacts}/one.html  1 scorecard  ")
    made = report([artifacts / "gptq-4-128"])
    assert (made.scorecards, made.exit_status) == (1, 0)
    assert "<h1><bdi>gptq-4-128</bdi></h1>" in made.html


def test_report_says_what_is_wrong(artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> tuple[int, str]:
        return main(["report", *words]), capsys.readouterr().err

    status, said = refused(str(tmp_path / "none"))
    remedy = "Name artifacts, scorecard.json files, or directories with any of them below."
    assert (status, said) == (1, f"error: {tmp_path}/none: no such file or directory. {remedy}\n")
    status, said = refused(str(artifacts), "--best", "perplexty", "--out", str(tmp_path / "a.html"))
    assert status == 2
    assert "no scorecard has 'perplexty'" in said
    status, said = refused(str(artifacts), "--require", "perplexity<=0.5x", "--out", str(tmp_path / "a.html"))
    assert status == 3
    (tmp_path / "file").touch()
    status, said = refused(str(artifacts), "--out", str(tmp_path / "file" / "a.html"))
    assert status == 1
    assert f"{tmp_path}/file" in said
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\n", encoding="utf-8")
    status, said = refused(str(artifacts), "--out", str(recipe))
    assert (status, recipe.read_text(encoding="utf-8")) == (2, "model: m\n")
    assert said == f"error: --out {recipe}: is a file and no page. It would be replaced. Name another.\n"
    os.truncate(recipe, 1 << 40)  # more than can be read whole
    status, said = refused(str(artifacts), "--out", str(recipe))
    assert (status, said) == (2, f"error: --out {recipe}: is a file and no page. It would be replaced. Name another.\n")
