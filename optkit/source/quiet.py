"""Keep transformers, accelerate and bitsandbytes quiet while optkit calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show only errors of transformers and no progress bars, and restore its settings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def only_errors_of(logger: str) -> None:
    """Show only the errors of a library from now on.

    `bitsandbytes` warns at each call of each int8 layer that inputs become float16, and
    `accelerate.big_modeling` that weights are elsewhere, which is what it was asked for.
    """
    import logging

    logging.getLogger(logger).setLevel(logging.ERROR)
