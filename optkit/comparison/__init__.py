"""Several scorecards side by side: differences, the Pareto front under uncertainty, and which to take."""

from optkit.comparison.compare import compare, compare_scorecards
from optkit.comparison.result import Cell, Column, Comparison, Difference, Entry, Floor, Group, LeftOut

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
]
