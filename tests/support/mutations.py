"""Damage for files and recipes: pure functions from something valid and a `random.Random` to
something that may be malformed.
"""

import copy
import json
import struct
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 65, 2**31, 2**63, 2**64, -(2**63), 10**15, 10**30,
    0.5, -0.0, 1e308, 1e-308, float("inf"), float("nan"),
    "", "0", "64", "1e999", "text", "../x", "/etc/passwd", "a\0b", "\u202e", "\ud800", "re:(", "x" * 5000, "\u0663",
    [], [[]], [None], [0], ["text"], [1, 2, 3],
    {}, {"": None}, {"text": {}}, {"rope_type": 5},
)  # fmt: skip
"""What no author of a file meant at most places."""
ODD_BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"\0" * 8,
    b"\xff" * 8,
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
    b"(((",
    b"{",
    b'"',
    b"\n",
)
ODD_WORDS = (
    "", " ", "\t", "\n", "\0", "\x1b[31m", "-", "--", "=", "<=", "x", "é", "\u2028", "\uff19", "1e999", "nan",
    "[", "]", "{", "}", ":", "&a", "*a", "!!int ", "|", ">", "#", "%", "9" * 400,
)  # fmt: skip
"""What means something to YAML, a terminal or a parser of numbers."""


def damaged_bytes(valid: bytes, draw: Random, among: int | None = None) -> bytes:
    """Flip, cut, repeat, insert or overwrite bytes in a few places, more often near the beginning;
    `among` the first so many, if given.
    """
    if among is not None:
        return damaged_bytes(valid[:among], draw) + valid[among:]
    data = bytearray(valid)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if not data:
            return bytes(data)
        at = min(int(len(data) * draw.random() ** draw.choice((1, 4, 16))), len(data) - 1)
        match draw.randrange(7):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at] = draw.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + draw.choice((1, 4, 8, 64))]
            case 4:
                data[at:at] = draw.choice(ODD_BYTES)
            case 5:
                data[at:at] = data[at : at + draw.choice((1, 8, 64))]
            case _:
                word = struct.pack("<Q", draw.choice((0, 1, 2**31, 2**62, 2**63, 2**64 - 1)))
                data[at : at + 8] = word
    return bytes(data)


def damaged_json(valid: Any, draw: Random) -> Any:
    """Return JSON in which a few values are odd, missing, renamed, of another type, or nested
    deeply.
    """
    value = copy.deepcopy(valid)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        value = _changed(value, draw)
    return value


def _changed(value: Any, draw: Random) -> Any:
    """Change one place inside: go down with some luck, else change what is here."""
    inside = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inside or draw.random() < 0.1:
        return _odd(value, draw)
    key = draw.choice(inside)
    match draw.randrange(12):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[draw.choice(("", "text", "\0", str(key).upper(), f"{key} "))] = value.pop(key)
        case 2 if isinstance(value, list):
            value.insert(key, copy.deepcopy(value[key]))
        case 3 if isinstance(value, dict):
            value[key], other = value[draw.choice(inside)], value[key]
            value[draw.choice(inside)] = other
        case _:
            value[key] = _changed(value[key], draw)
    return value


def _odd(value: Any, draw: Random) -> Any:
    match draw.randrange(6):
        case 0 if isinstance(value, int | float) and not isinstance(value, bool):
            return draw.choice((-value, value + 1, value * 10**9, str(value), float(value), [value]))
        case 1 if isinstance(value, str):
            return draw.choice((value[:-1], value + "\0", value.upper(), [value], f"../{value}", f"/{value}"))
        case 2:
            return nested(value, draw.choice((2, 50)))
        case _:
            return copy.deepcopy(draw.choice(ODD_VALUES))


def nested(value: Any, depth: int) -> Any:
    """Return the value inside of so many lists."""
    for _ in range(depth):
        value = [value]
    return value


def damaged_json_text(valid: Any, draw: Random) -> bytes:
    """Damage a value, or the text that it is written as."""
    chance = draw.random()
    if chance < 0.8:
        return json.dumps(damaged_json(valid, draw)).encode("utf-8", "surrogatepass")
    if chance < 0.85:
        deep = draw.choice(("[", '{"a":')) * draw.choice((500, 100_000))
        return json.dumps(valid).replace(draw.choice(('"', "1", ":")), f"{deep}1", 1).encode()
    return damaged_bytes(json.dumps(valid).encode(), draw)


