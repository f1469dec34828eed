"""The benchmark of what stages take: what its lines say."""

import json
import shutil
from pathlib import Path

import pytest

from tests.benchmarks import plan_memory
from tests.conftest import TinyModel

LINES = {"copy": {"shape", "stage", "seconds"}, "rtn: {group_size: 32}": {"block_s", "ram", "disk"}}


@pytest.mark.parametrize("held_out", [0, 2])
def test_a_copy_is_timed_and_stages_are_compared_with_the_model(
    held_out: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(_: str, place: Path, *__: object, **___: object) -> Path:
        return shutil.copytree(tiny_model("llama"), place)

    monkeypatch.setattr(plan_memory, "write_random", written)
    asked = ["plan_memory", "tiny", *LINES, "--samples", "2", "--length", "32", "--held-out", str(held_out)]
    monkeypatch.setattr("sys.argv", asked)
    plan_memory.main()
    made, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert made["made"] == "tiny"
    assert [row["stage"] for row in rows] == [*LINES]
    for row in rows:
        assert LINES[row["stage"]] <= {*row}
    assert ("kl" in rows[1]) == bool(held_out)
    assert 0 < rows[1].get("kl", 1e-3) < 0.1
