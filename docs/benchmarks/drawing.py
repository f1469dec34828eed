"""Charts of optkit's pages as pictures (SVG) that follow the reader's colour scheme."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType

from optkit.page.charts.chart import Chart
from optkit.page.render import SCRIPTS, STYLE, json_in_html
from tests.support.chromium import chromium

WIDTH, EDGE, LINE = 680, 16, 20
"""Of a picture, around it, and of a line of words, in pixels."""
COLUMNS = 100
"""Of a terminal."""
LETTER = 6.6
"""About the width of one, in pixels."""
SHAPES = {
    "dot": '<circle cx="6" cy="-4" r="5" fill="{0}"/>',
    "ring": '<circle cx="6" cy="-4" r="4" fill="none" stroke="{0}" stroke-width="2"/>',
    "diamond": '<path d="M6-10l5 6-5 6-5-6z" fill="{0}"/>',
    "line": '<path d="M-4-4h18" stroke="{0}" stroke-width="3"/>',
    "dashes": '<path d="M-4-4h18" stroke="{0}" stroke-width="2" stroke-dasharray="5 3"/>',
    "tick": '<path d="M6-11v14" stroke="{0}" stroke-width="3"/>',
    "band": '<rect x="-4" y="-10" width="18" height="12" fill="{0}"/>',
}
"""What stands in front of a legend's words."""


def digest(chart: Chart) -> str:
    """Return what tells whether a picture is of this chart."""
    said = json_in_html([chart.title, chart.caption, [vars(key) for key in chart.keys], chart.to_json()])
    return hashlib.sha256(said.encode()).hexdigest()


def drawn(charts: Mapping[str, Chart]) -> dict[str, str]:
    """Return the pictures of charts, drawn by the page's own script in Chromium."""
    width = WIDTH - 2 * EDGE
    places = "".join(f'<div data-chart="{name}" style="width: {width}px"></div>' for name in charts)
    data = json_in_html({name: chart.to_json() for name, chart in charts.items()})
    scripts = "".join(f"<script>{path.read_text(encoding='utf-8')}</script>" for path in SCRIPTS)
    page = f'<meta charset="utf-8">{places}<script type="application/json" id="charts">{data}</script>{scripts}'
    with tempfile.TemporaryDirectory() as directory, chromium(Path(directory) / "profile") as browser:
        path = Path(directory) / "page.html"
        path.write_text(page, encoding="utf-8")
        browser.open(path)
        found = "document.querySelector('[data-chart={}] svg')"
        plots = {
            name: browser.evaluate(f"new XMLSerializer().serializeToString({found.format(name)})") for name in charts
        }
    return {name: _framed(chart, plots[name]) for name, chart in charts.items()}


def terminal(parts: Iterable[RenderableType], title: str) -> str:
    """Return what a command prints as a picture of a terminal, which asks for no font of others' servers."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    for part in [*parts, ""]:
        console.print(part)
    frame = re.sub(r" *@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=frame, unique_id="terminal")


def _framed(chart: Chart, plot: str) -> str:
    """Return a plot below its title and its legend, on the page's colours."""
    colours = STYLE.read_text(encoding="utf-8").split("* {")[0]
    lines, x, y = [], EDGE, EDGE + 14
    lines.append(f'<text x="{x}" y="{y}" font-size="15" font-weight="600">{escape(chart.title)}</text>')
    y += LINE + 4
    for key in chart.keys:
        if x > EDGE and x + 24 + LETTER * len(key.words) > WIDTH - EDGE:
            x, y = EDGE, y + LINE
        mark = SHAPES[key.shape].format(f"var(--{key.colour})")
        lines.append(f'<g transform="translate({x + 4} {y})">{mark}<text x="20">{escape(key.words)}</text></g>')
        x += 44 + int(LETTER * len(key.words))
    top = y + (10 if chart.keys else -LINE)
    size = re.search(r' height="(\d+)"', plot)
    assert size is not None
    height = top + int(size[1]) + EDGE // 2
    inside = plot.replace("<svg ", f'<svg x="{EDGE}" y="{top}" overflow="visible" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="{escape(chart.title)}">\n'
        f"<!-- sha256 {digest(chart)} -->\n<style>{colours}svg {{ color: var(--text); fill: var(--text); }}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="var(--panel)"/>\n'
        + "\n".join([*lines, inside, "</svg>\n"])
    )
