"""The place of the texts of a stage or an eval, and the tokenizer that reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from optkit.model.text_config import text_config


@dataclass(frozen=True)
class TextPlace:
    """What is known of texts before anything runs."""

    tokenizer: Path
    """A model directory."""
    data: Path | None
    """Directory with local copies of data sets, if the user named one."""
    counts: Path
    """Directory, perhaps not there yet, in which it is remembered how many tokens texts have."""
    trust_remote_code: bool = False
    transformers: bool = False
    """transformers may be imported, to open the tokenizer as the run will."""

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model knows; None if its config.json does not say."""
        try:
            config = json.loads((self.tokenizer / "config.json").read_text(encoding="utf-8"))
            found = text_config(config).get("vocab_size")
        except (OSError, ValueError, AttributeError):
            return None
        return found if isinstance(found, int) else None
