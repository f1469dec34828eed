"""Pages: a scorecard, or a comparison of several, as one HTML file that works offline."""

from optkit.page.comparison_page import comparison_page
from optkit.page.report import report
from optkit.page.scorecard_page import scorecard_page
