"""Artifacts to choose from: a good one, a small one, a waste and a fast one."""

import math
from pathlib import Path

from optkit.comparison import Comparison, compare_scorecards
from optkit.scorecard import Scorecard
from tests.support.scorecards import card, decode, perplexity, size

LOSSES = [3.0 + 0.2 * math.sin(index) for index in range(12)]
TURNS = [20.0, 20.2, 19.9, 20.1]
BASELINE = [perplexity(LOSSES), decode(TURNS), size(500e6)]


def made(name: str, loss: float = 0.0, speed: float = 1.0, size_bytes: float = 500e6, **fields: object) -> Scorecard:
    """A model whose losses are higher by `loss`, a little less in every other window."""
    losses = [each + loss * (1 + 0.05 * (-1) ** index) for index, each in enumerate(LOSSES)]
    metrics = [perplexity(losses), decode([each * speed for each in TURNS]), size(size_bytes)]
    return card(name, metrics, BASELINE, **fields)


def compared(*cards: Scorecard, **options: object) -> Comparison:
    return compare_scorecards([(Path("artifacts") / each.name, each) for each in cards], **options)


GOOD = made("good", 0.02, 2.0, 250e6)
SMALL = made("small", 0.05, 2.3, 150e6)
WASTE = made("waste", 0.06, 1.5, 260e6)
FAST = made("fast", 0.20, 3.0, 160e6)
