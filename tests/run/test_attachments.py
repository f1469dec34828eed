"""What an eval leaves beside its numbers: kept with them, published with the scorecard, replaced with the eval."""

import json
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import optkit_evals
import pytest
from optkit_cli.main import main

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.common.attachment import MOST_BYTES, Attachment
from optkit.common.own_files import ATTACHMENTS, is_own
from optkit.errors import ArtifactError, EvalError, OptkitError
from optkit.measure import Eval, EvalContext, Found, Metric, Opened, TimedEval
from optkit.recipe import registry
from optkit.recipe.recipe import load_recipe
from optkit.scorecard.published import published_attachments
from tests.support.changes import change_json
from tests.support.command_line import spoken

RECIPE = """\
name: tiny
model: {model}
stages: [cast: {{dtype: bfloat16}}]
evals: [{evals}]
"""
COUNTED: list[str] = []
pytestmark = pytest.mark.usefixtures("children_here")


class Sketch(Eval):
    """Draws something, once for each model."""

    kind: ClassVar[str] = "sketch"
    metrics: ClassVar[dict[str, str]] = {"strokes": ""}

    strokes: int = 3
    colour: str = "red"
    pages: tuple[str, ...] = ("sketch.svg",)

    def run(self, session: Opened, context: EvalContext) -> Iterator[Metric | Attachment]:
        COUNTED.append(self.colour)
        yield Metric(name="strokes", value=self.strokes, unit="", higher_is_better=True, protocol=self.colour)
        for page in self.pages:
            text = f'<svg xmlns="http://www.w3.org/2000/svg"><desc>{self.colour} {session.directory}</desc></svg>'
            yield Attachment(page, text.encode(), "image/svg+xml")


class TimedSketch(TimedEval):
    """Leaves a file in each turn."""

    kind: ClassVar[str] = "timed_sketch"
    metrics: ClassVar[dict[str, str]] = {"rate": "1/s"}

    def run(self, session: Opened, context: EvalContext) -> Iterator[Metric | Attachment]:
        turn = context.turn.index
        yield Metric(
            name="rate", value=1 + turn, unit="1/s", higher_is_better=True, protocol="", pairing="paired_turns"
        )
        yield Attachment("turn.bin", bytes([turn]))


IMPORTS = """\
from collections.abc import Iterator, Mapping
from typing import ClassVar
from optkit.measure import Attachment, Eval, EvalContext, Metric, Session
"""
README = Path(optkit_evals.__file__).with_name("README.md")


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    for each in (Sketch, TimedSketch):
        monkeypatch.setitem(registry.EVALS, each.kind, f"{__name__}:{each.__name__}")
    shutil.copytree(tiny_model("llama"), tmp_path / "mine")
    COUNTED.clear()
    return tmp_path


def run(desk: Path, evals: str) -> dict[str, Any]:
    (desk / "tiny.yaml").write_text(RECIPE.format(model=desk / "mine", evals=evals), encoding="utf-8")
    assert main(["run", "tiny.yaml", "--out", "out", "--device", "cpu", "--quiet"]) == 0
    card: dict[str, Any] = json.loads((desk / "out" / "scorecard.json").read_text(encoding="utf-8"))
    return card


