"""Which files of a model directory reach an artifact: those that lie in it, and of them the kinds
that travel with weights.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from optkit import pipeline
from optkit.errors import SourceError
from optkit.model.checkpoint import INDEX, Checkpoint
from optkit.model.companions import belongs_to_model, find_companions, lies_inside, published_files, require_inside
from optkit.model.pooling import missing_modules
from optkit.source.digests import FileDigests
from optkit.source.directory import check_directory, directory_revision, left_out

STAGES = {"settings alone": "  - attention: sdpa\n", "a stage": "  - rtn: {group_size: 32}\n"}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "secret").write_text("another's")
    return place / "secret"


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path, secret: Path) -> Path:
    """Return a model directory with files that are nobody's to publish."""
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (model / "vocab.txt").symlink_to(secret)
    (model / "README.md").symlink_to(os.path.relpath(secret, model))
    (model / "more").symlink_to(secret.parent)
    (model / "gone.json").symlink_to(model / "absent")
    (model / ".env").write_text("KEY=1")
    (model / "notes.txt").write_text("mine")
    (model / "modeling.py").write_text("raise SystemExit")
    (model / "LICENSE").write_text("free")
    (model / "inner.jinja").symlink_to("LICENSE")
    return model


@pytest.mark.parametrize("kind", STAGES)
def test_no_file_of_others_is_published(kind: str, model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: it\nmodel: {model}\nstages:\n{STAGES[kind]}evals:\n  - footprint\n", encoding="utf-8")
    scorecard = pipeline.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert {"LICENSE", "inner.jinja", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {".env", "notes.txt", "vocab.txt", "README.md", "more", "more/secret", "modeling.py"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    said = [note for note in scorecard.notes if "the artifact does not have" in note]
    assert said == [
        "files beside the model that the artifact does not have: .env (of no kind that travels with a "
        "model), README.md (leads out of the"
        " directory), gone.json (leads out of the directory), modeling.py (code, and the recipe does "
        "not trust the model's) and 3 more"
    ]


def test_what_a_trusted_model_has(model: Path) -> None:
    assert "modeling.py" in find_companions(model, trusted=True).kept
    assert "modeling.py" in published_files(model, trusted=True)
    assert "modeling.py" not in published_files(model, trusted=False)


def test_an_ordinary_model_leaves_nothing_out(tiny_model: Callable[[str], Path]) -> None:
    assert left_out(tiny_model("llama"), False) == ""
    assert set(published_files(tiny_model("llama"), False)) == {path.name for path in tiny_model("llama").iterdir()}


def test_what_optkit_leaves_beside_an_artifact_is_not_spoken_of(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (model / "optkit.json").write_text("{}")
    (model / ".gitattributes").write_text("")
    assert left_out(model, False) == ""


def test_links_out_of_it_do_not_decide_what_a_model_is(model: Path, secret: Path, tmp_path: Path) -> None:
    digests = FileDigests(tmp_path / "digests")
    before = directory_revision(model, check_directory(model, False), digests)
    secret.write_text("changed")
    assert directory_revision(model, check_directory(model, False), digests) == before
    (model / "notes.txt").write_text("changed")
    assert directory_revision(model, check_directory(model, False), digests) != before


def snapshot_of(model: Path, cache: Path) -> Path:
    """Return a snapshot as the hub's cache lays it out: links to blobs of the same repository."""
    blobs, snapshot = cache / "models--a--b" / "blobs", cache / "models--a--b" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        shutil.copyfile(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    return snapshot


def test_a_snapshot_of_the_hub_consists_of_links(
    tiny_model: Callable[[str], Path], tmp_path: Path, secret: Path
) -> None:
    snapshot = snapshot_of(tiny_model("llama"), tmp_path / "hub")
    assert set(published_files(snapshot, False)) == {path.name for path in tiny_model("llama").iterdir()}
    Checkpoint(snapshot)
    (snapshot / "vocab.txt").symlink_to(secret)
    other = tmp_path / "hub" / "models--x--y" / "blobs"
    other.mkdir(parents=True)
    (other / "z").write_text("z")
    (snapshot / "merges.txt").symlink_to(other / "z")
    assert not lies_inside(snapshot, snapshot / "vocab.txt")
    assert not lies_inside(snapshot, snapshot / "merges.txt")


class TestWeights:
    @pytest.mark.parametrize("place", ["../elsewhere/model.safetensors", "/elsewhere/model.safetensors"])
    def test_an_index_names_files_of_the_directory_alone(self, place: str, model: Path, tmp_path: Path) -> None:
        named = place if place.startswith("..") else str(tmp_path / "elsewhere" / "model.safetensors")
        shutil.move(model / "model.safetensors", tmp_path / "elsewhere" / "model.safetensors")
        (model / INDEX).write_text(json.dumps({"weight_map": {"a": named}}))
        with pytest.raises(SourceError) as caught:
            Checkpoint(model)
        assert str(caught.value) == (
            f"{model}: {INDEX} names {named}, outside of the directory. A model's files lie in its "
            "directory; others would reach the"
            " artifact. Copy the file into the directory, or name the directory that it lies in."
        )

    def test_modules_of_an_encoder(self, model: Path) -> None:
        (model / "modules.json").write_text(
            '[{"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}]'
        )
        with pytest.raises(
            SourceError,
            match=r'modules\.json: is no list of modules\. "\.\./elsewhere" is no file inside the directory\.',
        ):
            missing_modules(model)

    def test_an_index_names_files_by_text(self, model: Path) -> None:
        (model / INDEX).write_text('{"weight_map": {"a": 5}}')
        with pytest.raises(SourceError, match="is not an index of safetensors. a: 5 is not text"):
            Checkpoint(model)

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_links_out_of_the_directory(self, name: str, model: Path, tmp_path: Path) -> None:
        shutil.move(model / name, tmp_path / "elsewhere" / name)
        (model / name).symlink_to(tmp_path / "elsewhere" / name)
        with pytest.raises(
            SourceError, match=rf"{name} leads out of the directory\. A model's files lie in its directory"
        ):
            Checkpoint(model)

    def test_a_directory_may_itself_be_a_link(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(model)
        assert Checkpoint(tmp_path / "link").tensors
        assert require_inside(tmp_path / "link", "LICENSE") == tmp_path / "link" / "LICENSE"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("README.md", True),
        ("Third_Party_Notices.txt", True),
        ("Gemma-License.pdf", True),
        ("LICENSES/MIT.txt", True),
        ("1_Pooling/config.json", True),
        ("adapter/adapter_config.json", True),
        ("adapter/adapter_model.safetensors", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("1_Pooling/deep/x.json", False),
        ("onnx/model.json", False),
        ("original/params.json", False),
        ("consolidated.safetensors", False),
        ("pytorch_model.bin.index.json", False),
        ("notes.txt", False),
        ("modeling.py", False),
    ],
)
def test_files_of_a_repository(name: str, wanted: bool) -> None:
    assert belongs_to_model(name) is wanted
    assert belongs_to_model("modeling.py", trusted=True)
    assert not belongs_to_model("scripts/run.py", trusted=True)
