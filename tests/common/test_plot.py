"""Pictures: what is drawn lies in its frame, is escaped, and has round numbers beside it."""

from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optkit.common.markdown import markdown_table
from optkit.common.plot import Axis, Key, Line, Panel, Point, even_axis, picture, powers_axis, round_numbers

SVG = "{http://www.w3.org/2000/svg}"
UNIT = Axis((0, 1), [(0, "0"), (1, "1")], "a < b")


def test_each_mark_lies_where_its_axes_say() -> None:
    points = [Point(0, 0, "dot", 'x & "y"'), Point(0.5, 1, "ring"), Point(1, 0.25, "square")]
    lines = [Line(points, "#123456"), Line([Point(1, 0.5, "dot")], "#654321", width=0)]
    panel = Panel("a title", UNIT, UNIT, lines)
    drawn = picture([panel], heading=["h"], legend=[Key("k", "#123456")], note="n")
    tree = ElementTree.fromstring(drawn)
    x, y = 78, 22 + 10 + 40
    circles = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in tree.iter(f"{SVG}circle")]
    assert circles == [(x, y + 270), (x + 215, y), (x + 430, y + 135)]
    (square,) = [each for each in tree.iter(f"{SVG}rect") if each.get("fill") == "#123456"]
    assert (float(square.attrib["x"]) + 4, float(square.attrib["y"]) + 4) == (x + 430, y + 202.5)
    assert [each.text for each in tree.iter(f"{SVG}title")] == ['x & "y"']
    assert [each.text for each in tree.iter(f"{SVG}text")] == [
        "h", "a title", "0", "1", "0", "1", "a < b", "k", "n",
    ]  # fmt: skip
    assert len(list(tree.iter(f"{SVG}polyline"))) == 1
    assert float(tree.attrib["height"]) > y + 270


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (5, 2, 3)])
def test_panels_stand_in_rows(count: int, columns: int, rows: int) -> None:
    panel = Panel("t", UNIT, UNIT, [])
    tree = ElementTree.fromstring(picture([panel] * count))
    assert float(tree.attrib["width"]) == columns * (430 + 78 + 26)
    assert len({each.attrib["y"] for each in tree.iter(f"{SVG}text") if each.text == "t"}) == rows


def test_a_legend_that_is_too_long_begins_a_new_row() -> None:
    keys = [Key("many words " * 2, "#000000", dot=True) for _ in range(6)]
    tree = ElementTree.fromstring(picture([Panel("", UNIT, UNIT, [])] * 2, legend=keys))
    places = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in tree.iter(f"{SVG}circle")]
    assert len({y for _, y in places}) == 2
    assert max(x for x, _ in places) < float(tree.attrib["width"])
    assert max(y for _, y in places) < float(tree.attrib["height"])


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
@example(0.0, 5e-324)
@example(1.5, 1e-12)
@example(-360287970.359375, 5.960464477539063e-08)
@example(180143986.0, 5.960464477539063e-08)
def test_round_numbers_lie_around_two(low: float, width: float) -> None:
    around = round_numbers(low, low + width)
    slack = 1e-6 * max(abs(low), abs(low + width), 1)
    assert around[0] <= low + slack
    assert around[-1] >= low + width - slack
    assert 2 <= len(around) <= 8
    axis = even_axis(low, low + width)
    assert -1e-6 <= axis.place(low) <= axis.place(low + width) <= 1 + 1e-6


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=9), st.sampled_from((2, 10)), st.integers(1, 3))
def test_powers_lie_around_all_values(values: list[float], base: int, least: int) -> None:
    axis = powers_axis(values, base, str, least)
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values)
    assert axis.ends[1] / axis.ends[0] >= base**least * (1 - 1e-9)
    assert len(axis.ticks) <= 11


def test_a_table_has_its_bars_escaped() -> None:
    assert markdown_table(("a", "b"), [("1|2", "3")]) == "| a | b |\n| --- | --- |\n| 1\\|2 | 3 |"
    assert markdown_table(("a", "b"), [], numbers=True).splitlines()[1] == "| --- | ---: |"
