import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from optkit.artifact import is_artifact, publish, read_artifact
from optkit.common.own_files import OWN_FILES, RECORD
from optkit.errors import ArtifactError, StoreError
from optkit.store.out_directory import reserve, settle
from optkit.store.store import Store

RECORD_FIELDS = {
    "name": "x",
    "key": "k1",
    "weights_key": "w",
    "baseline_key": "b",
    "created": "2026-01-01T00:00:00Z",
    "optkit": "0.1.0",
    "recipe": {"model": {"name": "tiny"}},
    "settings": (),
    "steps": (),
}


@pytest.fixture
def weights(tmp_path):
    store = Store(tmp_path / "store")
    with store.write("w") as draft:
        (draft.model / "config.json").write_text("{}")
        (draft.model / "model.safetensors").write_text("weights")
    return store


def publish_from(store, out, key="k1"):
    with reserve(out, store.root):
        return publish(store.get("w"), out, {**RECORD_FIELDS, "key": key}, store.record("w")["files"])


def test_a_published_artifact_is_read_back(weights, tmp_path):
    out = tmp_path / "out"
    made = publish_from(weights, out)
    read = read_artifact(out)
    assert read == made
    assert sorted(read.record.files) == ["config.json", "model.safetensors"]
    read.check()


def test_weights_from_the_store_take_no_space_twice(weights, tmp_path):
    publish_from(weights, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").samefile(weights.get("w") / "model.safetensors")


def test_an_onnx_model_from_the_store_opens_where_onnx_refuses_hard_links(tmp_path):
    onnx = pytest.importorskip("onnx")
    table = onnx.numpy_helper.from_array(np.arange(64, dtype=np.float32), "table")
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [64])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["table"], ["y"])], "g", [], [result], [table])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    store = Store(tmp_path / "store")
    with store.write("w") as draft:
        onnx.save(
            model, draft.model / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
        )
    made = publish_from(store, tmp_path / "out")
    opened = onnx.load(made.directory / "model.onnx")
    onnx.checker.check_model(made.directory / "model.onnx")
    assert onnx.numpy_helper.to_array(opened.graph.initializer[0]).tolist() == list(range(64))
    made.check()
    recorded = {name: known["sha256"] for name, known in made.record.files.items()}
    assert recorded == {name: known["sha256"] for name, known in store.record("w")["files"].items()}
    assert publish_from(store, tmp_path / "out") == made


def test_weights_of_the_user_are_copied(weights, tmp_path):
    with reserve(tmp_path / "out", weights.root):
        publish(weights.get("w"), tmp_path / "out", RECORD_FIELDS)
    copy = tmp_path / "out" / "model.safetensors"
    assert copy.read_text() == "weights"
    assert not copy.samefile(weights.get("w") / "model.safetensors")


def test_the_same_artifact_stays_as_it_is_with_its_scorecard(weights, tmp_path):
    out = tmp_path / "out"
    publish_from(weights, out).attach("scorecard.json", "{}")
    publish_from(weights, out)
    assert (out / "scorecard.json").read_text() == "{}"


def test_the_own_files_of_an_artifact_that_a_model_came_from_are_not_its_weights(tmp_path):
    store = Store(tmp_path / "store")
    with store.write("w") as draft:
        for name in (*OWN_FILES, "scorecard_files/a/b.svg", "config.json", "sub/optkit.json"):
            (draft.model / name).parent.mkdir(exist_ok=True, parents=True)
            (draft.model / name).write_text("{}")
    assert sorted(publish_from(store, tmp_path / "out").record.files) == ["config.json", "sub/optkit.json"]


