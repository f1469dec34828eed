"""What an environment installs: every package of its lock with its hash, and nothing else."""

import hashlib
import json
import shutil
import sys
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optkit.backends import installing, lock
from optkit.backends.installing import install
from optkit.backends.libraries import LIBRARIES
from optkit.backends.shared_torch import SharedTorch
from optkit.errors import OptkitError
from optkit.progress import SilentProgress
from tests.support.fake_library import TOY

OTHER_WAYS = (
    "Use Python 3.11 to 3.13 on linux or darwin, or make a lock for this place, which needs uv: "
    "python -m optkit.backends.lock toy."
)


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty place of locks, and let torch need nothing but itself."""
    monkeypatch.setattr(lock, "LOCKS", tmp_path)
    monkeypatch.setattr(SharedTorch, "needs", ())
    return tmp_path


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_locks_have_all_that_the_libraries_ask_for(name: str) -> None:
    library = LIBRARIES[name]
    packages = lock.parse((lock.LOCKS / f"{name}.txt").read_text(encoding="utf-8"))
    names = {each.name for each in packages}
    assert not names & {"torch", "torchvision", "torchaudio", "triton"}
    assert set(library.sources) <= names
    assert all(each.hashes and all(digest.startswith("sha256:") for digest in each.hashes) for each in packages)
    assert all(len(digest) == len("sha256:") + 64 for each in packages for digest in each.hashes)
    for place in ({"sys_platform": "linux"}, {"sys_platform": "darwin"}):
        for version in ("3.11.0", "3.13.9"):
            where = {**place, "python_full_version": version, "python_version": version[:4]}
            here = {each.name: each.version for each in packages if each.requirement.marker.evaluate(where)}
            for need in map(Requirement, (*library.requirements, *library.bare, *library.build_packages)):
                assert need.specifier.contains(here[canonicalize_name(need.name)]), need
            assert {"sympy", "networkx", "filelock", "jinja2", "fsspec", "typing-extensions", "setuptools"} <= set(here)


def test_a_lock_is_read_as_uv_writes_it(locks: Path) -> None:
    (locks / "toy.txt").write_text(
        "# a comment\nToy_Quantizer==1.0 ; sys_platform != 'none' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "    # via something\nother==2.0 ; sys_platform == 'none' \\\n    --hash=sha256:cc\n"
        "torch==1.0 --hash=sha256:dd\n"
    )
    found = lock.locked_for(TOY, SharedTorch())
    assert [each.line for each in found] == ["toy-quantizer==1.0 --hash=sha256:aa --hash=sha256:bb"]
    assert lock.lock_digest(TOY) == hashlib.sha256((locks / "toy.txt").read_bytes()).hexdigest()
    assert lock.lock_digest(replace(TOY, name="none")) == ""


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("", "nothing for it"),
        ("toy-quantizer==1.0 ; python_version < '3' --hash=sha256:aa", "nothing for it"),
        ("toy-quantizer==0.9 --hash=sha256:aa", "toy-quantizer==0.9"),
    ],
)
def test_a_lock_that_lacks_something_is_an_error(locks: Path, text: str, has: str) -> None:
    (locks / "toy.txt").write_text(text)
    with pytest.raises(OptkitError) as raised:
        lock.locked_for(TOY, SharedTorch())
    assert str(raised.value) == (
        f"optkit env build toy: toy asks for toy-quantizer==1.0, and the lock has {has} on {lock.this_place()}."
        f" What no hash is known of is not installed. {OTHER_WAYS}"
    )


def test_what_torch_needs_is_locked_too(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedTorch, "needs", ("sympy>=1.13",))
    (locks / "toy.txt").write_text("toy-quantizer==1.0 --hash=sha256:aa\nsympy==1.12 --hash=sha256:bb\n")
    with pytest.raises(OptkitError, match=r"torch asks for sympy>=1.13, and the lock has sympy==1.12 on Python"):
        lock.locked_for(TOY, SharedTorch())


def toy_wheel(place: Path, name: str = "toy_quantizer", needs: str = "") -> str:
    """Write a wheel of version 1.0; returns its SHA-256."""
    path, info = place / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "x = 1\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{each.filename},,\n" for each in wheel.infolist()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_another_file_than_the_locked_one_is_refused(
    locks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    """The installer itself, with a directory as its index; no network."""
    if installer == "uv" and not shutil.which("uv"):
        pytest.skip("uv is not installed")
    if installer == "pip":
        monkeypatch.setattr(installing.shutil, "which", lambda name: None)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(tmp_path))
    (locks / "toy.txt").write_text(f"toy-quantizer==1.0 --hash=sha256:{'0' * 64} --hash=sha256:{'1' * 64}\n")
    digest = toy_wheel(tmp_path)
    with pytest.raises(OptkitError) as raised:
        install(TOY, tmp_path / "env", SharedTorch(), SilentProgress())
    assert str(raised.value) == (
        f"optkit env build toy: toy-quantizer==1.0 is not the file that optkit's lock names: its SHA-256 is {digest}."
        " The index, a cache or the way to them gave other bytes; nothing of them was installed or run."
        " See which index it takes, empty its cache (pip cache purge, uv cache clean), and run it again."
    )
    assert not (installing.site_packages_of(tmp_path / "env") / "toy_quantizer.py").exists()


PIP_SAYS = """ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated
    toy==1.0 from file:///tmp/toy-1.0-py3-none-any.whl (from -r bad.txt (line 1)):
        Expected sha256 0000
        Expected     or 1111
             Got        f10f
