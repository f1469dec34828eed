"""Small changes that make something malformed out of something right; drawn, so that a seed repeats
them.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**25,
    -0.5,
    1e308,
    "",
    "x",
    "\0",
    "../..",
    "1e999",
    [],
    {},
    [[]],
    {"x": {}},
    ["x", 5],
)
WORDS = (
    "",
    " ",
    "\t",
    "\n",
    "\0",
    "\x1b[31m",
    "-",
    "--",
    "=",
    "<=",
    "x",
    "é",
    "\u2028",
    "９",
    "1e999",
    "nan",
    "[",
    "]",
    "{",
    "}",
    ":",
    "&a",
    "*a",
    "!!int ",
    "|",
    ">",
    "#",
    "%",
    "9" * 400,
)
NUMBERS = (0, 1, 2**7, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


def mutated_json(value: Any, draw: random.Random) -> bytes:
    """Return JSON with one or two values changed, lost, doubled or nested; now and then no JSON at
    all.
    """
    if draw.random() < 0.15:
        return mutated_bytes(json.dumps(value).encode(), draw)
    changed = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2))):
        changed = _changed(changed, draw)
    return json.dumps(changed).encode()


def mutated_bytes(data: bytes, draw: random.Random, header: int | None = None) -> bytes:
    """Return bytes of which some in the first `header` were flipped, set to a number's, cut,
    doubled or lost.
    """
    end = max(1, min(len(data), header or len(data)))
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.randrange(end)
        match draw.randrange(6):
            case 0:
                data = data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
            case 1:
                data = data[:place] + struct.pack("<Q", draw.choice(NUMBERS)) + data[place + 8 :]
            case 2:
                data = data[:place]
            case 3:
                data = data[:place] + data[place : place + draw.randrange(64)] + data[place:]
            case 4:
                data = data[:place] + data[place + draw.randrange(1, 16) :]
            case _:
                data = data[:place] + draw.randbytes(draw.randrange(1, 16)) + data[place:]
    return data


def mutated_text(text: str, draw: random.Random) -> str:
    """Return a text with a few words put in, characters lost or parts exchanged."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        place = draw.randrange(len(text) + 1)
        match draw.randrange(4):
            case 0 | 1:
                text = text[:place] + draw.choice(WORDS) + text[place:]
            case 2:
                text = text[:place] + text[place + draw.randrange(1, 8) :]
            case _:
                other = draw.randrange(len(text) + 1)
                text = text[:place] + text[other : other + 20] + text[place:]
    return text


def _changed(value: Any, draw: random.Random) -> Any:
    """Return a value of which one part, drawn from all its depths, is another."""
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.15:
        return copy.deepcopy(draw.choice(VALUES))
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    match draw.randrange(6):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[draw.choice(("x", "", "\0", "__metadata__"))] = value.pop(key)
        case 1:
            value.append(copy.deepcopy(value[key]))
        case _:
            value[key] = _changed(value[key], draw)
    return value
