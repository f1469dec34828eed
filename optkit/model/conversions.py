"""Which tensors transformers joins or splits while it loads a model, by its own table, which is not imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from optkit.model.config_defaults import statements_of

FILE = "conversion_mapping.py"
ALIKE, TABLE = "_MODEL_TO_CONVERSION_PATTERN", "mapping"
"""The names there of a dict from model types to others whose entries they share, and of the table itself."""
CONVERTER, OF_EXPERTS = "WeightConverter", "MergeModulelist"
"""What changes tensors; and what joins experts, which optkit takes apart again."""
WORDS = ("source_patterns", "target_patterns", "operations")
"""What a converter is given, in this order."""
KEEPS = "check_dims=True"
"""Said of a transposition that only other shapes than the model's ask for."""


def rewritten_tensor(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Return the first tensor of a checkpoint that transformers joins with others or splits; None if there is none."""
    patterns = [pattern for sources, _ in _changes(config) for pattern in sources]
    return next((name for name in tensors if any(re.search(pattern, name) for pattern in patterns)), None)


def rewritten_into(config: Mapping[str, Any], tensors: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield tensors of a checkpoint that transformers joins or splits, and the ends of names of what they become."""
    for sources, targets in _changes(config):
        if found := next((name for name in tensors if any(re.search(each, name) for each in sources)), None):
            yield from ((found, target) for target in targets)


def _changes(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield what the names of tensors match that a model's converters change, and what they become."""
    parts = (config, *(value for value in config.values() if isinstance(value, Mapping)))
    kinds = dict.fromkeys(str(each["model_type"]) for each in parts if each.get("model_type"))
    return (pair for kind in kinds for pair in _patterns(kind))


@cache
def _patterns(kind: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return the same of each converter of a model type."""
    entries, alike = _table()
    found: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for call in entries.get(kind) or entries.get(alike.get(kind, ""), []):
        words = dict(zip(WORDS, call.args, strict=False)) | {each.arg: each.value for each in call.keywords}
        operations = [ast.unparse(each) for each in getattr(words.get("operations"), "elts", ())]
        if any(KEEPS not in each for each in operations) and not any(OF_EXPERTS in each for each in operations):
            sources, targets = (_texts(words.get(name)) for name in WORDS[:2])
            found.append((tuple(each.replace(".*.", r"\..*\.") for each in sources), tuple(targets)))
    return tuple(found)


@cache
def _table() -> tuple[Mapping[str, list[ast.Call]], Mapping[str, str]]:
    """Return model type -> the calls that make its converters, and model type -> another one that is alike."""
    entries: dict[str, list[ast.Call]] = {}
    alike: dict[str, str] = {}
    file = statements_of(FILE)
    for node in (part for each in file for part in (each.body if isinstance(each, ast.FunctionDef) else (each,))):
        name, value = _assigned(node)
        if isinstance(value, ast.Dict):
            pairs = [(kind, each) for key, each in zip(value.keys, value.values, strict=True) for kind in _texts(key)]
            if name == ALIKE:
                alike = {kind: text for kind, each in pairs for text in _texts(each)}
            elif name == TABLE:
                entries = {kind: _calls(each, entries) for kind, each in pairs}
        elif value is not None and (kind := _key(name)):
            before = entries.get(kind, []) if isinstance(node, ast.AugAssign) else []
            entries[kind] = [*before, *_calls(value, entries)]
    return entries, alike


def _texts(node: ast.expr | None) -> list[str]:
    """Return the texts that code holds."""
    constants = (each.value for each in (ast.walk(node) if node else ()) if isinstance(each, ast.Constant))
    return [each for each in constants if isinstance(each, str)]


def _assigned(node: ast.stmt) -> tuple[str, ast.expr | None]:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]), node.value
    return (ast.unparse(node.target), node.value) if isinstance(node, ast.AugAssign) else ("", None)


def _key(code: str) -> str:
    """Return the model type of `mapping['qwen2_moe']`; empty for other code."""
    found = re.match(rf"{TABLE}\['([^']+)'\]", code)
    return found[1] if found else ""


def _calls(value: ast.expr, entries: Mapping[str, list[ast.Call]]) -> list[ast.Call]:
    """Return what makes converters in a list, a copy of another entry, or the sum of two."""
    if isinstance(value, ast.BinOp):
        return [*_calls(value.left, entries), *_calls(value.right, entries)]
    if isinstance(value, ast.List):
        return [each for each in value.elts if isinstance(each, ast.Call) and ast.unparse(each.func) == CONVERTER]
    return entries.get(_key(ast.unparse(value)), [])
