"""`optkit verify` as a user calls it: what it prints, keeps and exits with."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.errors import ArtifactError
from optkit.model.carried_state import CarriedState
from optkit.verification.model_files import Check
from optkit.verification.result_file import read_loading
from tests.support.changes import change_json
from tests.support.command_line import spoken
from tests.support.fake_engine import program, refusal, replaced, spoiled

pytestmark = pytest.mark.usefixtures("children_here")
MADE_UP = """\
import numpy
def work(parent):
    numpy.full((40, {width}), {value!r}, dtype="float32").tofile(parent.order()["logits"])
    parent.tell("versions", transformers="0")
    return {{"device": "cpu", "dtype": "float32", "logits_shape": [40, {width}], "generated": [1]}}
"""


@pytest.fixture
def artifact(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the artifact, in the working directory; no engine but our own Python's."""
    monkeypatch.chdir(tmp_path)
    for engine in ("VLLM", "TRANSFORMERS"):
        monkeypatch.delenv(f"OPTKIT_{engine}_PYTHON", raising=False)
    return shutil.copytree(tiny_run / "out", tmp_path / "out")


def test_transformers_opens_a_model_with_a_soft_cap_as_optkit_does(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "name": "capped",
        "model": str(tiny_model("gemma2")),
        "stages": [{"kv_cache": "int8"}],
        "evals": ["footprint"],
    }
    (tmp_path / "capped.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    pipeline.run(tmp_path / "capped.yaml", out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    spoken(capsys, "verify", str(tmp_path / "out"), "--engine", "transformers", "--tokens", "40", "--device", "cpu")
    (kept,) = read_loading(read_artifact(tmp_path / "out"))
    assert (kept.verdict, kept.same_tokens) == ("agrees", 16)
    assert kept.compared.endswith(
        "(float32 and float32); opened with attn_implementation='eager', because its own choice leaves "
        "out the soft cap of the scores"
    )


@pytest.mark.parametrize("damaged", ["verification.json", "scorecard.json"])
def test_a_result_that_could_not_be_kept_is_told_before_any_engine_is_asked(
    artifact: Path, damaged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifact / damaged).write_text("{", encoding="utf-8")
    monkeypatch.setattr(pipeline, "verify_artifact", None)
    _, err = spoken(capsys, "verify", "out", "--device", "cpu", status=1)
    assert err.startswith(f"error: out/{damaged}: cannot be read as JSON.")


def test_a_run_tells_of_a_damaged_result_before_it_measures(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(tiny_run / "out", tmp_path / "out"))
    (out / "verification.json").write_text("{", encoding="utf-8")
    monkeypatch.setattr(pipeline, "execute", None)
    with pytest.raises(ArtifactError, match=r"verification.json: cannot be read as JSON"):
        pipeline.run(tiny_run / "tiny.yaml", out=out, store=tmp_path / "store", device="cpu")


def test_transformers_opens_what_config_names_by_itself(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [{"prune": {"method": "magnitude", "sparsity": 0.1}}]
    recipe = {"name": "capped", "model": str(tiny_model("gemma2")), "stages": stages, "evals": ["footprint"]}
    (tmp_path / "capped.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    pipeline.run(tmp_path / "capped.yaml", out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    spoken(capsys, "verify", str(tmp_path / "out"), "--engine", "transformers", "--tokens", "40", "--device", "cpu")
    (kept,) = read_loading(read_artifact(tmp_path / "out"))
    assert (kept.verdict, kept.same_tokens) == ("agrees", 16)
    assert kept.compared.endswith("(float32 and float32)")


def test_transformers_agrees_and_the_artifact_remembers(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("compressed_tensors")
    out, err = spoken(capsys, "verify", "out", "--engine", "transformers", "--tokens", "40", "--device", "cpu")
    assert "verify  0/2 steps" in err
    assert "ok layers     21 packed layers and 0 plain ones, as config.json says" in out
    assert "ok opens      optkit opens it on cpu, in float32, without its settings" in out
    assert out.splitlines()[-1] == "PASS  1 of 1 engines agree  out"

    (kept,) = read_loading(read_artifact(artifact))
    assert kept.mean_kl is not None
    assert kept.mean_kl < 1e-6
    assert (kept.verdict, kept.top1_agreement, kept.same_tokens, kept.dtype) == ("agrees", 1, 16, "float32")
    assert set(kept.packages) == {"transformers", "torch", "compressed-tensors", "python"}
    assert (
        kept.compared == "logits after each of 40 tokens, and of the last 16 fed one at a time; agrees below a mean KL "
        "of 1e-05 (float32 and float32)"
    )
    shown, _ = spoken(capsys, "show", "out")
    assert f"transformers {kept.version} float32  yes" in shown
    assert "## Loading" in (artifact / "scorecard.md").read_text()
    assert "Other programs that open it" in (artifact / "scorecard.html").read_text(encoding="utf-8")
    assert json.loads((artifact / "scorecard.json").read_text())["loading"] == [kept.model_dump(mode="json")]
    read_artifact(artifact).check()


def made_of(model: Path, place: Path) -> None:
    recipe = {"name": "plain", "model": str(model), "evals": ["footprint"]}
    (place / "plain.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    pipeline.run(place / "plain.yaml", out=place / "out", store=place / "store", device="cpu")


@pytest.mark.parametrize("kind", ["mamba", "bamba"])
def test_decode_steps_are_compared_too(
    kind: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_of(tiny_model(kind), tmp_path)
    asked = ("verify", str(tmp_path / "out"), "--tokens", "40", "--device", "cpu", "--engine", "transformers")
    out, _ = spoken(capsys, *asked)
    assert "ok decodes    the last 16 of 40 tokens, fed one at a time" in out
    (kept,) = read_loading(read_artifact(tmp_path / "out"))
    assert (kept.verdict, kept.same_tokens) == ("agrees", 16)
    assert kept.stepped_kl is not None
    assert abs(kept.stepped_kl) < 1e-6

    monkeypatch.setattr(CarriedState, "_carried", lambda *_: {})
    out, _ = spoken(capsys, *asked, status=3)
    assert "!! decodes    the last 16 of 40 tokens" in out
    assert "rounding explains 1e-05: generation forgets what it read" in " ".join(out.split())


def test_a_damaged_record(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (artifact / "verification.json").write_text("{")
    with pytest.raises(
        ArtifactError,
        match=r"verification\.json: cannot be read as JSON\. .* Delete it and run `optkit verify` again\.$",
    ):
        read_loading(read_artifact(artifact))
    spoken(capsys, "show", "out", status=1)


def test_a_damaged_artifact_is_said_and_no_engine_is_asked(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (artifact / "model.safetensors").write_bytes((artifact / "model.safetensors").read_bytes()[:-4])
    out, _ = spoken(capsys, "verify", "out", status=3)
    assert "!! digests" in out
    assert "!! weights" in out
    assert out.splitlines()[-1] == "FAIL  the artifact is not sound; no engine was asked  out"
    assert not (artifact / "verification.json").exists()


def test_a_group_size_that_is_not_that_of_the_weights(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (artifact / "config.json").read_text()
    (artifact / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 16'))
    out, _ = spoken(capsys, "verify", "out", "--json", status=3)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["digests"]["detail"] == "config.json was changed"
    assert "weight_scale [64, 8], and it is [64, 4]" in checks["layers"]["detail"]
    assert json.loads(out)["exit_status"] == 3


def test_weights_that_are_no_model(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the headers cannot tell, optkit's own session does."""
    monkeypatch.setattr(
        "optkit.verification.artifact_checks.check_digests", lambda _: Check(name="digests", ok=True, detail="")
    )
    change_json(artifact / "config.json", hidden_size=128)
    out, _ = spoken(capsys, "verify", "out", "--device", "cpu", "--quiet", status=3)
    assert "!! opens" in out


def test_an_engine_that_refuses(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = program(tmp_path, refusal("ValueError: I only read poems", vllm="9.9"))
    out, _ = spoken(
        capsys, "verify", "out", "--engine", "vllm", "--engine-python", f"vllm={python}", "--device", "cpu", status=3
    )
    assert "vllm 9.9  NO" in out
    assert "ValueError: I only read poems" in out
    assert "ValueError: I only read poems" in spoken(capsys, "show", "out")[0]


def test_an_artifact_that_can_only_be_read(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_place: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("optkit.artifact.drafted", refuse)
    python = program(tmp_path, refusal("ValueError: I only read poems", vllm="9.9"))
    asked = ("--engine", "vllm", "--engine-python", f"vllm={python}", "--device", "cpu")
    out, err = spoken(capsys, "verify", "out", *asked, status=3)
    assert "vllm 9.9  NO" in out
    assert "the result is kept nowhere: out: cannot write verification.json. Read-only file system" in err


@pytest.mark.usefixtures("warm_children")
def test_an_engine_that_disagrees(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("compressed_tensors")
    python = spoiled(tmp_path)
    words = ["--engine", "transformers", "--engine-python", f"transformers={python}", "--device", "cpu"]
    out, _ = spoken(capsys, "verify", "out", *words, status=3)
    assert "DISAGREES" in out
    assert "FAIL  0 of 1 engines agree" in out


@pytest.mark.parametrize(
    ("width", "value", "said"),
    [
        (512, "nan", "its logits are not all finite numbers"),
        (500, "0", "its logits are [40, 500], and optkit's are [40, 512]"),
    ],
)
def test_logits_that_are_none(
    width: int, value: str, said: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = replaced(tmp_path, MADE_UP.format(width=width, value=value))
    words = [
        "--engine",
        "transformers",
        "--engine-python",
        f"transformers={python}",
        "--device",
        "cpu",
        "--tokens",
        "40",
        "--json",
    ]
    (found,) = json.loads(spoken(capsys, "verify", "out", *words, status=3)[0])["loading"]
    assert (found["verdict"], found["reason"], found["mean_kl"]) == ("disagrees", said, None)


def test_an_engine_that_takes_too_long(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--engine",
        "vllm",
        "--engine-python",
        f"vllm={program(tmp_path, 'sleep 60')}",
        "--timeout",
        "0.5",
        "--device",
        "cpu",
    ]
    assert "no answer within 0.5 s" in spoken(capsys, "verify", "out", *words, status=3)[0]


@pytest.mark.parametrize("engine", ["onnxruntime", "onnxruntime-genai"])
def test_an_engine_that_the_user_named_and_that_cannot_be_asked(
    engine: str, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = spoken(capsys, "verify", "out", "--engine", engine, "--device", "cpu", "--quiet", status=1)
    assert f"{engine}  not tried" in out
    assert err == f"error: out: {engine} was not asked, it reads ONNX, and this artifact is safetensors.\n"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["elsewhere"], 1, "elsewhere: no such directory."),
        (
            ["out", "--engine-python", "vllm=/no/python"],
            2,
            "error: --engine-python vllm: there is no program /no/python.",
        ),
        (
            ["out", "--engine-python", "tgi=python"],
            2,
            "'tgi=python' names no engine and its Python. Write it as vllm=/opt",
        ),
        (["out", "--tokens", "1"], 2, "1 is not in the range x>=2."),
    ],
)
def test_mistakes_of_the_user(
    words: list[str], status: int, said: str, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in spoken(capsys, "verify", *words, status=status)[1]


def test_a_run_can_verify_at_its_end(
    tiny_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuses = program(tmp_path, refusal("no", transformers="9.9"))
    monkeypatch.setenv("OPTKIT_TRANSFORMERS_PYTHON", refuses)
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", refuses)
    words = ["--out", str(tmp_path / "out"), "--store", str(tiny_run / "store"), "--device", "cpu", "--quiet"]
    out, _ = spoken(capsys, "run", str(tiny_run / "tiny.yaml"), *words, "--verify", status=3)
    assert "transformers 9.9   NO" in out
    assert (tmp_path / "out" / "verification.json").is_file()
    again, _ = spoken(capsys, "run", str(tiny_run / "tiny.yaml"), *words)
    assert "transformers 9.9   NO" in again


def test_a_run_whose_artifact_is_not_sound_is_status_3_and_prints_its_scorecard(
    tiny_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "optkit.verification.artifact_checks.check_digests",
        lambda _: Check(name="digests", ok=False, detail="config.json was changed"),
    )
    words = [
        "--out",
        str(tmp_path / "out"),
        "--store",
        str(tiny_run / "store"),
        "--device",
        "cpu",
        "--quiet",
        "--verify",
        "--json",
    ]
    out, err = spoken(capsys, "run", str(tiny_run / "tiny.yaml"), *words, status=3)
    assert json.loads(out) == json.loads((tmp_path / "out" / "scorecard.json").read_text())
    assert err == f"error: {tmp_path}/out: it was made, and it is not sound: digests: config.json was changed.\n"
