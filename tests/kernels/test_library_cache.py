"""Compiled kernels are kept where nobody else writes, loaded only as they were compiled, and tried
in another process first.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from optkit.environment import find_compiler
from optkit.kernels.cpu import native
from optkit.kernels.library_cache import keep_library, kept_library, private_directory

compiled = pytest.mark.skipif(native.why_not_native() is not None, reason=str(native.why_not_native()))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`why_not_native` as in a new process, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_register_shapes", lambda: None)
    monkeypatch.setattr(native, "_loaded", [])
    return native.why_not_native.__wrapped__


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep a library as if it had been compiled, and return the directory; whoever compiles again
    finds out that nothing can.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = private_directory(tmp_path / "cache" / "optkit" / "kernels")
    (tmp_path / "new.so").write_bytes(b"library")
    keep_library(tmp_path / "new.so", place, "a" * 32)
    return place


class TestCache:
    """A library is loaded only if its bytes are those that were compiled, from a directory that
    nobody else writes to.
    """

    def test_a_whole_one_is_found(self, built: Path) -> None:
        found = kept_library(built, "a" * 32)
        assert found is not None
        assert found.read_bytes() == b"library"
        assert kept_library(built, "b" * 32) is None

    @pytest.mark.parametrize("content", [b"", b"lib", b"foreign"])
    def test_a_damaged_one_is_deleted(self, content: bytes, built: Path) -> None:
        next(built.glob("*.so")).write_bytes(content)
        assert kept_library(built, "a" * 32) is None
        assert not list(built.iterdir())

    def test_a_link_is_none(self, built: Path, tmp_path: Path) -> None:
        whole = next(built.glob("*.so"))
        whole.rename(tmp_path / "elsewhere.so")
        whole.symlink_to(tmp_path / "elsewhere.so")
        assert kept_library(built, "a" * 32) is None

    def test_it_is_private(self, built: Path) -> None:
        assert built.stat().st_mode & 0o777 == 0o700
        built.chmod(0o755)
        assert len(list(private_directory(built).glob("*.so"))) == 1
        assert built.stat().st_mode & 0o777 == 0o700

    def test_what_others_could_have_written_goes(self, built: Path) -> None:
        built.chmod(0o777)
        assert not list(private_directory(built).iterdir())
        assert built.stat().st_mode & 0o777 == 0o700

    def test_a_link_to_a_directory_is_refused(self, built: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(built)
        with pytest.raises(OSError, match="is a link"):
            private_directory(tmp_path / "link")

    def test_another_users_is_refused(self, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.geteuid", lambda: built.stat().st_uid + 1)
        with pytest.raises(OSError, match="belongs to another user"):
            private_directory(built)


@compiled
def test_a_crash_while_loading_costs_the_kernels_alone(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "crash.cpp").write_text("#include <csignal>\nstatic const int crash = raise(SIGBUS);\n")
    command = [str(find_compiler("C++")), "-shared", "-fPIC", str(tmp_path / "crash.cpp"), "-o"]
    monkeypatch.setattr(native, "_command", lambda compiler, made: [*command, str(made)])
    assert (
        fresh() == "optkit's CPU kernels cannot be compiled and loaded (a process that tried them was ended by SIGBUS)"
    )
    assert not list((tmp_path / "optkit" / "kernels").iterdir())


@pytest.mark.parametrize("content", [b"foreign", b"", b"li"])
def test_only_what_was_compiled_is_loaded(content: bytes, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []
    compiled: list[Path] = []

    def compile_it(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "-o" in command:
            compiled.append(Path(command[command.index("-o") + 1]))
            compiled[-1].write_bytes(b"library")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(shutil, "which", lambda name: "my-g++")
    monkeypatch.setattr(native, "run", compile_it)
    monkeypatch.setattr(native, "_is_right", lambda: True)
    monkeypatch.setattr(native.torch.ops, "load_library", lambda path: loaded.append(path.read_bytes()))
    assert fresh() is None
    native.library().write_bytes(content)
    assert fresh() is None
    assert fresh() is None
    assert loaded == [b"library"] * 3
    assert len(compiled) == 2
