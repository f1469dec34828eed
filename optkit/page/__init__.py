"""Pages: a scorecard, or a comparison of several, as one HTML file that works offline."""

from optkit.page.scorecard_page import scorecard_page

__all__ = ["scorecard_page"]
