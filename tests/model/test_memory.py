"""Hidden states that main memory has no room for lie in a file, and nothing else changes."""

import errno
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optkit.environment import Memory
from optkit.errors import ResourceError
from optkit.model import memory
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.gptq import Gptq


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let main memory be nearly full, and return the folder for temporary files."""
    monkeypatch.setattr(memory, "memory", lambda: Memory(total_bytes=1 << 30, available_bytes=100))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_states_in_a_file_give_the_same_bits(
    tiny_model: Callable[[str], Path],
    letters: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:
    stage = Gptq(group_size=32, calibration=Calibration(dataset=str(letters), samples=4, sequence_length=32))
    made = []
    for where in ("memory", "file"):
        target = tmp_path_factory.mktemp(where)
        if where == "file":
            request.getfixturevalue("little")
        stage.run(tiny_model("llama"), target, Context())
        made.append(load_file(target / "model.safetensors"))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())


def test_the_file_is_mapped_and_nobody_finds_it(little: Path) -> None:
    states = memory.room_for_states(torch.zeros(2, dtype=torch.bfloat16), (3, 5, 7))
    assert (states.shape, states.dtype) == ((3, 5, 7), torch.bfloat16)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert f"{little}/optkit-states-" in maps
    assert list(little.iterdir()) == []
    states[1] = 2
    assert states.float().sum() == 70
    del states
    assert "optkit-states-" not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_full_disk_is_said_before_it_is_written(little: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"optkit-states-.*: .*120 bytes were to be written"):
        memory.room_for_states(torch.zeros(2), (30,))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")
def test_freed_memory_is_kept_for_what_comes_next() -> None:
    memory.keep_freed_memory()
    faults = []
    for _ in range(40):  # those of the first half fill the holes that others left
        torch.ones(2 << 20)  # 2,048 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    assert faults[-1] - faults[20] < 2048