def left(desk: Path) -> list[str]:
    folder = desk / "out" / ATTACHMENTS
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_an_eval_leaves_files_through_a_run_and_through_a_cached_one(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = run(desk, "sketch, footprint")
    assert left(desk) == ["sketch-unmodified/sketch.svg", "sketch/sketch.svg"]
    drawn = (desk / "out" / ATTACHMENTS / "sketch" / "sketch.svg").read_bytes()
    assert b"red" in drawn
    assert card["files"][0] == {
        "path": f"{ATTACHMENTS}/sketch/sketch.svg",
        "media_type": "image/svg+xml",
        "size_bytes": len(drawn),
        "sha256": sha256(drawn).hexdigest(),
    }
    page = (desk / "out" / "scorecard.md").read_text(encoding="utf-8")
    assert f"![sketch]({ATTACHMENTS}/sketch/sketch.svg)" in page
    assert f"- [{ATTACHMENTS}/sketch-unmodified/sketch.svg]" in page
    assert f"{ATTACHMENTS}/sketch/sketch.svg: image/svg+xml" in (desk / "out" / "scorecard.html").read_text("utf-8")
    assert f"file  {ATTACHMENTS}/sketch/sketch.svg" in spoken(capsys, "show", "out", "--verbose")[0]
    assert COUNTED == ["red", "red"]
    shutil.rmtree(desk / "out")
    assert run(desk, "sketch, footprint")["files"] == card["files"]
    assert (desk / "out" / ATTACHMENTS / "sketch" / "sketch.svg").read_bytes() == drawn
    assert COUNTED == ["red", "red"]


def test_a_changed_eval_replaces_its_files_and_one_that_is_gone_takes_them_along(desk: Path) -> None:
    run(desk, "sketch, sketch: {colour: blue, pages: [b.svg]}")
    weights = (desk / "out" / "model.safetensors").stat().st_ino
    assert left(desk) == [f"sketch{end}/{name}" for end, name in (
        ("-2-unmodified", "b.svg"), ("-2", "b.svg"), ("-unmodified", "sketch.svg"), ("", "sketch.svg"))]  # fmt: skip
    run(desk, "sketch: {colour: green, pages: [new.svg]}")
    assert left(desk) == ["sketch-unmodified/new.svg", "sketch/new.svg"]
    assert b"green" in (desk / "out" / ATTACHMENTS / "sketch" / "new.svg").read_bytes()
    assert run(desk, "footprint")["files"] == []
    assert not (desk / "out" / ATTACHMENTS).exists()
    assert (desk / "out" / "model.safetensors").stat().st_ino == weights
    assert read_artifact(desk / "out").record.attachments == ()


def test_they_deploy_nothing_and_name_no_place_of_this_machine(desk: Path) -> None:
    run(desk, "sketch")
    for name in left(desk):
        assert str(desk / "mine") not in (desk / "out" / ATTACHMENTS / name).read_text(encoding="utf-8")
        assert is_own(f"{ATTACHMENTS}/{name}")
    assert all(check.ok for check in pipeline.verify(desk / "out", engines=()).checks)
    assert left(desk) == ["sketch-unmodified/sketch.svg", "sketch/sketch.svg"]
    pipeline.run(
        load_recipe({"name": "next", "model": str(desk / "out"), "evals": ["footprint"]}),
        out=desk / "next", device="cpu", store=desk / "store",
    )  # fmt: skip
    assert not (desk / "next" / ATTACHMENTS).exists()


def test_bytes_that_are_no_text_stay_as_they_are(desk: Path) -> None:
    recipe = load_recipe({"model": str(desk / "mine"), "evals": ["footprint"]}).pinned(None)
    odd, place = b"\xff\xfe\x00", str(desk / "mine").encode()
    files = {"a": Attachment("a.csv", odd + place, "text/csv"), "b": Attachment("b.bin", odd + place)}
    done = published_attachments(files, recipe)
    assert done["a"].content == odd + b"mine"
    assert done["b"].content == odd + place


def test_of_the_turns_of_a_timed_eval_the_last_leaves_its_files(desk: Path) -> None:
    run(desk, "timed_sketch: {processes: 2, isolated: false}")
    assert left(desk) == ["timed_sketch-unmodified/turn.bin", "timed_sketch/turn.bin"]
    assert (desk / "out" / ATTACHMENTS / "timed_sketch" / "turn.bin").read_bytes() == bytes([1])


def test_they_are_the_same_as_json() -> None:
    metric = Metric(name="n", value=1.0, unit="", higher_is_better=True, protocol="")
    found = Found((metric,), (Attachment("a.bin", bytes(range(256))),))
    assert Found.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert Found.from_json({"metrics": []}) == Found(())


@pytest.mark.parametrize(
    ("name", "content", "media_type", "message"),
    [
        *((name, b"", "text/csv", "is no name for a file") for name in ("", "..", ".a", "a/b", "a\\b", "a\n", "ä")),
        ("a" * 101, b"", "text/csv", "100 of them at most"),
        ("a.csv", b"", "csv", "'csv' is no media type. Name one such as"),
        ("a.csv", "text", "text/csv", "its content is str and not bytes. Encode it as UTF-8"),
        ("a.csv", bytes(MOST_BYTES + 1), "text/csv", "and at most 33.6 MB are kept"),
    ],
)  # fmt: skip
def test_files_that_are_refused(name: str, content: Any, media_type: str, message: str) -> None:
    with pytest.raises(EvalError, match=message):
        Attachment(name, content, media_type)


def test_two_files_of_one_name_are_refused(desk: Path) -> None:
    with pytest.raises(EvalError, match="sketch: it leaves two files named A.svg. Give each its own name"):
        pipeline.run(
            load_recipe({"model": str(desk / "mine"), "evals": [{"sketch": {"pages": ["a.svg", "A.svg"]}}]}),
            out=desk / "out", device="cpu", store=desk / "store",
        )  # fmt: skip


@pytest.mark.parametrize("name", ["../x", f"{ATTACHMENTS}/../model.safetensors", "model.safetensors", "/etc/x"])
def test_a_record_cannot_have_other_files_deleted(desk: Path, name: str) -> None:
    run(desk, "sketch")
    change_json(desk / "out" / "optkit.json", attachments=[name])
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_artifact(desk / "out")


def test_a_folder_that_leads_elsewhere_is_not_written_to(desk: Path) -> None:
    run(desk, "sketch")
    shutil.rmtree(desk / "out" / ATTACHMENTS)
    (desk / "elsewhere").mkdir()
    (desk / "out" / ATTACHMENTS).symlink_to(desk / "elsewhere", target_is_directory=True)
    with pytest.raises(OptkitError, match="scorecard_files/sketch.* leads out of the directory. .* Delete that link"):
        read_artifact(desk / "out").replace_attachments({"sketch/sketch.svg": b""})
    assert not list((desk / "elsewhere").rglob("*.svg"))


def test_the_eval_of_the_readme_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = README.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (desk / "lengths_of_readme.py").write_text(IMPORTS + example, encoding="utf-8")
    monkeypatch.syspath_prepend(str(desk))
    monkeypatch.setitem(registry.EVALS, "lengths", "lengths_of_readme:Lengths")
    card = run(desk, "lengths")
    tokens = (desk / "out" / ATTACHMENTS / "lengths" / "tokens.csv").read_text(encoding="utf-8")
    assert len(tokens.splitlines()) == card["rows"][0]["metric"]["value"]
