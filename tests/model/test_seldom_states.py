"""Behind which blocks a stage keeps hidden states that take long to write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from optkit.model import kept_blocks
from optkit.model.kept_blocks import KeptBlocks
from optkit.progress import SilentProgress


def test_states_that_take_long_to_write_are_written_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: Any = SimpleNamespace(hidden=torch.empty(1 << 30, dtype=torch.uint8, device="meta"))
    kept, due = KeptBlocks(None, "cpu", SilentProgress(), "gptq", 0), set[int]()
    kept.resume(32, inputs, {})
    kept._place, kept._done_s = Path("work"), 0.0
    for number in range(32):
        monkeypatch.setattr(kept_blocks.time, "monotonic", lambda now=number + 1.0: now)
        kept._look_ahead(number)
        due.add(kept._due)
        kept._writing_s = 0.3  # the file is there
    assert due == {21, 28, 35}  # 20 times 1.07 s, at a block a second; then 20 times 0.3 s


def test_waiting_for_states_is_no_time_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: Any = SimpleNamespace(hidden=torch.empty(1 << 30, dtype=torch.uint8, device="meta"))
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(kept_blocks.time, "monotonic", lambda: clock.now)
    kept = KeptBlocks(None, "cpu", SilentProgress(), "gptq", 0)
    kept.resume(64, inputs, {})
    kept._place, kept._due, kept._writing_s = Path("work"), 0, 9.0
    kept._writing = cast(Any, SimpleNamespace(result=lambda: setattr(clock, "now", 10.0)))
    clock.now = 1.0  # a block takes a second, and nine more until the states before it are written
    kept._settle()
    kept._look_ahead(1)
    assert kept._due == 1 + 20 * 9
