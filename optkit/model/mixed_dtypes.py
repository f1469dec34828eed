"""What to say if the code of an architecture cannot compute in the dtype of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optkit.errors import SourceError

SAID = ("to have the same dtype", "expected scalar type", "should be the same")
"""Parts of what torch says of two dtypes in one operation."""


class MixedDtypesError(SourceError):
    """The code of an architecture cannot compute in the dtype of its weights."""


@contextmanager
def one_dtype(where: str) -> Iterator[None]:
    """Turn an operation on two dtypes into a MixedDtypesError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if not any(part in str(error) for part in SAID):
            raise
        raise MixedDtypesError(
            f"the model's code in transformers mixes dtypes: {str(error).splitlines()[0]}",
            where=where,
            why="It makes numbers of a dtype of its own, whatever that of the weights is",
            remedy="Leave the weights in float32: take out cast, mx and precision",
        ) from error
