"""Texts to calibrate and to measure on, pinned to a digest or a commit.
They are built-in names, local files and hub data sets.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from optkit.common.field_types import Name
from optkit.common.files import read_text
from optkit.common.frozen import Frozen
from optkit.errors import SourceError, did_you_mean
from optkit.source import python_reference
from optkit.source.digests import PREFIX, require_revision
from optkit.source.hub import HubRepo
from optkit.source.hub_texts import read_hub_rows
from optkit.source.text_files import SUFFIXES, read_records, read_rows, text_of

DATA_VARIABLE = "OPTKIT_DATA"
SEPARATOR = "\n\n"
"""What stands between two documents of the joined text, as in the GPTQ paper's protocol."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
NAME_DATA = f"Name a directory of local copies with --data or {DATA_VARIABLE}"
WHOLE = "all"
"""The one split of a local file."""


@dataclass(frozen=True)
class KnownText:
    """A text with a name of its own."""

    line: str
    splits: tuple[str, ...]
    hub: str = ""
    """Hub id and, after the colon, configuration; none for a text that comes with Python."""
    local: Mapping[str, str] = field(default_factory=dict)
    """Split -> pattern of its files below the data directory."""


KNOWN: dict[str, KnownText] = {
    "python-reference": KnownText(
        "the language reference inside every Python (pydoc_data.topics); nothing to download", python_reference.SPLITS
    ),
    "wikitext2": KnownText(
        "WikiText-2 raw (Salesforce/wikitext), or wikitext2_raw/wiki.{train,valid,test}.raw of the data directory",
        ("train", "validation", "test"),
        "Salesforce/wikitext:wikitext-2-raw-v1",
        {
            "train": "wikitext2_raw/wiki.train.raw",
            "validation": "wikitext2_raw/wiki.valid.raw",
            "test": "wikitext2_raw/wiki.test.raw",
        },
    ),
    "c4": KnownText(
        "English C4 (allenai/c4; its first documents), or c4_sample/*.jsonl of the data directory (train)",
        ("train", "validation"),
        "allenai/c4:en",
        {"train": "c4_sample/*.jsonl"},
    ),
}


def known_texts() -> dict[str, str]:
    """Return the built-in names of texts with one line on each."""
    return {name: known.line for name, known in KNOWN.items()}


