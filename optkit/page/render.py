"""From a template to one HTML file that needs nothing else and can ask for nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit import __version__
from optkit.common.visible import visible_lines
from optkit.page.charts.chart import Chart

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


HERE = Path(__file__).parent
LIBRARY = HERE / "vendor" / "plot.js"
SCRIPTS = (LIBRARY, HERE / "static" / "page.js")
STYLE = HERE / "static" / "page.css"
UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""Letters of JSON that a parser of HTML would read, each as JSON can spell it too."""


def render(template: str, charts: Iterable[Chart], values: Mapping[str, Any]) -> str:
    """Return the page of a template. Whatever is in `values` is shown as text, markup in it too."""
    from markupsafe import Markup

    declared = {chart.name: chart.to_json() for chart in charts}
    scripts, policy = _scripts()
    return (
        _environment()
        .get_template(template)
        .render(
            **values,
            version=__version__,
            policy=policy,
            style=Markup(STYLE.read_text(encoding="utf-8")),
            charts=Markup(json_in_html(declared)),
            scripts=[Markup(script) for script in scripts],
        )
    )


def json_in_html(value: Any) -> str:
    """Return JSON that can stand in a script element: nothing in it ends that, or begins another."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(UNSAFE)


@cache
def _scripts() -> tuple[tuple[str, ...], str]:
    """Return the scripts, and the page's Content-Security-Policy: these, styles in it, no request."""
    scripts = tuple(path.read_text(encoding="utf-8") for path in SCRIPTS)
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return scripts, policy


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible_lines(value) if type(value) is str else value,
    )
    made.filters["breakable"] = _breakable
    return made


def _breakable(text: str) -> Markup:
    """Return a name that may be broken behind its underscores and dots."""
    from markupsafe import Markup, escape

    shown = escape(visible_lines(text))
    return Markup(str(shown).replace("_", "_<wbr>").replace(".", ".<wbr>"))
