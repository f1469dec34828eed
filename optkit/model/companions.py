"""Which files of a model directory are the model's.
They really lie in it, and are of the kinds that travel with weights.

A link that leads out of the directory would publish a file of its owner, and so would a file that
merely happens to lie there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from optkit.common.own_files import is_own
from optkit.errors import SourceError
from optkit.model.formats.base import Format

FOREIGN = frozenset({".bin", ".pt", ".pth", ".ckpt", ".ggml", ".h5", ".msgpack", ".npz", ".mlmodel"})
"""Suffixes of weights in formats that optkit knows by name alone."""
DOCUMENTS = (
    "README*", "*LICENSE*", "*LICENCE*", "COPYING*", "*NOTICE*", "CITATION*", "*POLICY*", "MODEL_CARD*",
)  # fmt: skip
KINDS = (
    # configs
    "config.json", "*_config.json", "config_*.json", "*config.json", "configuration.json", "params.json",
    "modules.json",
    # tokenizers
    "tokenizer*.json", "vocab*.json", "vocab*.txt", "merges*.txt", "added_tokens.json", "special_tokens_map.json",
    "tekken.json", "*.model", "tokenizer.model*", "*.tiktoken", "*.spm", "*.vocab", "dict.txt", "bpe.codes",
    "normalizer.json",
    # templates and processors
    "*.jinja", "chat_template*.json", "*processor*.json",
    *DOCUMENTS,
)  # fmt: skip
"""What travels with the weights, by patterns of file names; `*.py` too if its code is trusted."""
LICENCES = re.compile("licen[cs]es", re.IGNORECASE)
"""A folder of texts that all travel."""
FOLDERS = re.compile(rf"|\d+_\w+|adapter|additional_chat_templates|{LICENCES.pattern}", re.IGNORECASE)
"""Folders of a repository with files of the model in its root: modules of sentence-transformers,
e.g. `1_Pooling`, an adapter, templates, licences. Others hold the same model for other programs.
"""
CODE = ".py"
UNSAID = frozenset({".git", ".gitattributes", ".gitignore", ".cache", "__pycache__"})
"""Left out of every copy, and nobody has to be told."""
SHOWN = 4
OUTSIDE = "leads out of the directory"
UNTRUSTED = "code, and the recipe does not trust the model's"
UNKNOWN = "of no kind that travels with a model"


@dataclass(frozen=True)
class Companions:
    """The files of a model directory that hold no weights, by their names relative to it."""

    kept: dict[str, Path]
    left: dict[str, str]
    """Those that are not copied, with the reason."""

    def said(self) -> str:
        """Return a sentence on what is left out; empty if nothing is."""
        if not self.left:
            return ""
        shown = [f"{name} ({why})" for name, why in sorted(self.left.items())[:SHOWN]]
        more = len(self.left) - len(shown)
        return (
            "files beside the model that the artifact does not have: "
            f"{', '.join(shown)}{f' and {more} more' if more else ''}"
        )


def find_companions(root: Path, trusted: bool = False) -> Companions:
    """Return which files travel with the weights; `trusted`: Python files too."""
    kept, left = {}, {}
    for name, path in _beside(root):
        if name.endswith(".index.json") or not UNSAID.isdisjoint(Path(name).parts):
            continue
        if why := _why_not(root, name, path, trusted):
            left[name] = why
        else:
            kept[name] = path
    return Companions(kept, left)


def files_beside(root: Path) -> dict[str, Path]:
    """Return relative name -> path of every file without weights, whether it travels or not.

    Hidden files and what lies outside of the directory are left out.
    """
    return {name: path for name, path in _beside(root) if not _is_hidden(name) and lies_inside(root, path)}


def published_files(root: Path, trusted: bool) -> list[str]:
    """Return an artifact's names of a user's model: the weights, and companions."""
    return sorted(Format.of(root).published(root) | find_companions(root, trusted).kept.keys())


def _beside(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield relative name and path of each file that holds no weights and is not optkit's own."""
    return ((name, path) for name, path in files_of(root) if not (holds_weights(path) or is_own(name)))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in Path(name).parts)


def files_of(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield relative name and path of each file below a directory, in order; enter no link."""
    for place, folders, names in os.walk(root):
        folders.sort()
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in sorted([*names, *links]):
            path = Path(place) / name
            yield path.relative_to(root).as_posix(), path


def lies_inside(root: Path, path: Path) -> bool:
    """Say whether a path is a regular file that lies below a directory, or leads to one there.

    A snapshot in the hub's cache consists of links to the blobs of the same repository, which count
    as its own.
    """
    try:
        real, home = path.resolve(strict=True), root.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    return real.is_file() and (real.is_relative_to(home) or real.is_relative_to(blobs))


def require_inside(root: Path, name: str, named_by: str = "") -> Path:
    """Return the path of a model's file; raises SourceError if it is named or leads out."""
    path = root / name
    climbs = Path(name).is_absolute() or ".." in Path(name).parts
    if climbs or (path.exists() and not lies_inside(root, path)):
        raise SourceError(
            f"{named_by} names {name}, outside of the directory" if climbs and named_by else f"{name} {OUTSIDE}",
            where=str(root),
            why="A model's files lie in its directory; others would reach the artifact",
            remedy="Copy the file into the directory, or name the directory that it lies in",
        )
    return path


def _why_not(root: Path, name: str, path: Path, trusted: bool) -> str:
    """Return why a file is not copied; empty if it is."""
    if not lies_inside(root, path):
        return OUTSIDE
    if path.suffix == CODE:
        return "" if trusted else UNTRUSTED
    return "" if _is_known(name) and not _is_hidden(name) else UNKNOWN


def is_document(name: str) -> bool:
    """Say whether a file is a text for readers, such as a card or a licence."""
    return _is_known(name, DOCUMENTS)


def _is_known(name: str, kinds: Sequence[str] = KINDS) -> bool:
    path = PurePath(name)
    spellings = (path.name, path.name.upper())  # documents are spelled either way
    return LICENCES.fullmatch(path.parent.name) is not None or any(
        fnmatchcase(each, pattern) for pattern in kinds for each in spellings
    )


def belongs_to_model(name: str, trusted: bool = False) -> bool:
    """Say whether a file of a repository is one of its model's: a weight, or of a kind that travels.
    `trusted`: Python files in the root too.
    """
    folder, _, file = name.rpartition("/")
    if not folder and file.endswith(CODE):
        return trusted
    if not FOLDERS.fullmatch(folder) or file.startswith("consolidated") or file.endswith(".bin.index.json"):
        return False
    return file.endswith((".safetensors", ".json")) or _is_known(name)


def holds_weights(path: PurePath) -> bool:
    """Say whether a file holds weights, in whatever format, by its name."""
    return path.suffix in FOREIGN or any(format.holds_weights(path.name) for format in Format)
