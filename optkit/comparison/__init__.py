"""Several scorecards side by side: differences, the Pareto front under uncertainty, and which to take."""

from optkit.comparison.comparing import compare, compare_scorecards
from optkit.comparison.result import Cell, Column, Comparison, Difference, Entry, Floor, Group, LeftOut
from optkit.comparison.table import to_csv, to_markdown

__all__ = [
    "Cell",
    "Column",
    "Comparison",
    "Difference",
    "Entry",
    "Floor",
    "Group",
    "LeftOut",
    "compare",
    "compare_scorecards",
    "to_csv",
    "to_markdown",
]
