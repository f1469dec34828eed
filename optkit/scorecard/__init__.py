"""The scorecard: what an artifact cost and bought, beside the baseline and with its protocol."""

from optkit.scorecard.attribution import waterfall
from optkit.scorecard.build import build_scorecard
from optkit.scorecard.loading import Loading, loading_cells, loading_columns, loading_notes
from optkit.scorecard.markdown import to_markdown
from optkit.scorecard.numbers import format_ratio, format_value, interval_text
from optkit.scorecard.ratios import metric_identity, ratio_to_baseline
from optkit.scorecard.scorecard import Beside, Measured, Rung, Scorecard, StepLine, file_lines, read_json, to_json
from optkit.scorecard.summary import first_rows, other_notes, to_act_on
from optkit.scorecard.table import Row, change_of, footnotes, metric_label, protocols, table_rows, value_text
from optkit.scorecard.training import Training, training_line, trainings
