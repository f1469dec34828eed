"""Whether other programs open an artifact and compute what optkit measured.
Each engine of `optkit verify` has one `Loading`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from optkit.common.frozen import Frozen

NOTHING = "-"
FIRST_COLUMNS = ("engine", "loads")
COLUMNS = ("logit difference", "mean KL", "same top-1", "same tokens")
OF_EMBEDDINGS = ("largest difference", "min cosine")


class Loading(Frozen):
    """What one engine made of an artifact."""

    engine: str
    """Name of the engine, e.g. `vllm`."""
    version: str = ""
    """Empty if it is not installed."""
    packages: dict[str, str] = {}
    """Versions of the engine and of what it stands on, in its own environment."""
    verdict: Literal["agrees", "disagrees", "refused", "skipped"]
    """`refused`: it is installed and does not open the artifact. `skipped`: it could not be asked."""
    reason: str = ""
    """Why not, if it does not agree."""
    device: str = ""
    """On which the engine computed."""
    dtype: str = ""
    """In which the engine computed."""
    compared: str = ""
    """What of the logits was compared, on which tokens, with which tolerance."""
    max_logit_difference: float | None = None
    """The largest between two logits at one place."""
    mean_kl: float | None = None
    """KL(optkit || engine) in nats, mean over the tokens."""
    stepped_kl: float | None = None
    """The same, of tokens that the engine was fed one at a time, each with what it kept of those
    before.
    """
    top1_agreement: float | None = None
    """Share of the tokens after which both find the same next one likeliest."""
    same_tokens: int | None = None
    """How many generated tokens are those of optkit, from the first on."""
    text: str = ""
    """What it generated."""
    max_difference: float | None = None
    """Of an encoder's embeddings, the largest between two numbers at one place."""
    min_cosine: float | None = None
    """The least cosine similarity of an encoder's embedding of a text to optkit's."""
    seconds: float = 0.0
    """From the start of the program to its answer."""

    @property
    def loads(self) -> bool:
        """Whether the engine opened the artifact and computed with it."""
        return self.verdict in ("agrees", "disagrees")

    @property
    def failed(self) -> bool:
        """Whether the engine is installed and does not do what optkit measured."""
        return self.verdict in ("disagrees", "refused")


def loading_columns(loadings: Iterable[Loading]) -> tuple[str, ...]:
    """Return the heads of the loading table, those for embeddings if an engine gave some."""
    return (*FIRST_COLUMNS, *(OF_EMBEDDINGS if any(each.min_cosine is not None for each in loadings) else COLUMNS))


def loading_cells(loading: Loading, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of a line of the loading table, in the order of its columns."""
    name = " ".join(part for part in (loading.engine, loading.version, loading.dtype) if part)
    loads = {"agrees": "yes", "disagrees": "DISAGREES", "refused": "NO", "skipped": "not tried"}[loading.verdict]
    cells = {
        "engine": name,
        "loads": loads,
        "logit difference": NOTHING if loading.max_logit_difference is None else f"{loading.max_logit_difference:.2g}",
        "mean KL": NOTHING if loading.mean_kl is None else f"{loading.mean_kl:.2g}",
        "same top-1": NOTHING if loading.top1_agreement is None else f"{loading.top1_agreement:.1%}",
        "same tokens": NOTHING if loading.same_tokens is None else str(loading.same_tokens),
        "largest difference": NOTHING if loading.max_difference is None else f"{loading.max_difference:.2g}",
        "min cosine": NOTHING if loading.min_cosine is None else f"{loading.min_cosine:.6f}",
    }
    return tuple(cells[column] for column in columns)


def loading_notes(loadings: Iterable[Loading]) -> list[str]:
    """Return what to say below the table.
    That is why an engine does not agree, what was compared, and what it generated.
    """
    notes = []
    for each in loadings:
        packages = ", ".join(f"{name} {version}" for name, version in each.packages.items() if name != each.engine)
        device = f"on {each.device} " if each.device else ""
        text = f"it continues {each.text!r}" if each.text else ""
        about = [each.reason, each.compared, text, f"{device}with {packages}" if packages else ""]
        notes.append(f"{each.engine}: " + "; ".join(part for part in about if part))
    return notes
