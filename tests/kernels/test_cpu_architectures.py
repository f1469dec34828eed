"""The CPU kernels compiled for other processors: AVX2 alone, no vectors of note, and NEON in qemu."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from optkit.environment import ARCHITECTURE
from optkit.kernels.cpu import native

ARM = "aarch64-linux-gnu-g++"
TARGETS = {
    "x86-64-v3": ("g++", "-march=x86-64-v3", ""),
    "x86-64": ("g++", "-march=x86-64", ""),
    "aarch64": (ARM, "-march=armv8-a", "qemu-aarch64-static"),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_other_processors(target: str, tmp_path: Path) -> None:
    compiler, architecture, emulator = TARGETS[target]
    if target.startswith("x86") and native.platform.machine() != "x86_64":
        pytest.skip("this machine does not run x86-64")
    if missing := [name for name in (compiler, emulator) if name and not shutil.which(name)]:
        pytest.skip(f"there is no {missing[0]}")
    include = [f"-I{Path(torch.__file__).parent / 'include'}", f"-I{native.DIRECTORY}"]
    command = [compiler, "-std=c++20", "-O2", architecture, *include]
    subprocess.run([*command, "-fsyntax-only", *(str(native.DIRECTORY / name) for name in native.SOURCES)], check=True)
    made, source = tmp_path / "kernels", Path(__file__).with_name("architectures.cpp")
    absent = "-Wl,--unresolved-symbols=ignore-all"  # of torch's functions the driver has what it calls
    subprocess.run([*command, str(source), "-static", absent, "-o", str(made)], check=True)
    subprocess.run([*([emulator] if emulator else []), str(made)], check=True)


def test_architecture_is_a_flag_and_part_of_what_a_library_is_kept_by(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._flags()[-1] == "-march=native"
    monkeypatch.setenv(ARCHITECTURE, "x86-64-v3")
    assert native._flags()[-1] == "-march=x86-64-v3"
    assert "-march=x86-64-v3" in native._command("g++", Path("kernels.so"))
