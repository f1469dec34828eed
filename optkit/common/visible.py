"""Text of others on a terminal.
Control characters are shown and never sent, so that none moves the cursor or begins a line.
"""

from __future__ import annotations

import re

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Those of ASCII and Latin-1 (ESC and CSI among them), and of Unicode the ends of lines and the
marks that turn the direction.
"""


def visible(text: str) -> str:
    """Return a text in one line: a newline is shown as `\\n`, ESC as `\\x1b`."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def visible_lines(text: str) -> str:
    """Return a text in as many lines as it has."""
    return "\n".join(visible(line) for line in text.split("\n"))
