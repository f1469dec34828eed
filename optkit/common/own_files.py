"""The files that optkit itself leaves beside the weights of an artifact.
They say how it was made and measured, and deploy nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePath

RECORD = "optkit.json"
SCORECARD_JSON = "scorecard.json"
SCORECARD_MARKDOWN = "scorecard.md"
SCORECARD_HTML = "scorecard.html"
VERIFICATION_JSON = "verification.json"
BOM = "bom.cdx.json"
SIGNATURE = "model.sig"
"""What `model_signing` calls it too."""
ATTACHMENTS = "scorecard_files"
"""Folder of what evals and trainings leave beside their numbers."""
CARD = "README.md"
"""The model card that `optkit card` writes; its author may edit it, so no run replaces it."""
MARK = "<!-- Written by optkit, and unchanged if the text above has the SHA-256 "
SOURCE_CARD = "README.base.md"
"""What an artifact calls the card of the model that it was made of."""
NUMBERS = frozenset({SCORECARD_JSON, SCORECARD_MARKDOWN, SCORECARD_HTML, VERIFICATION_JSON})
"""Those that a later measurement or verification writes anew."""
OWN_FILES = frozenset({RECORD, *NUMBERS, BOM, SIGNATURE})


def is_own(relative: PurePath | str) -> bool:
    """Say whether a file is one of these or an attachment.
    Its name is relative to the model's directory.
    """
    path = PurePath(relative)
    return str(path) in OWN_FILES or path.parts[:1] == (ATTACHMENTS,)


def name_in_artifact(name: str) -> str:
    """Return what an artifact calls a file of a directory of weights."""
    return SOURCE_CARD if name == CARD else name


def marked(card: str) -> str:
    """Return a card that says below its text what it was when optkit wrote it."""
    return f"{card}\n{MARK}{hashlib.sha256(card.encode()).hexdigest()} -->\n"


def is_unedited(card: bytes) -> bool:
    """Say whether a card is as optkit wrote it, so that it can write it again."""
    text, _, mark = card.rpartition(f"\n{MARK}".encode())
    return mark == f"{hashlib.sha256(text).hexdigest()} -->\n".encode()


def without_home(text: str) -> str:
    """Return a text for others, in which the user's home directory is `~`.
    That does not say whose it is.
    """
    home = str(Path.home())
    return text.replace(f"{home}/", "~/") if home != "/" else text
