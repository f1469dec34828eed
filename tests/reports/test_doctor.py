"""Doctor tells what is here apart from what is missing, and what to type for it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from optkit_cli.doctor_view import diagnosis_view
from optkit_cli.main import main
from optkit_cli.output import plain_text

from optkit.environment import find_compiler, unmet
from optkit.onnx import builds
from optkit.recipe import registry
from optkit.reports.doctor import doctor
from optkit.reports.doctor.doctor import OPTIONAL_LIBRARIES, Diagnosis, Part, diagnose
from optkit.stage import Transform


class NeedsMuch(Transform):
    """Needs what nobody has."""

    requires = ("no-such-package>=1.0", "numpy>=99", "pydantic>=2")


@pytest.fixture(scope="module")
def here() -> Diagnosis:
    return diagnose(Path("/nowhere/store"))


def test_the_machine_is_described(here: Diagnosis) -> None:
    import torch

    assert here.packages["torch"] == torch.__version__
    assert here.devices[0].device == "cpu"
    assert 0 < here.devices[0].available_bytes <= here.devices[0].total_bytes
    assert len(here.devices) == 1 + torch.cuda.device_count()
    assert here.store_free_bytes > 0
    assert here.cpu_cores >= 1


def test_every_stage_eval_and_engine_is_judged(here: Diagnosis) -> None:
    named = {role: [part.name for part in here.parts if part.role == role] for role in ("stage", "eval", "engine")}
    listed = {role: registry.names_of(role) for role in ("stage", "eval")}
    assert named == listed | {"engine": list(OPTIONAL_LIBRARIES)}
    assert all(part.works or part.remedy.startswith("pip install ") for part in here.parts if part.role == "engine")


def test_a_missing_package_comes_with_its_command_and_a_broken_plug_in_hides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.STAGES, "much", f"{__name__}:NeedsMuch")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[NeedsMuch.__module__])
    monkeypatch.setitem(registry.EVALS, "broken", "no_such_module:Broken")
    parts = {part.name: part for part in diagnose().parts}
    assert not parts["much"].works
    assert parts["much"].note == "needs no-such-package>=1.0, numpy>=99"
    assert parts["much"].remedy == "pip install 'no-such-package>=1.0' 'numpy>=99'"
    assert not parts["broken"].works
    assert "No module named 'no_such_module'" in parts["broken"].note
    assert parts["footprint"].works


def test_it_ends_in_the_commands_that_install_what_is_missing(here: Diagnosis) -> None:
    parts = (
        Part("stage", "nf4", False, "needs bitsandbytes", "pip install 'bitsandbytes>=0.50'"),
        Part("stage", "int8", False, "needs bitsandbytes", "pip install 'bitsandbytes>=0.50'"),
        Part("stage", "compile", False, "needs a compiler", "apt install g++"),
        Part("engine", "onnxruntime", False, "cannot be imported", "see the problems below"),
        Part("eval", "footprint", True, "", "pip install nothing"),
    )
    lines = plain_text(*diagnosis_view(here.model_copy(update={"parts": parts, "problems": ()}))).splitlines()
    assert lines[lines.index("to install what is missing") + 1 :] == [
        "  pip install 'bitsandbytes>=0.50'  # nf4, int8",
        "  apt install g++                   # compile",
    ]


def test_unmet_compares_versions() -> None:
    assert unmet(("numpy>=1", "numpy>=99", "no-such-package")) == ["numpy>=99", "no-such-package"]


def test_of_several_distributions_any_will_do() -> None:
    assert unmet(("no-such-package | numpy>=1", "no-such-package>=2 | numpy>=99")) == ["no-such-package>=2"]


def test_compile_needs_a_compiler_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler("C++") is None
    found = diagnose()
    assert found.compiler is None
    assert "c++ compiler  none" in plain_text(*diagnosis_view(found))
    (part,) = (each for each in found.parts if (each.role, each.name) == ("stage", "compile"))
    assert (part.works, part.note) == (False, "no C++ compiler was found, which it needs on a CPU")
    assert part.remedy == "apt install g++"
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert find_compiler("C++") == str(compiler)
    monkeypatch.setenv("CXX", "icpx")
    assert find_compiler("C++") is None


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = diagnose()
    assert [device.device for device in found.devices] == ["cpu"]
    assert found.problems[0].startswith("torch cannot be imported")
    assert "!!  torch cannot be imported" in plain_text(*diagnosis_view(found))


def test_a_driver_without_a_cuda_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(doctor, "driver_version", lambda: "590.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is an NVIDIA driver (590.1) and this torch was built without CUDA" in diagnose().problems[0]


def stand(monkeypatch: pytest.MonkeyPatch, found: tuple[str, ...] | Exception, **versions: str) -> None:
    """Let these be the builds of ONNX Runtime that are installed, and what they can compute on."""

    def get_available_providers() -> list[str]:
        if isinstance(found, Exception):
            raise found
        return [f"{name}ExecutionProvider" for name in found]

    monkeypatch.setattr(
        builds, "package_version", {name.replace("_", "-"): version for name, version in versions.items()}.get
    )
    runtime = SimpleNamespace(get_available_providers=get_available_providers)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)


def engine(name: str) -> Part:
    return next(part for part in diagnose().parts if part.role == "engine" and part.name == name)


def test_onnxruntime_says_what_it_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    stand(monkeypatch, ("CPU",), onnxruntime="1.31.0", onnxruntime_genai="0.14.1")
    assert engine("onnxruntime").note == "1.31.0: runs ONNX exports, on CPU"
    assert engine("onnxruntime-genai").note == "0.14.1: makes ONNX exports, and generates with them"
    assert builds.problems() == []
    stand(monkeypatch, ("CUDA", "CPU"), onnxruntime_gpu="1.31.0")
    assert engine("onnxruntime").note == "onnxruntime-gpu 1.31.0: runs ONNX exports, on CUDA, CPU"
    assert not engine("onnxruntime-genai").works
    assert engine("onnxruntime-genai").remedy == "pip install 'optkit[onnx]'"


def test_a_gpu_that_onnxruntime_does_not_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver_version", lambda: "590.1")
    stand(monkeypatch, ("CPU",), onnxruntime="1.31.0")
    more = "for the GPU: pip uninstall onnxruntime onnxruntime-genai, then pip install 'optkit[onnx-gpu]'"
    assert engine("onnxruntime").note == f"1.31.0: runs ONNX exports, on CPU; {more}"


def test_two_builds_of_onnxruntime_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    stand(monkeypatch, ("CPU",), onnxruntime="1.31.0", onnxruntime_gpu="1.30.0", onnxruntime_genai="0.14.1")
    assert diagnose().problems[-1] == (
        "onnxruntime 1.31.0 and onnxruntime-gpu 1.30.0 are installed over each other, and what was installed "
        "last decides which providers "
        "there are. Run: pip uninstall -y onnxruntime onnxruntime-gpu onnxruntime-genai && "
        "pip install 'optkit[onnx-gpu]'"
    )
    stand(monkeypatch, ("CPU",), onnxruntime="1.31.0", onnxruntime_genai="0.14.1", onnxruntime_genai_directml="0.14.1")
    (problem,) = builds.problems()
    assert problem.startswith(
        "onnxruntime-genai 0.14.1 and onnxruntime-genai-directml 0.14.1 are installed over each other"
    )
    assert problem.endswith("&& pip install 'optkit[onnx]'")


def test_an_onnxruntime_without_its_files_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    stand(
        monkeypatch,
        AttributeError("module 'onnxruntime' has no attribute 'get_available_providers'"),
        onnxruntime="1.31.0",
    )
    assert diagnose().problems[-1] == (
        "onnxruntime cannot be imported: module 'onnxruntime' has no attribute 'get_available_providers'. "
        "Run: pip install --force-reinstall onnxruntime"
    )
    assert (engine("onnxruntime").works, engine("onnxruntime").note) == (False, "1.31.0 cannot be imported")


def test_the_view_fits_the_page(here: Diagnosis) -> None:
    shown = plain_text(*diagnosis_view(here))
    assert max(map(len, shown.splitlines())) <= 100
    assert "/nowhere/store" in shown
    assert all(part.name in shown for part in here.parts)


def test_the_command_prints_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--store", "/nowhere/store"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == "/nowhere/store"
    assert main(["doctor"]) == 0
    assert "machine" in capsys.readouterr().out
