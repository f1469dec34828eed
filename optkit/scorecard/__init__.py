"""The scorecard: what an artifact cost and bought, beside the baseline and with its protocol."""

from optkit.scorecard.attribution import Waterfall, waterfall
from optkit.scorecard.build import build_scorecard
from optkit.scorecard.loading import Loading, loading_cells, loading_columns, loading_notes
from optkit.scorecard.markdown import to_markdown
from optkit.scorecard.numbers import format_ratio, format_value, interval_text
from optkit.scorecard.ratios import metric_identity, protocol_difference, ratio_to_baseline, ratio_to_earlier
from optkit.scorecard.scorecard import (
    Beside,
    GateResult,
    Measured,
    Release,
    Rung,
    Scorecard,
    StepLine,
    file_lines,
    read_json,
    to_json,
)
from optkit.scorecard.summary import first_rows, other_notes, to_act_on
from optkit.scorecard.table import (
    Row,
    change_of,
    footnotes,
    metric_label,
    protocols,
    table_rows,
    value_text,
)
from optkit.scorecard.training import Training, training_line, trainings

__all__ = [
    "Beside",
    "GateResult",
    "Loading",
    "Measured",
    "Release",
    "Row",
    "Rung",
    "Scorecard",
    "StepLine",
    "Training",
    "Waterfall",
    "build_scorecard",
    "change_of",
    "file_lines",
    "first_rows",
    "footnotes",
    "format_ratio",
    "format_value",
    "interval_text",
    "loading_cells",
    "loading_columns",
    "loading_notes",
    "metric_identity",
    "metric_label",
    "other_notes",
    "protocol_difference",
    "protocols",
    "ratio_to_baseline",
    "ratio_to_earlier",
    "read_json",
    "table_rows",
    "to_act_on",
    "to_json",
    "to_markdown",
    "training_line",
    "trainings",
    "value_text",
    "waterfall",
]
