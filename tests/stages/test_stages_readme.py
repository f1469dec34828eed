"""The smallest stage, as optkit/stages/README.md shows it, does what it says."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optkit.model.checkpoint import Checkpoint
from optkit.stage import Context

README = Path(__file__).parents[2] / "optkit" / "stages" / "README.md"


def test_the_smallest_stage_runs(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(example, shown)
    source, stage = tiny_model("llama"), shown["Dampen"](factor=0.5)
    report = stage.run(source, tmp_path, Context())
    before, after = Checkpoint(source), Checkpoint(tmp_path)
    changed = [name for name in before.tensors if not torch.equal(before.read(name), after.read(name))]
    assert report.changed == len(changed) == 7  # two in each of three blocks, and the last one
    assert all(torch.equal(after.read(name), before.read(name) * 0.5) for name in changed)
    assert stage.predict(before.shape, "cpu")[1] == after.shape