class TextSource(Frozen):
    """A text. In YAML a bare name is the data set: `text: wikitext2`."""

    default_splits: ClassVar[Mapping[str, str]] = {"python-reference": "test", "wikitext2": "test", "c4": "validation"}
    default_hub_split: ClassVar[str] = "test"
    of_files: ClassVar[bool] = False
    """Its field may hold the bytes of a file."""

    dataset: Name
    """A built-in name (`python-reference`, `wikitext2`, `c4`), a .txt, .jsonl or .parquet file, or a
    hub data set, `org/name` or `org/name:configuration`."""
    split: Name = ""
    """Part of the data set; left out, the usual one for the purpose: train to calibrate, test to
    measure.
    """
    field: Name = "text"
    """Which field of a record (.jsonl, .parquet, hub) is the text."""
    revision: Name | None = None
    """`sha256:...` of the text, or the commit of a hub data set; left out, it is pinned before
    anything runs.
    """

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"dataset": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("dataset"), str):
            return value
        dataset = value["dataset"]
        default = WHOLE if is_file_name(dataset) else cls.default_splits.get(dataset, cls.default_hub_split)
        return {**value, "split": value.get("split") or default}

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        known = KNOWN.get(self.dataset)
        if known is None and not is_file_name(self.dataset) and not HUB_ID.fullmatch(self.dataset):
            raise ValueError(
                f"unknown data set '{self.dataset}'.{did_you_mean(self.dataset, KNOWN)}"
                " Or name a .txt, .jsonl or .parquet file, or a hub data set as org/name."
            )
        splits = known.splits if known else (WHOLE,) if is_file_name(self.dataset) else None
        if splits and self.split not in splits:
            hint = f"{did_you_mean(self.split, splits)} If --set named the data set, set PATH.split too."
            raise ValueError(f"'{self.dataset}' has no split '{self.split}'.{hint}")
        return self

    @property
    def where(self) -> str:
        """Name and split, as messages begin with them."""
        return self.dataset if self.split == WHOLE else f"{self.dataset} ({self.split})"

    def pinned(self, data: Path | None) -> Self:
        """Return the text with its revision: a local text's digest, or a hub data set's commit.

        Raises SourceError if it cannot be found, is empty, or is not what `revision` says.
        """
        if self.is_local(data):
            return self.model_copy(update={"revision": _digest(self.documents(data))})
        return self.model_copy(update={"revision": self._hub_repo(data).commit(self.revision)})

    def identity(self) -> dict[str, str]:
        """Return what an artifact records of a text that it was made from."""
        return {"dataset": self.dataset, "split": self.split, "revision": self.revision or ""}

    def overlaps(self, other: TextSource | Mapping[str, str]) -> bool:
        """Say whether another text, or the `identity` of one, is the same in part.
        The data set and split, or the content, are the same then.
        """
        mine, theirs = self.identity(), other.identity() if isinstance(other, TextSource) else other
        if (hub_name(mine["dataset"]), mine["split"]) == (hub_name(theirs["dataset"]), theirs["split"]):
            return True
        return mine["revision"].startswith(PREFIX) and mine["revision"] == theirs["revision"]

    def documents(self, data: Path | None) -> list[str]:
        """Return the documents (rows, topics) in their order. Raises SourceError if there are
        none.
        """
        documents = self._read(data)
        if not any(document.strip() for document in documents):
            raise SourceError("the text is empty", where=self.where, remedy="Name another data set, split or field")
        if self.revision and self.is_local(data):
            require_revision("the text", _digest(documents), self.revision, self.where)
        return documents

    def joined(self, data: Path | None) -> str:
        """Return all documents as one text, with an empty line between two."""
        return SEPARATOR.join(self.documents(data))

    def passages(self, tokenizer_directory: Path, data: Path | None, trust_remote_code: bool = False) -> list[str]:
        """Return what is read of the text, each passage in one piece: here all of it. Raises
        SourceError as `documents` does.
        """
        return self.documents(data)

    def _read(self, data: Path | None) -> list[str]:
        if self.dataset == "python-reference":
            return python_reference.read_topics(self.split)
        if not self.is_local(data):
            repo, name = self._hub_repo(data), hub_name(self.dataset)
            take = partial(text_of, field=self.field, where=self.where, files=self.of_files)
            return read_hub_rows(repo, name, self.split, self.revision, self.where, take)
        if is_file_name(self.dataset):
            path = Path(self.dataset).expanduser()
            if path.suffix == ".txt":
                return [read_text(path, most_bytes=None)]
            return read_records([path], self.field, self.of_files)
        paths = self._local_files(data)
        if not paths:
            raise SourceError(
                f"the local copy that was pinned as {self.revision} is not there",
                where=self.where,
                why=self._looked(data),
                remedy=f"{NAME_DATA}, or leave out `revision` to take it from the hub",
            )
        return read_rows(paths[0]) if self.dataset == "wikitext2" else read_records(paths, self.field)

    def is_local(self, data: Path | None) -> bool:
        """Say whether it is read from this machine, and not from the hub."""
        if is_file_name(self.dataset) or self.dataset == "python-reference":
            return True
        if self.revision and not self.revision.startswith(PREFIX):
            return False
        return bool(self._local_files(data)) or bool(self.revision)

    def _local_files(self, data: Path | None) -> list[Path]:
        known = KNOWN.get(self.dataset)
        place = data_directory(data)
        if known is None or place is None or self.split not in known.local:
            return []
        return sorted(place.glob(known.local[self.split]))

    def _hub_repo(self, data: Path | None) -> HubRepo:
        remedy = f"{NAME_DATA}, or take python-reference, which needs nothing" if self.dataset in KNOWN else ""
        return HubRepo(hub_name(self.dataset).partition(":")[0], "dataset", looked=self._looked(data), remedy=remedy)

    def _looked(self, data: Path | None) -> str:
        known, place = KNOWN.get(self.dataset), data_directory(data)
        if known is None:
            return ""
        if self.split not in known.local:
            return f"A data directory can hold its {', '.join(known.local)}, not {self.split}"
        wanted = known.local[self.split]
        return f"There is no {place / wanted}" if place else f"No data directory was named, which could hold {wanted}"


def is_file_name(dataset: str) -> bool:
    """Say whether a data set is named by a path and not by a name."""
    return dataset.endswith(SUFFIXES)


def hub_name(dataset: str) -> str:
    """Return the hub id that a built-in name stands for, another name as it is."""
    known = KNOWN.get(dataset)
    return known.hub or dataset if known else dataset


def data_directory(data: Path | None) -> Path | None:
    """Return the directory of local data sets: the one named, else $OPTKIT_DATA. Raises SourceError
    if it is not there.
    """
    named = data or (Path(value) if (value := os.environ.get(DATA_VARIABLE)) else None)
    if named is not None and not named.is_dir():
        why, remedy = f"It was named by {'--data' if data else DATA_VARIABLE}", "Correct the path, or leave it out"
        raise SourceError("no such directory", where=str(named), why=why, remedy=remedy)
    return named


def _digest(documents: list[str]) -> str:
    return PREFIX + hashlib.sha256(SEPARATOR.join(documents).encode()).hexdigest()
