"""The hub is never called: its cache is a directory made here, its answers are those that
huggingface_hub would raise or return.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import TensorInfo
from optkit.progress import SilentProgress, SilentTask
from optkit.source.hub import HubRepo
from optkit.source.models import ModelSource, import_model, locate_model, model_key, model_shape, pin_model

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def cached(hub_cache, tiny_model):
    """Put a tiny model into the cache as `org/tiny`, as the hub's own download leaves it: blobs,
    links and a reference.
    """
    root = hub_cache / "models--org--tiny"
    snapshot = root / "snapshots" / OLD
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted(tiny_model("llama").iterdir())):
        blob = root / "blobs" / f"{number:064x}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(OLD, encoding="utf-8")
    return snapshot


@pytest.fixture
def online(monkeypatch):
    """Let the hub be reachable: `online.repo` answers for `repo_info` and `model_info`,
    `online.files` for downloads.
    """
    answers = SimpleNamespace(repo=SimpleNamespace(sha=NEW, siblings=[]), files={}, asked=[], downloaded=[])

    def info(_api, name, **keywords):
        answers.asked.append((name, keywords.get("revision")))
        if isinstance(answers.repo, Exception):
            raise answers.repo
        return answers.repo

    def download(name, file, *, repo_type, revision):
        answers.downloaded.append(file)
        found = answers.files.get(file, errors.RemoteEntryNotFoundError("404", response=response(404)))
        if isinstance(found, Exception):
            raise found
        target = HubRepo(name, repo_type).snapshot(revision) / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, target)
        return str(target)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", info)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return answers


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/org/tiny"))


class TestOffline:
    def test_the_cache_s_own_reference_is_the_commit(self, cached):
        pinned = pin_model(ModelSource(name="org/tiny"))
        assert pinned == ModelSource(name="org/tiny", revision=OLD)
        assert pin_model(pinned) == pinned
        assert locate_model(pinned) == cached
        assert model_shape(pinned, None).tensors == Checkpoint(cached).tensors

    def test_a_tag_that_the_cache_knows(self, cached, hub_cache):
        (hub_cache / "models--org--tiny" / "refs" / "v1").write_text(OLD, encoding="utf-8")
        assert pin_model(ModelSource(name="org/tiny", revision="v1")).revision == OLD

    def test_nothing_cached_says_what_was_looked_for_and_where(self, hub_cache):
        with pytest.raises(SourceError) as caught:
            pin_model(ModelSource(name="org/tiny", revision="v2"))
        assert str(caught.value) == (
            "org/tiny: the model is neither here nor to be downloaded. The hub is switched off "
            "(HF_HUB_OFFLINE), and the revision v2"
            f" is not in its cache: there is no {hub_cache}/models--org--tiny/refs/v2. There is no directory "
            f"{Path('org/tiny').absolute()}"
            " either. Connect and run: hf download org/tiny, then copy the cache, or name a local directory."
        )
        with pytest.raises(
            SourceError, match="hf download org/tiny --repo-type dataset, then .*, or name a local .txt or .jsonl file"
        ):
            HubRepo("org/tiny", "dataset").commit()

    def test_a_commit_that_is_not_cached(self, cached):
        with pytest.raises(
            SourceError, match=f"config.json is not in its cache: there is no .*/snapshots/{NEW}/config.json"
        ):
            pin_model(ModelSource(name="org/tiny", revision=NEW))

    @pytest.mark.parametrize("lost", ["model.safetensors", "config.json", "tokenizer"])
    def test_a_snapshot_in_part_is_not_used(self, cached, lost):
        for file in cached.glob(f"{lost}*"):
            file.unlink()
        pinned = ModelSource(name="org/tiny", revision=OLD)
        assert locate_model(pinned) is None
        with pytest.raises(SourceError, match="the whole snapshot is not in its cache"):
            import_model(pinned, cached, SilentProgress())

    def test_an_unreachable_hub_leaves_the_cache(self, cached, online):
        online.repo = httpx.ConnectError("Name or service not known")
        assert pin_model(ModelSource(name="org/tiny")).revision == OLD
        with pytest.raises(
            SourceError, match=r"The hub cannot be reached \(Name or service not known\), and the revision v9 is not in"
        ):
            pin_model(ModelSource(name="org/tiny", revision="v9"))


class TestOnline:
    @pytest.fixture
    def files(self, online, tiny_model):
        """Let the hub hold a tiny model, and files that nobody needs."""
        names = {file.name: file for file in tiny_model("llama").iterdir()}
        documents = ("README.md", "NOTICE.txt", "USE_POLICY.md", "LICENSES/Apache-2.0.txt", "tokenizer.spm")
        names |= dict.fromkeys(documents, names["tokenizer_config.json"])
        unwanted = [
            "pytorch_model.bin",
            "model.gguf",
            "onnx/model.onnx",
            "original/params.json",
            "consolidated.safetensors",
            "modeling.py",
        ]
        online.repo.siblings = [SimpleNamespace(rfilename=name, size=10) for name in [*names, *unwanted]]
        online.files = dict(names)
        return names

    def test_a_branch_becomes_the_commit_that_it_stands_for_now(self, hub_cache, online, files):
        assert pin_model(ModelSource(name="org/tiny", revision="dev")).revision == NEW
        assert online.asked == [("org/tiny", "dev")]
        assert online.downloaded == ["config.json"]

    def test_the_import_downloads_what_is_needed_and_no_more(self, hub_cache, online, files, target):
        pinned = pin_model(ModelSource(name="org/tiny"))
        assert locate_model(pinned) is None
        steps = []

        class Counting(SilentProgress):
            def task(self, label, total, unit=""):
                steps.append((label, total, unit))
                task = SilentTask()
                task.advance = lambda count=1, note="": steps.append(count)
                return task

        details = import_model(pinned, target, Counting())
        assert sorted(online.downloaded) == sorted(files)
        assert steps == [("download org/tiny", 10 * len(files), "bytes"), *[10] * len(files)]
        assert details == {"format": "hub", "snapshot": str(hub_cache / "models--org--tiny" / "snapshots" / NEW)}
        there = {file.relative_to(target).as_posix(): file for file in target.rglob("*") if not file.is_dir()}
        assert {name: file.read_bytes() for name, file in there.items()} == {
            name: file.read_bytes() for name, file in files.items()
        }
        assert not any(file.is_symlink() for file in there.values())
        assert locate_model(pinned) == Path(details["snapshot"])

    def test_code_is_downloaded_only_where_it_is_trusted(self, hub_cache, online, files, tmp_path, tiny_model):
        online.files["modeling.py"] = tiny_model("llama") / "config.json"
        import_model(ModelSource(name="org/tiny", revision=NEW, trust_remote_code=True), tmp_path, SilentProgress())
        assert "modeling.py" in online.downloaded

    def test_a_repository_without_tokenizer(self, hub_cache, online, files, tmp_path):
        online.repo.siblings = [
            SimpleNamespace(rfilename=name, size=1) for name in ("config.json", "model.safetensors")
        ]
        with pytest.raises(SourceError, match="org/tiny: the repository has no tokenizer. None of tokenizer.json, "):
            import_model(ModelSource(name="org/tiny", revision=NEW), tmp_path, SilentProgress())

    def test_the_shape_is_read_from_headers_alone(self, hub_cache, online, files, monkeypatch):
        tensors = {"model.norm.weight": SimpleNamespace(dtype="BF16", shape=[64])}
        headers = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})
        monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", lambda _api, name, revision: headers)
        shape = model_shape(ModelSource(name="org/tiny", revision=NEW), None)
        assert shape.tensors == {"model.norm.weight": TensorInfo("BF16", (64,))}
        assert shape.config["model_type"] == "llama"
        assert online.downloaded == ["config.json"]

    def test_no_safetensors_to_read_the_shape_of(self, hub_cache, online, files, monkeypatch):
        def refuse(_api, name, revision):
            raise errors.NotASafetensorsRepoError("'org/tiny' is not a safetensors repo.")

        monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", refuse)
        with pytest.raises(
            SourceError, match="org/tiny@bbbbbbbbbbbb: there are no safetensors. 'org/tiny' is not a safetensors repo."
        ):
            model_shape(ModelSource(name="org/tiny", revision=NEW), None)

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (
                errors.GatedRepoError("403", response=response(403)),
                "org/tiny: the repository is gated. Its authors ask you to accept a licence first."
                " Accept it at https://huggingface.co/org/tiny, then run: hf auth login.",
            ),
            (
                errors.RepositoryNotFoundError("404", response=response(404)),
                "org/tiny: the hub has no such model, or it is private."
                " Check the name at https://huggingface.co/org/tiny; for a private one run: hf auth login.",
            ),
            (
                errors.HfHubHTTPError("503 Server Error\nRequest ID", response=response(503)),
                "org/tiny: the hub refused. 503 Server Error. Try again in a while.",
            ),
            (
                errors.HFValidationError("Repo id must use alphanumeric chars"),
                "org/tiny: not a name that the hub could have. Repo id must use alphanumeric chars.",
            ),
        ],
    )
    def test_refusals_say_what_to_do(self, hub_cache, online, error, message):
        online.repo = error
        with pytest.raises(SourceError) as caught:
            pin_model(ModelSource(name="org/tiny"))
        assert str(caught.value) == message

    def test_an_unknown_revision(self, hub_cache, online):
        online.repo = errors.RevisionNotFoundError("404", response=response(404))
        with pytest.raises(
            SourceError, match="org/tiny: there is no revision 'v7'. Branches, tags and commits are listed at https://"
        ):
            pin_model(ModelSource(name="org/tiny", revision="v7"))

    def test_a_repository_without_config(self, hub_cache, online):
        with pytest.raises(
            SourceError,
            match="org/tiny@bbbbbbbbbbbb: there is no config.json. See https://huggingface.co/org/tiny/tree/bb",
        ):
            pin_model(ModelSource(name="org/tiny"))

    def test_a_gate_at_the_files(self, hub_cache, online):
        online.files["config.json"] = errors.GatedRepoError("403", response=response(403))
        with pytest.raises(SourceError, match="org/tiny@bbbbbbbbbbbb: the repository is gated"):
            pin_model(ModelSource(name="org/tiny"))

    def test_a_connection_that_breaks_between(self, hub_cache, online):
        online.files["config.json"] = errors.LocalEntryNotFoundError("cannot connect")
        with pytest.raises(
            SourceError, match=r"The hub cannot be reached \(cannot connect\), and config.json is not in its cache"
        ):
            pin_model(ModelSource(name="org/tiny"))

    @pytest.mark.parametrize("revision", [None, "main"])
    def test_trusted_code_needs_a_commit(self, hub_cache, online, files, revision):
        with pytest.raises(
            SourceError, match=f"trust_remote_code needs a `revision` that is a commit. .* revision: {NEW}"
        ):
            pin_model(ModelSource(name="org/tiny", revision=revision, trust_remote_code=True))
        assert pin_model(ModelSource(name="org/tiny", revision=NEW, trust_remote_code=True)).revision == NEW

    def test_another_kind_of_model_is_refused_before_it_is_downloaded(self, hub_cache, online, tmp_path):
        (tmp_path / "config.json").write_text(
            json.dumps({"architectures": ["T5ForConditionalGeneration"]}), encoding="utf-8"
        )
        online.files["config.json"] = tmp_path / "config.json"
        with pytest.raises(SourceError, match="org/tiny: unsupported architecture T5ForConditionalGeneration"):
            pin_model(ModelSource(name="org/tiny"))
        assert online.downloaded == ["config.json"]


def test_the_key_is_of_repository_and_commit():
    keys = {model_key(ModelSource(name=name, revision=commit)) for name in ("a/b", "a/c") for commit in (OLD, NEW)}
    assert len(keys) == 4
