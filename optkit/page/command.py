"""The command that makes an artifact again, with its recipe as it was resolved."""

from __future__ import annotations

import shlex

from optkit.common.yaml_text import yaml_text
from optkit.scorecard import Scorecard


def command(scorecard: Scorecard) -> str:
    """Return shell lines that write the recipe to a file and run it; empty without a recipe."""
    if not scorecard.recipe:
        return ""
    text = yaml_text(scorecard.recipe)
    end = "RECIPE"
    while end in text.splitlines():
        end += "_"
    name = shlex.quote(f"{scorecard.name}.yaml")
    place = "./" if name.startswith(("-", "'-")) else ""
    return f"cat > {place}{name} <<'{end}'\n{text}{end}\noptkit run {place}{name}"
