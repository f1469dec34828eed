"""A breeze of the storm (`make storm`): a few runs of a tiny model that are killed or signalled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("warm_children")
def test_a_few_cases_of_the_storm() -> None:
    command = [sys.executable, "-m", "tests.storm", "--only", "kills", "signals", "--cases", "1"]
    # with kernels that tests have compiled
    cache = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | cache,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        [name, "1", "0"] for name in ("kills", "signals")
    ]
