"""Several scorecards side by side: differences, the Pareto front under uncertainty, and which to take."""

from optkit.comparison.comparing import compare, compare_scorecards
from optkit.comparison.result import Column, Comparison, Difference, Entry, Floor, Group
from optkit.comparison.table import to_csv, to_markdown
