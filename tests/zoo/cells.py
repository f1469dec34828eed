"""One model through one stage: what becomes of it."""

import re
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from optkit.errors import MissingPackageError, OptkitError, RecipeError, SourceError
from optkit.execute import check_texts, execute
from optkit.kernels.cpu.native import exact_products
from optkit.model.prompts import placed
from optkit.plan import make_plan, session_memory
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.stage import Context
from optkit.store.store import Store
from tests.zoo.models import TOKENS, given_to, greedy, logits_of, plain_model
from tests.zoo.stages import STAGES, Column

SAME, REFUSED, LATE = "same", "refused", "late"
"""Opened by plain transformers with optkit's logits; refused by the plan; refused by the stage."""
CRASHED, DIFFERENT, MUTE = "crashed", "different", "mute"
"""What must not be; `mute` is a refusal that says neither why nor what to do."""
BAD = (CRASHED, DIFFERENT, MUTE)
UNTRIED = "untried"
"""A package is missing here: no entry of the table."""
NEW_TOKENS = 3
PROMPT = 12
"""More tokens than a sliding window of the zoo sees."""


class Cell(NamedTuple):
    """What became of a model, and a sentence on all but `SAME`."""

    mark: str
    said: str = ""


def cell(source: Path, stage: str, place: Path) -> Cell:
    """Return what becomes of a model in a column of `STAGES`; `place` is an empty directory.

    Finished steps lie beside the model, for columns that begin alike.
    """
    found = _cell(source, STAGES[stage], place)
    said = found.said.replace(str(place), "").replace(str(source.parent), "")
    return Cell(found.mark, re.sub(r"/\S*/steps/\w+/model", "MODEL", said))


def _cell(source: Path, column: Column, place: Path) -> Cell:
    mark = REFUSED
    try:
        file = place / "zoo.yaml"
        file.write_text(f"model: {source}\nstages:\n{column.stages(source, place)}\n", encoding="utf-8")
        recipe = load_recipe(file)
        store = Store(source.parent / "store")
        todo = make_plan(recipe.pinned(None), store, "cpu")
        check_texts(todo, store, None)
        session_memory(todo.steps[-1], recipe.settings, "cpu")  # as if something were measured
        mark = LATE
        weights = execute(todo, store, Context()).weights
        session = open_session(weights, [entry.value for entry in recipe.settings], "cpu")
        with exact_products():
            ours, continued = _ours(session, source, column.of_steps)
        session.close()
    except MissingPackageError as error:
        return Cell(UNTRIED, str(error))
    except OptkitError as error:
        explained = isinstance(error, RecipeError) or ". " in str(error)
        return Cell(mark if explained else MUTE, str(error))
    except Exception as error:  # whatever it is: that is what the zoo is for
        return Cell(CRASHED, _told(error))
    try:
        return _compared(source if column.against_source else weights, column, ours, continued)
    except Exception as error:
        return Cell(CRASHED, f"transformers: {_told(error)}")


def _ours(session: Any, source: Path, of_steps: bool) -> tuple[Tensor, Tensor | None]:
    if hasattr(session, "outputs"):
        return session.outputs(TOKENS, torch.ones_like(TOKENS)), None
    if hasattr(session, "logits_given"):
        given = given_to(AutoConfig.from_pretrained(source))
        return session.logits_given(placed(given, "cpu", session.model.dtype), TOKENS), None
    logits = session.logits(TOKENS).float()
    try:
        return logits, session.generate(TOKENS[:, :PROMPT], NEW_TOKENS)
    except SourceError:  # nothing is carried from token to token, or that of one sequence alone
        return logits, session.generate(TOKENS[:1, :PROMPT], NEW_TOKENS) if of_steps else None


def _compared(directory: Path, column: Column, ours: Tensor, continued: Tensor | None) -> Cell:
    model = plain_model(directory)
    with torch.no_grad():
        theirs = logits_of(model, TOKENS)
    if not bool(theirs.isfinite().all()) or float(theirs.std()) < 1e-3:
        return Cell(CRASHED, "the logits of the zoo's model say nothing")
    apart = _apart(ours, theirs, column.exact)
    if not apart <= column.tolerance:
        return Cell(DIFFERENT, f"logits differ by {apart:.1g} of their size")
    if (
        column.exact
        and continued is not None
        and not torch.equal(continued, greedy(model, continued[:, :PROMPT], NEW_TOKENS))
    ):
        return Cell(DIFFERENT, "other tokens are generated")
    return Cell(SAME)


def _apart(ours: Tensor, theirs: Tensor, exact: bool) -> float:
    """Return the difference of logits relative to them: the largest of all tokens, or the median.

    If inputs are rounded, a router may send a token to another expert; lost weights change all tokens.
    """
    tokens = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).flatten()
    return float(tokens.max() if exact else tokens.median())


def _told(error: Exception) -> str:
    """Return an exception with the line of optkit that it came through last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/optkit/" in frame.filename]
    place = f" ({frames[-1].filename.rpartition('/optkit/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}{place}"
