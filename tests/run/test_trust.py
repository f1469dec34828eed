"""Whose code runs: an artifact cannot say so for itself, a recipe and the command line can."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optkit_cli.main import main

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.errors import SourceError
from optkit.source.directory import check_config
from optkit.source.foreign_code import classes_in, kernels_in, libraries_in
from optkit.source.models import ModelSource, model_key, pin_model
from optkit.store.files import describe_file
from tests.support.changes import change_json

RECIPE = "name: tiny\nmodel: {model}\nstages:\n  - rtn: {{group_size: 32}}\nevals:\n  - footprint\n"
EVALS = "evals:\n  - footprint\n"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({witness!r}).write_text("ran")
class MineConfig(LlamaConfig):
    model_type = "mine"
class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""
CLASSES = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers keep the modules of models in a directory of the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def artifact(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an artifact in the working directory that nobody has tampered with yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals.yaml").write_text(EVALS, encoding="utf-8")
    return shutil.copytree(tiny_run / "out", tmp_path / "out")


def plant(artifact: Path) -> Path:
    """Let an artifact come with code and say that it is trusted; return the file that the code
    writes.
    """
    witness = artifact.parent / "witness"
    (artifact / "modeling_mine.py").write_text(CODE.format(witness=str(witness)), encoding="utf-8")
    change_json(artifact / "config.json", auto_map=CLASSES, model_type="mine")
    record = json.loads((artifact / "optkit.json").read_text(encoding="utf-8"))
    record["recipe"]["model"]["trust_remote_code"] = True
    change_json(
        artifact / "optkit.json",
        recipe=record["recipe"],
        files={name: describe_file(artifact / name) for name in (*record["files"], "modeling_mine.py")},
    )
    return witness


COMMANDS = {
    "verify": ["verify", "out", "--engine", "transformers"],
    "eval": ["eval", "out", "--evals", "evals.yaml", "--store", "store"],
    "profile": ["profile", "out", "--store", "store", "--out", "traces", "--prompt", "4", "--new-tokens", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_artifact_cannot_allow_its_own_code(
    command: str, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    witness = plant(artifact)
    assert main([*COMMANDS[command], "--device", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: out: opening it runs code of others: that of its model (modeling_mine.Mine, "
        "modeling_mine.MineConfig). Code of others runs"
        " only if whoever opens it says so, and never because its own files do. Read that code, "
        "then give --trust-remote-code (in Python: trust_remote_code=True)."
    )
    assert not witness.exists()


def test_the_command_line_allows_it_and_that_is_said(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    witness = plant(artifact)
    assert main(["profile", "out", "--device", "cpu", "--prompt", "4", "--new-tokens", "2", "--trust-remote-code"]) == 0
    assert "runs code of others, as you said: that of its model (modeling_mine.Mine" in capsys.readouterr().err
    assert witness.read_text() == "ran"


def test_a_session_and_a_verification_in_python(artifact: Path) -> None:
    witness = plant(artifact)
    with pytest.raises(SourceError, match="runs code of others"):
        pipeline.open_artifact(artifact, device="cpu")
    with pytest.raises(SourceError, match="runs code of others"):
        pipeline.verify(artifact, engines=[], device="cpu")
    assert not witness.exists()
    pipeline.open_artifact(artifact, device="cpu", trust_remote_code=True).close()
    assert witness.exists()


def test_code_that_an_artifact_was_not_made_with_is_not_run_either(artifact: Path) -> None:
    witness = plant(artifact)
    record = json.loads((artifact / "optkit.json").read_text(encoding="utf-8"))["recipe"]
    record["model"]["trust_remote_code"] = False
    change_json(artifact / "optkit.json", recipe=record)
    with pytest.raises(SourceError):
        pipeline.open_artifact(artifact, device="cpu", trust_remote_code=True)
    assert not witness.exists()


def test_a_recorded_kernel_of_the_hub_needs_the_same_trust(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_json(artifact / "optkit.json", settings=[{"attention": {"implementation": "someone/kernel@" + "0" * 40}}])
    monkeypatch.setattr(
        "optkit.source.hub_kernels.AttentionKernel.load", lambda self: pytest.fail("the kernel was loaded")
    )
    for command in ("eval", "profile"):
        assert main([*COMMANDS[command], "--device", "cpu"]) == 1
        assert (
            "opening it runs code of others: the "
            f"kernel someone/kernel@{'0' * 40} of the hub" in capsys.readouterr().err
        )


@pytest.mark.parametrize("place", ["artifact", "directory"])
def test_kernels_and_libraries_that_config_files_have_loaded(place: str, artifact: Path) -> None:
    if place == "directory":
        (artifact / "optkit.json").unlink()
    change_json(artifact / "config.json", attn_implementation={"": "someone/kernel"})
    (artifact / "genai_config.json").write_text(
        '{"model": {"decoder": {"session_options": {"custom_ops_library": "/tmp/x.so"}}}}'
    )
    if place == "artifact":
        files = json.loads((artifact / "optkit.json").read_text(encoding="utf-8"))["files"]
        change_json(artifact / "optkit.json", files={name: describe_file(artifact / name) for name in files})
    with pytest.raises(SourceError, match=r"the kernel someone/kernel of the hub; the library /tmp/x\.so"):
        pipeline.open_artifact(artifact, device="cpu")


def test_what_configs_name() -> None:
    assert classes_in({"auto_map": {"AutoTokenizer": ["a.Slow", None], "AutoModel": "b.Model"}}) == [
        "a.Slow",
        "b.Model",
    ]
    assert classes_in({"auto_map": ["odd"]}) == ["odd"]
    assert classes_in({}) == []
    assert kernels_in({"text_config": {"_attn_implementation": "a/b"}, "attn_implementation": "sdpa"}) == ["a/b"]
    assert libraries_in({"x": [{"custom_ops_library": "c.so"}]}) == ["c.so"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attn_implementation": "a/b",
    }
    with pytest.raises(SourceError, match=r"its config\.json has the kernel a/b of the hub loaded for attention"):
        check_config(config, "here", trust_remote_code=False)
    check_config(config, "here", trust_remote_code=True)


class TestRecipes:
    @pytest.fixture
    def model(self, tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
        """Return a model of a type that transformers has, with code of its own beside it."""
        model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
        (model / "modeling_mine.py").write_text(CODE.format(witness=str(tmp_path / "witness")), encoding="utf-8")
        change_json(model / "config.json", auto_map=CLASSES)
        return model

    def test_the_model_is_another_one_with_its_code(self, model: Path) -> None:
        plain = pin_model(ModelSource(name=str(model)))
        trusted = pin_model(ModelSource(name=str(model), trust_remote_code=True))
        assert plain.revision == trusted.revision
        assert model_key(plain) != model_key(trusted)

    def test_a_run_without_trust_takes_nothing_of_a_trusted_one(self, model: Path, tmp_path: Path) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(RECIPE.format(model=model), encoding="utf-8")
        common: dict[str, Any] = {"store": tmp_path / "store", "device": "cpu"}
        pipeline.run(recipe, overrides=["model.trust_remote_code=true"], out=tmp_path / "out", **common)
        todo = pipeline.plan(recipe, **common)
        assert not any(each.hit for each in (*todo.steps[1:], *todo.evals))  # type: ignore[attr-defined]
        pipeline.run(recipe, out=tmp_path / "out", **common)
        assert read_artifact(tmp_path / "out").record.recipe["model"]["trust_remote_code"] is False

    def test_the_flag_stands_for_the_field(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(RECIPE.format(model=model), encoding="utf-8")
        words = [
            "run",
            str(recipe),
            "--store",
            str(tmp_path / "store"),
            "--out",
            str(tmp_path / "out"),
            "--device",
            "cpu",
        ]
        assert main([*words, "--trust-remote-code"]) == 0
        assert "the code that comes with the model is run, as you said (trust_remote_code)" in capsys.readouterr().err
        assert read_artifact(tmp_path / "out").record.recipe["model"]["trust_remote_code"] is True

    def test_only_the_new_recipe_counts_for_an_artifact_as_model(self, artifact: Path, tmp_path: Path) -> None:
        witness = plant(artifact)
        recipe = tmp_path / "next.yaml"
        recipe.write_text(f"name: next\nmodel: {artifact}\nevals:\n  - footprint\n", encoding="utf-8")
        with pytest.raises(SourceError, match=r"the model comes with code of its own"):
            pipeline.run(recipe, out=tmp_path / "next", store=tmp_path / "store", device="cpu")
        assert not witness.exists()
