"""The stage `prune`, run."""

from pathlib import Path
from typing import Any

from optkit.stage import Context, Report
from optkit.stages.prune import Prune


def prune(source: Path, target: Path, context: Context | None = None, **fields: Any) -> Report:
    target.mkdir()
    return Prune(**fields).run(source, target, context or Context())
