"""Which layers of a model suffer from quantization: measured in one pass, as a table, a page of text and a plot."""

from optkit.sensitivity.measured import measure_model
from optkit.sensitivity.page import to_markdown
from optkit.sensitivity.plot import to_svg
from optkit.sensitivity.report import LayerRow, SensitivityReport, parse_choices

__all__ = ["LayerRow", "SensitivityReport", "measure_model", "parse_choices", "to_markdown", "to_svg"]
