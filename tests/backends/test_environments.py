"""Environments are built once, found by what they were made of, and leave nothing if they fail."""

import fcntl
import os
import threading
from importlib import metadata
from pathlib import Path

import pytest

from optkit.backends import environments, installing, lock
from optkit.backends.environments import Environments
from optkit.backends.libraries import LIBRARIES, find_library
from optkit.backends.shared_torch import SharedTorch
from optkit.errors import MissingPackageError, OptkitError
from optkit.progress import SilentProgress
from tests.support.fake_library import Heard, fake_install, toys

__all__ = ["toys"]


def test_built_once_and_found_again(toys: Environments) -> None:
    assert toys.find("toy") is None
    heard = Heard()
    built = toys.require("toy", heard)
    assert len(heard.lines) == 1
    assert heard.lines[0].startswith("toy: building its environment in")
    assert toys.require("toy", heard) == built == toys.find("toy") == toys.list()[0]
    assert len(heard.lines) == 1
    assert built.state == "ready"
    assert built.size_bytes == 1000
    assert built.interpreter.exists()
    assert built.told_versions["toy-quantizer"] == "1.0"
    assert built.told_versions["transformers"] == "4.51.3"
    assert built.torch == metadata.version("torch")
    assert "toy_quantizer" not in built.told_versions


