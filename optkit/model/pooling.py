"""How the features of tokens become the embedding of a text.
A directory of sentence-transformers says so, and is read without that library.

modules.json lists what computes an embedding, e.g. Transformer, Pooling, Normalize;
1_Pooling/config.json says what the pooling takes
(https://sbert.net/docs/package_reference/sentence_transformer/modules.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optkit.common.files import check_name_inside, read_json, read_object, reading
from optkit.errors import SourceError
from optkit.model.companions import require_inside
from optkit.model.task import Task

MODULES = "modules.json"
CONFIG = "config.json"
AGAIN = "Copy it from the source again"
KNOWN = ("Transformer", "Pooling", "Normalize")
"""Modules that optkit computes as sentence-transformers does."""
Mode = Literal["mean", "cls", "max"]
MODES: dict[Mode, str] = {"mean": "mean of the tokens", "cls": "first token", "max": "largest of the tokens"}
OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of a pooling config, each true or false, in the place of which newer ones have
`pooling_mode`.
"""


@dataclass(frozen=True)
class Pooling:
    """What becomes of features."""

    mode: Mode = "mean"
    normalized: bool = True
    stated: bool = False
    """The directory says so; else it is what most encoders are used with."""

    def __str__(self) -> str:
        return f"{MODES[self.mode]}{', normalised' if self.normalized else ''}"

    def __call__(self, features: Any, mask: Any) -> Any:
        """float32 [batch, tokens, hidden] and mask [batch, tokens] -> float32 [batch, hidden].
        Both are of NumPy or both of torch.
        """
        seen = mask[..., None]
        if self.mode == "cls":
            pooled = features[:, 0]
        elif self.mode == "mean":
            pooled = (features * seen).sum(1) / seen.sum(1)
        else:
            lowest = features.min() - 1
            pooled = (features * seen + lowest * (1 - seen)).max(1)
            pooled = getattr(pooled, "values", pooled)
        if not self.normalized:
            return pooled
        return pooled / ((pooled * pooled).sum(-1) ** 0.5)[:, None]


def pooling_for(directory: Path, task: Task) -> Pooling | None:
    """Return how an encoder's features become an embedding; None for one that gives labels."""
    return read_pooling(directory) if task is Task.FEATURES else None


def read_pooling(directory: Path) -> Pooling:
    """Return what a model directory says.
    Raises SourceError if that is damaged, or something that optkit does not compute.
    """
    modules = _modules(directory)
    if not modules:
        return Pooling()
    kinds = [kind for kind, _ in modules]
    if other := next((kind for kind in kinds if kind not in KNOWN), None):
        raise SourceError(
            f"its embeddings go through the module {other}",
            where=str(directory / MODULES),
            why=f"optkit computes {', '.join(KNOWN)} as sentence-transformers does, and no others",
            remedy=f"Delete {MODULES} in a copy of the model: then the mean of the features before "
            "this module is compared",
        )
    if missing := missing_modules(directory):
        raise SourceError(
            f"there is no {missing[0]}",
            where=str(directory),
            why=f"{MODULES} names it",
            remedy="Copy it from the source",
        )
    places = [path for kind, path in modules if kind == "Pooling"]
    if len(places) != 1:
        raise SourceError(
            f"{len(places)} modules are Pooling", where=str(directory / MODULES), why="An embedding has one"
        )
    path = directory / places[0] / CONFIG
    with reading(path, "is no configuration of a pooling", AGAIN):
        found = _stated_modes(read_object(path, remedy=AGAIN))
    if len(found) != 1 or found[0] not in MODES:
        raise SourceError(
            f"embeddings are pooled by {' and '.join(found) or 'nothing'}",
            where=str(path),
            why=f"optkit knows one of {', '.join(MODES)}",
        )
    return Pooling(next(mode for mode in MODES if mode == found[0]), "Normalize" in kinds, stated=True)


def longest_text(directory: Path) -> int | None:
    """Return the tokens that sentence-transformers cuts a text to; None if none is said."""
    path = directory / "sentence_bert_config.json"
    found = read_object(path, remedy=AGAIN).get("max_seq_length") if path.is_file() else None
    return found if isinstance(found, int) and found > 0 else None


def missing_modules(directory: Path) -> list[str]:
    """Return the configs of poolings that modules.json names and that are not there."""
    places = [f"{path}/{CONFIG}" for kind, path in _modules(directory) if kind == "Pooling"]
    return [place for place in places if not require_inside(directory, place, MODULES).is_file()]


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Return kind and folder of each module; nothing without modules.json."""
    path = directory / MODULES
    if not path.is_file():
        return []
    listed = read_json(path, remedy=AGAIN)
    with reading(path, "is no list of modules", AGAIN):
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in listed]
        for _, place in modules:
            check_name_inside(place or CONFIG)
    return modules


def _stated_modes(config: Any) -> list[str]:
    if stated := config.get("pooling_mode"):
        return [stated] if isinstance(stated, str) else list(map(str, stated))
    return [mode for key, mode in OLD_KEYS.items() if config.get(key)]
