"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """Return a table; every column but the first is aligned to the right if they hold `numbers`."""
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in (head, rule, *rows))
    return "\n".join(f"| {line} |" for line in lines)