def test_another_torch_asks_for_another_environment(toys: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    first = toys.build("toy", SilentProgress())
    init = SharedTorch.__init__

    def newer(torch: SharedTorch) -> None:
        init(torch)
        torch.version = "99.0"

    monkeypatch.setattr(SharedTorch, "__init__", newer)
    assert toys.find("toy") is None
    second = toys.build("toy", SilentProgress())
    assert [(each.directory, each.state) for each in toys.list()] == [
        (second.directory, "ready"),
        (first.directory, "outdated"),
    ]
    assert [each.directory for each in toys.remove("toy", SilentProgress())] == [second.directory, first.directory]
    assert toys.list() == []
    assert not first.directory.exists()


def test_another_lock_asks_for_another_environment(
    toys: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = toys.build("toy", SilentProgress())
    monkeypatch.setattr(lock, "LOCKS", tmp_path)
    (tmp_path / "toy.txt").write_text("toy-quantizer==1.0 --hash=sha256:00\n")
    assert toys.find("toy") is None
    assert [each.state for each in toys.list()] == ["outdated"]
    assert toys.build("toy", SilentProgress()).directory != first.directory


def test_without_torch_no_environment_is_of_use(toys: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.build("toy", SilentProgress())
    monkeypatch.setattr(environments, "package_version", lambda name: None)
    assert [each.state for each in toys.list()] == ["outdated"]


def test_a_failed_build_leaves_nothing(toys: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> dict[str, str]:
        fake_install(*arguments)  # type: ignore[arg-type]
        raise OptkitError("no network")

    (toys.root / "draft-toy-old").mkdir(parents=True)
    monkeypatch.setattr(environments, "install", fails)
    with pytest.raises(OptkitError, match="no network"):
        toys.build("toy", SilentProgress())
    assert [path.name for path in toys.root.iterdir()] == ["toy.lock"]


def test_an_interrupted_removal_does_not_stay_in_the_way(toys: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(directory: Path) -> None:
        (directory / "optkit.json").unlink()
        raise KeyboardInterrupt

    built = toys.build("toy", SilentProgress())
    with monkeypatch.context() as patched:
        patched.setattr(environments.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            toys.remove("toy", SilentProgress())
    assert toys.list() == []
    assert not built.directory.exists()
    assert toys.build("toy", SilentProgress()).directory == built.directory
    assert sorted(path.name for path in toys.root.iterdir()) == [built.directory.name, "toy.lock", "toy.use"]


def test_an_environment_that_is_at_work_is_not_removed(toys: Environments) -> None:
    with toys.using("toy", SilentProgress()) as first, toys.using("toy", SilentProgress()) as second:
        assert first == second
        with pytest.raises(OptkitError) as raised:
            toys.remove("toy", SilentProgress())
        assert str(raised.value) == (
            f"{toys.root}: a run is at work in the environment of 'toy'. Its library would be gone from under it."
            " Remove it when the run has ended."
        )
        assert first.interpreter.exists()
    assert toys.remove("toy", SilentProgress()) == (first,)


def test_a_directory_without_a_record_is_built_again(toys: Environments) -> None:
    built = toys.build("toy", SilentProgress())
    (built.directory / "optkit.json").unlink()
    (built.directory / "left").write_text("")
    assert toys.build("toy", SilentProgress()).state == "ready"
    assert not (built.directory / "left").exists()


def test_each_process_has_a_log_of_its_own(toys: Environments) -> None:
    assert toys.log("toy") == toys.root / "logs" / f"toy-{os.getpid()}.log"


def test_one_builder_waits_for_the_other(toys: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.root.mkdir(parents=True)
    waits = threading.Event()
    heard = Heard()
    monkeypatch.setattr(heard, "say", lambda line: (heard.lines.append(line), waits.set()))
    builds: list[str] = []
    monkeypatch.setattr(environments, "install", lambda *given: (builds.append("built"), fake_install(*given))[1])
    with (toys.root / "toy.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = threading.Thread(target=toys.build, args=("toy", heard))
        other.start()
        assert waits.wait(20)
        assert builds == []
    other.join(20)
    assert heard.lines[0] == "toy: another process is building its environment; waiting for it"
    assert builds == ["built"]


def test_errors_name_the_place(toys: Environments, tmp_path: Path) -> None:
    with pytest.raises(OptkitError, match=r"^there is no backend 'tyo'. Did you mean 'toy'\?$"):
        toys.find("tyo")
    with pytest.raises(OptkitError, match=r"envs: no environment of 'toy' is built. See which are: optkit env list"):
        toys.remove("toy", SilentProgress())
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OptkitError, match=r"environments cannot be kept here. Not a directory. Name another place with \$OPTKIT_ENVS.$"
    ):
        Environments(tmp_path / "file" / "envs").build("toy", SilentProgress())


def test_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTKIT_ENVS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert Environments().root == Path("/caches/optkit/envs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Environments().root == Path.home() / ".cache/optkit/envs"


def test_every_library_is_pinned_and_brings_no_torch() -> None:
    for library in LIBRARIES.values():
        assert all("==" in each for each in (*library.requirements, *library.bare))
        assert not any(each.startswith("torchvision") or each.startswith("torchaudio") for each in library.requirements)
        assert library == find_library(library.name)
        assert (Path(installing.__file__).parent / "workers" / f"{library.name}.py").is_file()


def test_torch_is_linked_and_seen_as_installed(tmp_path: Path) -> None:
    torch = SharedTorch()
    assert torch.shared["torch"] == metadata.version("torch")
    assert any(need.startswith("sympy") for need in torch.needs)
    assert torch.link_into(tmp_path)
    seen = {found.metadata["Name"]: found.version for found in metadata.distributions(path=[str(tmp_path)])}
    assert seen["torch"] == metadata.version("torch")
    assert "transformers" not in seen
    assert (tmp_path / "torch").is_symlink()
    assert (tmp_path / "torch" / "__init__.py").is_file()


def test_of_a_namespace_package_the_second_level_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a package that an environment installs below `nvidia` would land in ours."""
    place, target = tmp_path / "ours", tmp_path / "theirs"
    files = {
        "torch": ["torch/__init__.py"],
        "nvidia-cublas": ["nvidia/cublas/lib/libcublas.so", "../../bin/tool"],
        "sympy": ["sympy/x.py"],
    }
    needs = {"torch": ["nvidia-cublas==1; sys_platform != 'none'", "nvidia-win==1; sys_platform == 'none'", "sympy>=1"]}
    for name, contents in files.items():
        info = place / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir(parents=True)
        requires = "".join(f"Requires-Dist: {need}\n" for need in needs.get(name, ()))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*contents, f"{info.name}/METADATA"]))
        for file in contents:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text("")
    found = {each.metadata["Name"]: each for each in metadata.distributions(path=[str(place)])}
    monkeypatch.setattr(metadata, "distribution", found.__getitem__)
    torch = SharedTorch()
    assert torch.shared == {"torch": "1", "nvidia-cublas": "1"}
    assert torch.needs == ("sympy>=1",)
    assert torch.link_into(target)
    links = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink()}
    assert links == {"torch", "nvidia/cublas"}
    told = {
        each.metadata["Name"]: [str(file) for file in each.files or ()]
        for each in metadata.distributions(path=[str(target)])
    }
    assert sorted(told) == ["nvidia-cublas", "torch"]
    assert all(file.startswith("torch-1.dist-info/") for file in told["torch"])  # pip and uv may delete these
    (place / "torch-1.dist-info" / "RECORD").unlink()
    assert not SharedTorch().link_into(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_without_torch_there_is_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(MissingPackageError, match="the package `torch` is not installed"):
        SharedTorch()
