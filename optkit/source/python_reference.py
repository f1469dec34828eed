"""The text of `python-reference`, in splits that share no text.
It is the language reference that every Python carries (`pydoc_data.topics`).

About 91,000 SmolLM2 tokens in Python 3.11. The words differ between Python versions: the pinned
revision is a digest of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from optkit.errors import SourceError

SPLITS = ("train", "validation", "test")
SHARES = {"test": 25, "validation": 10}
"""Percent of the topics, by name; the rest is train."""
SALT = "optkit-61:"
"""The first that leaves 66,000 tokens of Python 3.11 in train (128 x 512) and 16,000 in test, and
loses none to shared paragraphs.
"""
LONG_PARAGRAPH = 80
"""Characters from which on a paragraph that occurs twice is a repetition and not a heading or a
phrase.
"""


def split_of(topic: str) -> str:
    """Return the split that a topic belongs to.
    It depends on the name alone, so that it is the same in each Python version.
    """
    place = int(hashlib.sha256(f"{SALT}{topic}".encode()).hexdigest()[:8], 16) % 100
    for split, share in SHARES.items():
        if place < share:
            return split
        place -= share
    return "train"


def long_paragraphs(text: str) -> frozenset[str]:
    """Return the paragraphs of a topic that are long enough to be told apart.
    White space and indentation are evened out.
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return frozenset(paragraph for paragraph in paragraphs if len(paragraph) >= LONG_PARAGRAPH)


def read_topics(split: str) -> list[str]:
    """Return the topics of a split, in the order of their names. Raises SourceError if this Python
    came without them.

    A topic that is wholly repeated within another (`try` within `compound`) is left out. So is one
    that shares a long paragraph with a topic of an earlier split.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise SourceError(
            "this Python has no pydoc_data.topics",
            where="python-reference",
            why="It was left out when it was packaged",
            remedy="Take another Python, or another data set",
        ) from error
    paragraphs = {name: long_paragraphs(text) for name, text in topics.items()}
    kept = [name for name in sorted(topics) if not _is_within_another(name, paragraphs)]
    earlier = {
        paragraph
        for name in kept
        if SPLITS.index(split_of(name)) < SPLITS.index(split)
        for paragraph in paragraphs[name]
    }
    return [topics[name] for name in kept if split_of(name) == split and paragraphs[name].isdisjoint(earlier)]


def _is_within_another(name: str, paragraphs: Mapping[str, frozenset[str]]) -> bool:
    mine = paragraphs[name]
    return bool(mine) and any(mine < other or (mine == other and first < name) for first, other in paragraphs.items())