def test_another_artifact_replaces_it_and_its_scorecard(weights, tmp_path):
    out = tmp_path / "out"
    publish_from(weights, out).attach("scorecard.json", "{}")
    publish_from(weights, out, key="k2")
    assert read_artifact(out).record.key == "k2"
    assert not (out / "scorecard.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_a_damaged_artifact_is_published_again(weights, tmp_path):
    out = tmp_path / "out"
    publish_from(weights, out)
    (out / "config.json").unlink()
    with pytest.raises(
        ArtifactError, match=r"1 of 2 files are missing or were changed: config.json\. Run its recipe again"
    ):
        read_artifact(out).check()
    publish_from(weights, out)
    read_artifact(out).check()


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(StoreError, match=r"holds files that optkit did not write\. They would be replaced\. Empty it"),
        reserve(tmp_path, tmp_path.parent / "store"),
    ):
        pass
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("out", "model", "said"),
    [
        ("a", "a", "is the model itself"),
        ("a/b", "a", "lies in the model's directory"),
        ("a", "a/b/model.gguf", "holds the model"),
        ("a/b", "link", "lies in the model's directory"),
    ],
)
def test_an_output_where_the_model_lies_is_refused(tmp_path: Path, out: str, model: str, said: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/config.json").write_text("{}")
    place = (tmp_path / model).resolve()
    why = rf"{out}: {said} \({place}\)\. An artifact is replaced .* Name another directory with --out"
    with pytest.raises(StoreError, match=why), reserve(tmp_path / out, tmp_path / "store", [tmp_path / model]):
        pass
    assert [*(tmp_path / "a").rglob("*.json")] == [tmp_path / "a/b/config.json"]


def test_a_file_as_output_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(StoreError, match="circle: is a link that leads back to itself. Name a directory"):
        reserve(settle(tmp_path / "circle"), tmp_path / "store").__enter__()
    with pytest.raises(StoreError, match="is a file"), reserve(tmp_path / "out", tmp_path / "store"):
        pass


HOLDS = """
import sys, time
from pathlib import Path
from optkit.store.out_directory import reserve
with reserve(Path(sys.argv[1]), Path(sys.argv[2])):
    print("holds", flush=True)
    time.sleep(60)
"""


def test_a_directory_that_another_run_writes_is_refused_until_it_ends(weights, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "out"), str(weights.root)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.readline() == b"holds\n"
    with (
        pytest.raises(StoreError, match="another optkit run is writing there"),
        reserve(tmp_path / "out", tmp_path / "store"),
    ):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    publish_from(weights, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_a_failed_run_leaves_nothing_beside_its_output(tmp_path):
    with pytest.raises(ZeroDivisionError), reserve(tmp_path / "out", tmp_path / "store"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


DIES = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from optkit.artifact import publish
from optkit.store.out_directory import reserve
from optkit.store.store import Store
from tests.run.test_artifact import RECORD_FIELDS
out, store = Path(sys.argv[2]), Store(Path(sys.argv[3]))
rename = Path.rename
Path.rename = lambda path, target: os._exit(9) if "draft" in path.name else rename(path, target)
with reserve(out, store.root):
    publish(store.get("w"), out, {**RECORD_FIELDS, "key": "k2"})
"""


def test_an_artifact_that_a_killed_run_moved_aside_is_put_back(weights, tmp_path):
    made = publish_from(weights, tmp_path / "out")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", DIES, root, str(tmp_path / "out"), str(weights.root)], check=False, cwd=root
    )
    assert done.returncode == 9
    assert not (tmp_path / "out").exists()
    with reserve(tmp_path / "out", weights.root):
        assert read_artifact(tmp_path / "out") == made
        made.check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_an_artifact_stays_where_the_new_one_cannot_take_its_place(weights, tmp_path, monkeypatch):
    made = publish_from(weights, tmp_path / "out")
    rename = Path.rename

    def fails(path, target):
        if "draft" in path.name:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(StoreError, match=r"cannot write the artifact\. Permission denied"):
        publish_from(weights, tmp_path / "out", key="k2")
    assert read_artifact(tmp_path / "out") == made
    made.check()


@pytest.mark.parametrize(
    ("out", "how"),
    [
        ("o", "holds the store"),
        ("o/store", "is the store itself"),
        ("o/store/steps/x", "lies in the store"),
        ("link/x", "lies in"),
    ],
)
def test_an_artifact_and_the_store_never_lie_in_each_other(tmp_path, out, how):
    store = Store(tmp_path / "o" / "store")
    with store.write("w") as draft:
        (draft.model / "config.json").write_text("{}")
    (tmp_path / "o" / RECORD).write_text("{}")
    (tmp_path / "link").symlink_to(store.root)
    expected = (
        rf"{how}.*An artifact is replaced as a whole, and finished steps would go with it\. Name "
        r"another directory with --out"
    )
    with pytest.raises(StoreError, match=expected), reserve(tmp_path / out, store.root):
        pass
    assert store.get("w")


def test_what_is_no_artifact_is_said(tmp_path):
    with pytest.raises(ArtifactError, match="no such directory. Name a directory that `optkit run` wrote"):
        read_artifact(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"there is no optkit.json\. It was not made by `optkit run`\. To measure"):
        read_artifact(tmp_path)
    (tmp_path / RECORD).write_text("{half")
    assert is_artifact(tmp_path)
    with pytest.raises(ArtifactError, match="optkit.json: cannot be read"):
        read_artifact(tmp_path)
    (tmp_path / RECORD).write_text('{"optkit_artifact": 99}')
    with pytest.raises(ArtifactError, match="schema 99 is newer than this optkit"):
        read_artifact(tmp_path)


def test_a_link_as_output_stays_and_what_it_leads_to_is_written(weights, tmp_path, monkeypatch):
    (tmp_path / "big disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "big disk")
    assert settle(link) == tmp_path / "big disk"
    assert settle(tmp_path / "plain") == tmp_path / "plain"
    monkeypatch.chdir(tmp_path)
    assert settle(Path()) == tmp_path
    assert settle(Path("..")) == tmp_path.parent


def test_the_directory_that_one_is_in_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with (
        pytest.raises(StoreError, match=r"here: is the directory that you are in\. It would be replaced\."),
        reserve(settle(Path()), tmp_path / "store"),
    ):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_a_schema_that_is_no_number_is_damage(weights, tmp_path):
    publish_from(weights, tmp_path / "out")
    (tmp_path / "out" / RECORD).write_text('{"optkit_artifact": "2"}')
    with pytest.raises(ArtifactError, match=r"optkit.json: cannot be read. [a-z_]+: Field required. "):
        read_artifact(tmp_path / "out")


def test_files_of_the_user_inside_an_artifact_are_not_lost(weights, tmp_path):
    out = tmp_path / "out"
    publish_from(weights, out).attach("scorecard.md", "numbers")
    (out / ".scorecard.md.1234").write_text("left by kill -9")
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("thoughts")
    assert publish_from(weights, out).record.key == "k1"
    with pytest.raises(
        StoreError, match=r"would be replaced, and with it files that optkit did not write: notes/mine.txt\. Move them"
    ):
        publish_from(weights, out, key="k2")
    assert (out / "notes" / "mine.txt").read_text() == "thoughts"
    (out / "notes" / "mine.txt").unlink()
    assert publish_from(weights, out, key="k2").record.key == "k2"


def test_an_artifact_whose_record_is_unreadable_is_not_replaced(weights, tmp_path):
    publish_from(weights, tmp_path / "out")
    (tmp_path / "out" / RECORD).write_text("{")
    with pytest.raises(
        ArtifactError, match=r"optkit.json: cannot be read as JSON\. .* Delete the directory and run its recipe again"
    ):
        publish_from(weights, tmp_path / "out")
