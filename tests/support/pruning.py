"""The stage `prune`, run."""

from pathlib import Path
from typing import Any

from optkit.stage import Context, Report
from optkit.stages.prune import Prune
from tests.support.running import run_stage


def prune(source: Path, target: Path, context: Context | None = None, **fields: Any) -> Report:
    return run_stage(Prune(**fields), source, target, context)
