"""The directories that optkit keeps things in between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/optkit`, else `~/.cache/optkit`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optkit"


def default_store() -> Path:
    """Return `$OPTKIT_STORE`, else the cache directory."""
    named = os.environ.get("OPTKIT_STORE")
    return Path(named).expanduser() if named else cache_directory()