"""
UV_SAYS = """error: Failed to download `toy==1.0`
  cause: Hash mismatch for `toy==1.0`

         Expected:
           sha256:0000

         Computed:
           sha256:f10f
"""


@pytest.mark.parametrize("text", [PIP_SAYS, UV_SAYS])
def test_both_installers_words_for_a_wrong_hash(text: str) -> None:
    assert "toy==1.0 is not the file that optkit's lock names: its SHA-256 is f10f." in said(text)


@pytest.mark.parametrize(
    "text",
    [
        "ERROR: No matching distribution found for toy==1.0",
        "  cause: Because toy==1.0.0 has no usable wheels and you require toy==1.0, we can conclude",
        "  cause: Because there is no version of toy==1.0 and you require toy==1.0, we can conclude",
    ],
)
def test_what_the_index_lacks_for_this_place(text: str) -> None:
    assert said(text) == (
        f"optkit env build toy: it failed. pip says: {text.strip()}. See that the index can be reached. If so, it has"
        f" no such file for {lock.this_place()}: {OTHER_WAYS}"
    )


def said(text: str) -> str:
    return str(installing._failure(text, "pip", "optkit env build toy", "it failed"))


class TestCommands:
    """What is started, with nothing in the place of Python and pip."""

    @pytest.fixture
    def commands(self, locks: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        ran: list[list[str]] = []

        def run(command: list[str], where: str, what: str, path: Path | None = None) -> str:
            ran.append([str(word) for word in command])
            if "venv" in command:
                Path(command[-1]).mkdir()
            return json.dumps({"toy": "1.0"})

        monkeypatch.setattr(installing, "_run", run)
        monkeypatch.setattr(installing.shutil, "which", lambda name: None)
        (locks / "toy.txt").write_text("toy-quantizer==1.0 --hash=sha256:aa\nbuilt==1.0 --hash=sha256:bb\n")
        return ran

    def test_with_pip(self, commands: list[list[str]], tmp_path: Path) -> None:
        library = replace(TOY, sources=("built",))
        assert install(library, tmp_path / "env", SharedTorch(), SilentProgress()) == {"toy": "1.0"}
        python = str(tmp_path / "env" / "bin" / "python")
        pip = [python, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        assert commands[:3] == [
            [sys.executable, "-P", "-m", "venv", str(tmp_path / "env")],
            [*pip, "--only-binary", ":all:", "-r", str(tmp_path / "env" / "wheels.txt")],
            [*pip, "--no-build-isolation", "-r", str(tmp_path / "env" / "sources.txt")],
        ]
        assert (tmp_path / "env" / "wheels.txt").read_text() == "toy-quantizer==1.0 --hash=sha256:aa\n"
        assert (tmp_path / "env" / "sources.txt").read_text() == "built==1.0 --hash=sha256:bb\n"

    def test_with_uv(self, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installing.shutil, "which", lambda name: "/bin/uv")
        install(TOY, tmp_path / "env", SharedTorch(), SilentProgress())
        assert commands[0][:2] == ["/bin/uv", "venv"]
        python = str(tmp_path / "env" / "bin" / "python")
        hashed = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
        assert commands[1][:-2] == ["/bin/uv", "pip", "install", "--python", python, *hashed]
        assert len(commands) == 3

    def test_a_torch_that_cannot_be_shared_is_an_error(
        self, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SharedTorch, "link_into", lambda torch, packages: False)
        with pytest.raises(OptkitError, match=r"does not say which files it has, and cannot be shared. Another copy"):
            install(TOY, tmp_path / "env", SharedTorch(), SilentProgress())
        assert len(commands) == 1

    def test_a_torch_that_does_not_fit_is_an_error(self, commands: list[list[str]], tmp_path: Path) -> None:
        packages = installing.site_packages_of(tmp_path / "env")
        toy_wheel(tmp_path, needs="torch>=99")

        def link(torch: SharedTorch, place: Path) -> bool:
            zipfile.ZipFile(tmp_path / "toy_quantizer-1.0-py3-none-any.whl").extractall(packages)
            return SharedTorch.link_into(torch, place)

        torch = SharedTorch()
        torch.link_into = lambda place: link(torch, place)  # type: ignore[method-assign]
        said = (
            rf"toy-quantizer 1.0 asks for torch>=99, and there is {metadata.version('torch').replace('+', '.')}. "
            r"Install another torch, or make another lock: python -m optkit.backends.lock toy.$"
        )
        with pytest.raises(OptkitError, match=said):
            install(TOY, tmp_path / "env", torch, SilentProgress())
        bare = replace(TOY, bare=("toy-quantizer==1.0",))
        installing._check_requirements(tmp_path / "env", bare, torch, "here")


class TestMaking:
    def test_uv_is_asked_for_every_place(self, locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = locks / "uv"
        program.write_text(
            f"#!{sys.executable}\nimport sys\n"
            "open(sys.argv[0] + '.log', 'a').write(' '.join(sys.argv[1:]) + '|' + sys.stdin.read() + '|' + "
            "open('pyproject.toml').read())\nprint('toy-quantizer==1.0 --hash=sha256:aa')\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(lock.shutil, "which", lambda name: str(program))
        monkeypatch.setattr(lock, "find_library", lambda name: TOY)
        assert lock.make("toy").read_text() == (
            "# toy with all that it needs but torch. Made by: python -m optkit.backends.lock toy\n"
            "toy-quantizer==1.0 --hash=sha256:aa\n"
        )
        asked = (locks / "uv.log").read_text()
        assert "--universal --python-version 3.11 --generate-hashes" in asked
        assert "|toy-quantizer==1.0\nsetuptools<82|" in asked
        assert "sys_platform == 'linux' and python_full_version < '3.14'" in asked
        assert "torch ; sys_platform == 'never'" in asked

    def test_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lock.shutil, "which", lambda name: None)
        with pytest.raises(OptkitError, match=r"^the lock of torchao: uv is not installed. pip install uv.$"):
            lock.make("torchao")
        monkeypatch.setattr(lock.shutil, "which", lambda name: "false")
        with pytest.raises(OptkitError, match=r"^the lock of torchao: no set of packages fits. uv says:$"):
            lock.make("torchao")
