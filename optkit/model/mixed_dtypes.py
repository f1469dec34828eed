"""Architectures whose code in transformers computes in float32 alone, and what to say of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from optkit.errors import SourceError, first_line
from optkit.model.text_config import text_config, text_type

FLOAT32_ALONE = frozenset({"deberta", "deepseek_v4", "xlnet", "xlstm"})
"""`model_type` of those whose code fails in bfloat16 as transformers opens it."""
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
        raise _mixed(where, f"the model's code in transformers mixes dtypes: {first_line(error)}") from error


def computes_in_float32_alone(config: Mapping[str, Any]) -> bool:
    """Say whether the code of a model fails if its weights are narrower."""
    return text_type(config) in FLOAT32_ALONE


def refuse_narrow(config: Mapping[str, Any], dtype: str | None, where: str) -> None:
    """Raise MixedDtypesError for a model that would be opened in a dtype that its code cannot compute in.
    `dtype` is a name as torch has it; None: the one that config.json says.
    """
    dtype = dtype or str(text_config(config).get("dtype") or config.get("dtype") or config.get("torch_dtype"))
    if dtype in ("bfloat16", "float16") and computes_in_float32_alone(config):
        raise _mixed(where, f"the model's code in transformers cannot compute in {dtype}")


def _mixed(where: str, what: str) -> MixedDtypesError:
    return MixedDtypesError(
        what,
        where=where,
        why="It makes numbers of a dtype of its own, whatever that of the weights is",
        remedy="Leave the weights in float32, or make them so by a recipe of `cast: float32` without evals; take out "
        "mx and precision",
    )
