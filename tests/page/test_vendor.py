"""What the pages are drawn with is what `make vendor` made, and can stand inside a page."""

import hashlib
import json
from pathlib import Path

from optkit.page.render import HERE, LIBRARY, SCRIPTS, STYLE

VENDOR = HERE / "vendor"
ROOT = Path(__file__).parents[2]


def test_the_bundle_is_the_one_that_was_built() -> None:
    sums = dict(line.split()[::-1] for line in (VENDOR / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    assert set(sums) == {"plot.js", "LICENSES.txt"}
    for name, known in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == known, f"{name}: run `make vendor`"


def test_packages_are_pinned_with_digests() -> None:
    wanted = json.loads((VENDOR / "package.json").read_text(encoding="utf-8"))
    lock = json.loads((VENDOR / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    asked = wanted["dependencies"] | wanted["devDependencies"]
    assert {name: lock[f"node_modules/{name}"]["version"] for name in asked} == asked
    assert all(each["integrity"].startswith("sha512-") for name, each in lock.items() if name)
    licences = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    assert f"@observablehq/plot {asked['@observablehq/plot']} (ISC)" in licences


def test_the_library_is_small() -> None:
    assert LIBRARY.stat().st_size < 350_000


def test_scripts_and_style_end_nothing_that_they_stand_in() -> None:
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8").lower()
        assert not [each for each in ("</script", "<script", "<!--", "\r") if each in text], path
    assert "</style" not in STYLE.read_text(encoding="utf-8").lower()
    assert "url(" not in STYLE.read_text(encoding="utf-8")


def test_marks_that_charts_name_are_in_the_bundle() -> None:
    import typing

    from optkit.page.charts.chart import Mark

    kinds = typing.get_args(typing.get_type_hints(Mark)["kind"])
    exported = (VENDOR / "entry.js").read_text(encoding="utf-8").replace(",", " ").split()
    assert set(kinds) - {"numbers"} <= set(exported)


def test_make_builds_it() -> None:
    assert "optkit/page/vendor/build.sh" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert (VENDOR / "build.sh").stat().st_mode & 0o111
