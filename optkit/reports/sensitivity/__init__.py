"""Which layers of a model suffer from quantization, as a table, a page of text and a plot."""

from optkit.reports.sensitivity.measured import measure_model
from optkit.reports.sensitivity.page import to_markdown, to_svg
from optkit.reports.sensitivity.report import LayerRow, SensitivityReport, parse_choices