def damaged_text(valid: str, draw: Random) -> str:
    """Damage a text by its bytes, by odd words in it, or by its lines: dropped, doubled, exchanged,
    moved in or out.
    """
    chance = draw.random()
    if chance < 0.3:
        return damaged_bytes(valid.encode(), draw).decode("utf-8", "replace")
    if chance < 0.6:
        for _ in range(draw.choice((1, 1, 2, 3))):
            at = draw.randrange(len(valid) + 1)
            valid = valid[:at] + draw.choice(ODD_WORDS) + valid[at + draw.choice((0, 0, 1, 7)) :]
        return valid
    lines = valid.splitlines(keepends=True)
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(lines)) if lines else 0
        match draw.randrange(6) if lines else 5:
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[at])
            case 2:
                other = draw.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                lines[at] = f"{draw.choice(('  ', ' ', chr(9)))}{lines[at]}"
            case 4:
                lines[at] = lines[at].lstrip()
            case _:
                head, colon, _ = lines[at].partition(":") if lines else ("", "", "")
                lines[at:at] = [f"{head}{colon} {json.dumps(draw.choice(ODD_VALUES))}\n"]
    return "".join(lines)


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return a file of zeros: name -> dtype, shape, bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return _with_header(header, at)


def _with_header(header: Any, data: int) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + bytes(data)


def damaged_safetensors(valid: bytes, draw: Random) -> bytes:
    """Damage the header's values, its length, or any byte."""
    (length,) = struct.unpack("<Q", valid[:8])
    header, data = json.loads(valid[8 : 8 + length]), len(valid) - 8 - length
    match draw.randrange(6):
        case 0:
            return damaged_bytes(valid, draw)
        case 1:
            return (
                struct.pack("<Q", draw.choice((0, 1, length - 1, length + 1, len(valid), 2**31, 2**63, 2**64 - 1)))
                + valid[8:]
            )
        case 2:
            return _with_header(header, max(0, data + draw.choice((-8, -1, 1, 8))))
        case _:
            return _with_header(damaged_json(header, draw), data)


Metadata: TypeAlias = Sequence[tuple[str, str, Any]]
Tensors: TypeAlias = Sequence[tuple[str, Sequence[int], int, int]]
GGUF_TYPES = {"u8": 0, "u32": 4, "f32": 6, "bool": 7, "str": 8, "arr": 9, "u64": 10}


def gguf_bytes(
    metadata: Sequence[tuple[str, str, Any]],
    tensors: Sequence[tuple[str, Sequence[int], int, int]],
    alignment: int = 32,
) -> bytes:
    """Return a file of zeros: (key, type, value) of the metadata; name, dimensions as ggml has
    them, type and bytes of each tensor.
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(
        _gguf_text(key) + struct.pack("<I", GGUF_TYPES[kind]) + _gguf_value(kind, value)
        for key, kind, value in metadata
    )
    at = 0
    for name, dimensions, kind, size in tensors:
        head += _gguf_text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, at)
        at += -(-size // alignment) * alignment
    return head + bytes(-len(head) % alignment + at)


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf_value(kind: str, value: Any) -> bytes:
    if kind == "str":
        return _gguf_text(value)
    if kind == "arr":
        inner, items = value
        return struct.pack("<IQ", GGUF_TYPES[inner], len(items)) + b"".join(_gguf_value(inner, each) for each in items)
    return struct.pack({"u8": "<B", "u32": "<I", "f32": "<f", "bool": "<?", "u64": "<Q"}[kind], value)


def damaged_gguf(metadata: Metadata, tensors: Tensors, draw: Random) -> bytes:
    """Damage a key, a type, a value, a shape, a count or any byte."""
    entries, shapes = list(metadata), list(tensors)
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(entries))
        key, _, _ = entries[at]
        match draw.randrange(8):
            case 0:
                entries[at] = key, "str", draw.choice(("", "text", "8", "x" * 300))
            case 1:
                entries[at] = key, "u32", draw.choice((0, 1, 3, 31, 2**31, 2**32 - 1))
            case 2:
                entries[at] = key, "u64", draw.choice((0, 2**62, 2**63, 2**64 - 1))
            case 3:
                entries[at] = key, "f32", draw.choice((0.0, -1.0, float("inf"), float("nan")))
            case 4:
                entries[at] = key, "arr", ("arr", [("arr", [])] * 3)
            case 5:
                del entries[at]
            case 6:
                name, dimensions, code, size = shapes[draw.randrange(len(shapes))]
                changed = [draw.choice((0, 1, 3, 2**31, 2**62, each)) for each in dimensions]
                shapes[draw.randrange(len(shapes))] = name, changed, draw.choice((0, 2, 3, 14, 99, code)), size
            case _:
                return damaged_bytes(gguf_bytes(entries, shapes), draw)
    return gguf_bytes(entries, shapes)
