"""scorecard.html says what scorecard.json says, as text that nothing in a recipe can turn into markup."""

import json
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from optkit_cli.main import main
from ruamel.yaml import YAML

from optkit.page import scorecard_page
from optkit.page.charts.chart import Chart, printed
from optkit.page.command import command
from optkit.page.render import json_in_html
from optkit.scorecard import Scorecard, build_scorecard, to_json
from tests.support.full_scorecards import count, full_scorecard, perplexity

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """What a browser makes of a page: its elements, the text of each script, and the text to read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.text += data

    @property
    def charts(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    @property
    def drawn(self) -> list[float]:
        """The numbers that are drawn, but for those that say which phase of the memory follows which."""
        return [
            value
            for chart in self.charts.values()
            for mark in chart["marks"]
            for record in mark["data"]
            for name, value in record.items()
            if isinstance(value, int | float) and name not in ("time", "begin", "end", "phase")
        ]

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def card() -> Scorecard:
    return full_scorecard()


@pytest.fixture(scope="module")
def page(card: Scorecard) -> Page:
    return Page(scorecard_page(card))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from numbers(name)
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, str):
        yield from map(float, NUMBER.findall(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def test_every_number_that_is_drawn_or_sorted_by_is_in_the_scorecard(card: Scorecard, page: Page) -> None:
    known = {*numbers(json.loads(to_json(card))), 0.0, 1.0}  # a distance from itself; the ratio of no change
    assert len(page.drawn) > 500
    assert set(page.drawn) <= known
    assert {float(value) for value in page.attributes("data-value") if value} <= known


def test_the_verdict_comes_first_and_every_section_follows(page: Page) -> None:
    words = ["llama_int4", "PASS", "3 of 3 gates pass", "Numbers", "What changed", "Quality, stage by stage", "Speed"]
    words += ["Memory", "Layers", "Training", "How it was made", "Protocols"]
    places = [page.text.index(word) for word in words]
    assert places == sorted(places)
    named = set(page.attributes("data-chart"))
    assert named == set(page.charts)
    drawn = {"ratios", "damage-0", "damage-1", "speed-0", "latency-0", "roofline", "layers-0", "sensitivity", "loss-0"}
    drawn |= {"memory-made", "memory-measured"}
    assert named == drawn


def test_waterfalls_begin_at_the_unmodified_model(page: Page) -> None:
    def bars(name: str) -> list[tuple[str, float, float, str]]:
        found = [each for mark in page.charts[name]["marks"] if mark["kind"] == "barX" for each in mark["data"]]
        order = page.charts[name]["rows"]
        found.sort(key=lambda each: order.index(each["stage"]))
        return [(each["stage"], each["before"], each["after"], each["change"]) for each in found]

    perplexities = bars("damage-0")
    assert [each[0] for each in perplexities] == ["unmodified", "gptq", "lora_recover"]
    assert [each[3] for each in perplexities] == ["", "worse", "better"]
    assert perplexities[0][1] == perplexities[0][2] == perplexities[1][1]
    assert bars("damage-1")[0][1] == 0.0, "a divergence of the unmodified model from itself"
    assert [each[3] for each in bars("speed-0")] == ["", "better", "better"]


def test_what_has_no_data_is_left_out() -> None:
    small = Page(scorecard_page(build_scorecard(name="a", artifact_key="b" * 64, recipe={}, metrics=[])))
    assert small.charts == {}
    assert "Nothing was measured." in small.text
    assert "PASS" not in small.text
    assert not [word for word in ("Speed", "Layers", "Training", "Protocols", "Copy") if word in small.text]


def test_memory_follows_phase_by_phase_and_a_pointer_tells_the_peak(page: Page) -> None:
    made, measured = page.charts["memory-made"], page.charts["memory-measured"]
    bands = [record for mark in measured["marks"] if mark["kind"] == "rect" for record in mark["data"]]
    names = ["open", "warming up", "throughput", "perplexity"]
    assert [(band["of"], band["name"]) for band in bands] == [
        (of, name) for of in ("unmodified", "artifact") for name in names
    ]
    assert [band["begin"] for band in bands] == [0.0, *(band["end"] for band in bands[:-1])]
    line = next(mark for mark in measured["marks"] if mark["kind"] == "lineY")
    assert [record["phase"] for record in line["data"]] == sorted(record["phase"] for record in line["data"])
    assert line["data"][0]["hint"] == "unmodified: open\n3.0 s, at most 900 MB"
    on_gpu = [mark["data"] for mark in made["marks"] if mark["options"].get("y") == "allocated"]
    assert [record["allocated"] for record in on_gpu[0]] == [0, 300_000_000, 200_000_000]
    assert "on the GPU 300 MB" in on_gpu[0][0]["hint"]
    assert "Not read: lora_recover, made by an earlier optkit." in page.text
    assert "the process that is timed alone, in the first of its turns" in page.text


def test_a_failed_number_and_a_gate_on_it_are_said() -> None:
    broken = perplexity(2.0).model_copy(update={"failure": "memory ran out on cpu"})
    card = build_scorecard(
        name="a", artifact_key="b" * 64, recipe={}, metrics=[broken], gates={"perplexity": "<= 9"}
    )  # fmt: skip
    page = Page(scorecard_page(card))
    assert "FAIL perplexity: failed, limit <= 9 (memory ran out on cpu)" in " ".join(page.text.split())
    assert page.attributes("data-value") == ["", "", ""]


def test_markup_in_names_is_text(card: Scorecard) -> None:
    hostile = build_scorecard(
        name=EVIL,
        artifact_key="c" * 64,
        recipe={"name": EVIL, "model": {"name": EVIL, EVIL: EVIL}, "stages": [{EVIL: {EVIL: EVIL}}]},
        metrics=[perplexity(2.0).model_copy(update={"labels": {EVIL: EVIL}, "protocol": EVIL})],
        baseline=[perplexity(2.1).model_copy(update={"labels": {EVIL: EVIL}, "protocol": EVIL})],
        settings=(EVIL,),
        notes=(EVIL,),
        environment={EVIL: EVIL, "device_name": EVIL},
    )
    page, plain = Page(scorecard_page(hostile)), Page(scorecard_page(card))
    assert len(page.scripts) == len(plain.scripts) == 3
    assert page.scripts[1:] == plain.scripts[1:]
    assert "img" not in [tag for tag, _ in page.tags]
    assert page.charts["ratios"]["rows"] == ["perplexity"]
    assert page.text.count(EVIL) >= 8


def test_marks_that_turn_the_direction_of_text_are_shown() -> None:
    card = build_scorecard(name="a\u202eb", artifact_key="b" * 64, recipe={}, metrics=[count("c\u202ed", 3.0)])
    assert "a\\u202eb" in scorecard_page(card)
    assert "\u202e" not in scorecard_page(card)


def test_json_holds_no_letter_that_html_reads() -> None:
    text = json_in_html({"</script>": "<!-- & \u2028"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"</script>": "<!-- & \u2028"}


def test_the_policy_lets_nothing_be_asked_for(page: Page) -> None:
    (policy,) = [each["content"] for tag, each in page.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert [each for name in ("src", "srcset", "action", "poster") for each in page.attributes(name)] == []
    assert page.attributes("href") == ["data:,"]


def test_it_is_small(card: Scorecard) -> None:
    assert len(scorecard_page(card).encode()) < 450_000


def test_heads_of_the_table_are_buttons_and_fields_have_names(page: Page) -> None:
    tags = [tag for tag, _ in page.tags]
    head = tags[tags.index("thead") : tags.index("tbody")]
    assert head.count("th") == head.count("button") == 5
    (field,) = [each for tag, each in page.tags if tag == "input"]
    assert field["aria-label"].startswith("Filter the rows")


def test_the_command_writes_the_recipe_and_runs_it(card: Scorecard, tmp_path: Path) -> None:
    words = command(card)
    (tmp_path / "optkit").write_text('#!/bin/sh\necho ran "$@"\n')
    (tmp_path / "optkit").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", words], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stdout == "ran run llama_int4.yaml\n"
    assert YAML(typ="safe").load(tmp_path / "llama_int4.yaml") == card.recipe


@pytest.mark.parametrize("name", ["-rf", "a b; touch evil", "$(touch evil)", "'; touch evil #"])
def test_the_command_holds_hostile_names(card: Scorecard, tmp_path: Path, name: str) -> None:
    recipe = {**card.recipe, "name": name, "description": "first\nRECIPE\ntouch evil"}
    words = command(card.model_copy(update={"name": name, "recipe": recipe}))
    subprocess.run(["sh", "-c", words], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True)
    (written,) = tmp_path.iterdir()
    assert YAML(typ="safe").load(written) == recipe


def test_paper_has_room_for_the_first_chart_and_for_few_more() -> None:
    charts = [Chart(f"c{index}", "t", [], {}, rows=["row"] * 20) for index in range(9)]
    assert printed(charts) == {"c0", "c1", "c2", "c3"}
    assert printed(charts[:1], most=1) == {"c0"}


def test_the_schema_of_scorecards_is_that_of_the_file(card: Scorecard, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "scorecard"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == "urn:optkit:scorecard:1"
    document = json.loads(to_json(card))
    Draft202012Validator(schema).validate(document)
    assert {*document} == {*schema["properties"]}
    for wrong in ({"schema": 2}, {"rows": 3}, {"more": 1}, {"verdict": "MAYBE"}):
        assert not Draft202012Validator(schema).is_valid(document | wrong)


def test_the_tiles_are_what_has_a_gate_and_what_readers_look_for(page: Page) -> None:
    def tiles(shown: Page) -> int:
        return [each.get("class") for tag, each in shown.tags if tag == "div"].count("tile")

    assert tiles(page) == 6
    other = build_scorecard(name="a", artifact_key="b" * 64, recipe={}, metrics=[count("strokes", 3.0, "strokes")])
    assert tiles(Page(scorecard_page(other))) == 1
