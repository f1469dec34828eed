"""What the two models answered: items whose answer changed, and prompts continued by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.scorecard import Scorecard


def answers(scorecard: Scorecard, directory: Path | None) -> list[dict[str, Any]]:
    """Return groups of answers to show, from the files that evals left beside the scorecard."""
    return []
