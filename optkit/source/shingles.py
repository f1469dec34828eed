"""What two texts have in common, from a small sketch of one of them.
A sketch has the least hashes of the text's runs of eight words.

A. Broder, On the resemblance and containment of documents (1997): the least hashes are a random
sample of all. So the share of them that the other text has too estimates the share of the whole.
Words are compared without case, punctuation and white space. So neither another split of the same
data nor a tokenised or lower-cased edition of it passes for another text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

RUN = 8
"""Words that count as one; two texts that were written apart share few runs of so many."""
KEPT = 4096
"""Hashes of a sketch, at most: 44 kB of base64. Of 10 million words one run in 2,400 is kept, so
that 10,000 of them are recognised.
"""
FEWEST = 3
"""Runs in common that are no accident."""
CHUNK = 1 << 20
"""Words that are hashed at a time."""
IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\W_{IDEOGRAPHS}]+")
"""A word, or one sign of a script that puts no spaces between words."""


@dataclass(frozen=True)
class Common:
    """What a text has in common with a sketched one, as shares of their different runs of words."""

    of_text: float
    of_sketched: float


def sketch(passages: Iterable[str]) -> str:
    """Return the least hashes of a text, in base64; of a text of fewer than 4,096 runs all of them."""
    least: NDArray[np.uint64] = np.empty(0, np.uint64)
    for hashes in _hashes(passages):
        least = np.union1d(least, hashes)[:KEPT]
    return base64.b64encode(least.astype("<u8").tobytes()).decode()


def common(sketched: str, passages: Iterable[str]) -> Common:
    """Return what a text shares with the sketched one; nothing if fewer than three runs agree."""
    theirs = np.frombuffer(base64.b64decode(sketched), "<u8").astype(np.uint64)
    if len(theirs) < FEWEST:
        return Common(0.0, 0.0)
    bound = theirs[-1] if len(theirs) == KEPT else np.iinfo(np.uint64).max
    ours: NDArray[np.uint64] = np.empty(0, np.uint64)
    for hashes in _hashes(passages):
        ours = np.union1d(ours, hashes[hashes <= bound])
    both = len(np.intersect1d(ours, theirs))
    return Common(both / len(ours), both / len(theirs)) if both >= FEWEST else Common(0.0, 0.0)


def _hashes(passages: Iterable[str]) -> Iterator[NDArray[np.uint64]]:
    """Yield the hashes of the runs of words of each passage, uint64, a chunk at a time."""
    known: dict[str, int] = {}
    for passage in passages:
        words = (match.group() for match in WORD.finditer(passage.casefold()))
        codes: list[int] = []
        while more := list(islice(words, CHUNK)):
            for word in more:
                if word not in known:
                    known[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
            codes += [known[word] for word in more]
            if len(codes) >= RUN:
                yield _mixed(np.array(codes, np.uint64))
            codes = codes[-(RUN - 1) :]


def _mixed(codes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of every run.
    It is a polynomial in the words' hashes modulo 2^64, and splitmix64's last step over it.
    """
    runs: NDArray[np.uint64] = np.zeros(len(codes) - RUN + 1, np.uint64)
    for place in range(RUN):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + codes[place : len(codes) - RUN + 1 + place]
    runs = (runs ^ (runs >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    runs = (runs ^ (runs >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return runs ^ (runs >> np.uint64(31))
