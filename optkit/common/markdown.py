"""Tables and blocks of code in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """Return a table; every column but the first is aligned to the right if they hold `numbers`."""
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in (head, rule, *rows))
    return "\n".join(f"| {line} |" for line in lines)


def fenced(text: str, language: str) -> str:
    """Return a block of code, whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
