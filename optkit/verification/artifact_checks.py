"""What can be said of an artifact without torch: digests, the files of its format, the tokenizer."""

from __future__ import annotations

from pathlib import Path

from optkit.artifact import Artifact
from optkit.common.files import read_json, sha256_of
from optkit.common.grouping import some
from optkit.common.own_files import CARD, is_own
from optkit.errors import OptkitError
from optkit.model.formats.base import Format
from optkit.store.files import list_files
from optkit.verification.model_files import Check, check_of, model_files

TOKENIZER = "tokenizer.json"
VOCABULARIES = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken", "*.model")


def check_artifact(artifact: Artifact) -> tuple[Check, ...]:
    """Check the files of an artifact.
    All but the digests believe config.json and the headers of the weights, not optkit.json.

    If the weights cannot be read, what stands on them is not checked. Raises MissingPackageError
    for ONNX without the package `onnx`.
    """
    return (
        check_digests(artifact),
        *model_files(format_of(artifact), artifact.directory).checks(),
        _tokenizer(artifact),
    )


def format_of(artifact: Artifact) -> Format:
    """Return the format of an artifact, also if files are lost that it had when it was published."""
    there = {path.name for path in artifact.directory.iterdir() if path.is_file()}
    return Format.of_files(there | artifact.record.files.keys())


def check_digests(artifact: Artifact) -> Check:
    """Read every file of an artifact, and compare its SHA-256 with the record."""
    known = artifact.record.files
    wrong = []
    for name, facts in known.items():
        path = artifact.directory / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != facts["size_bytes"]:
            wrong.append(f"{name} has {path.stat().st_size:,} bytes, not {facts['size_bytes']:,}")
        elif sha256_of(path) != facts["sha256"]:
            wrong.append(f"{name} was changed")
    others = [
        name for name in list_files(artifact.directory) if name not in known and name != CARD and not is_own(name)
    ]
    beside = f"; beside them {some(others)}, which optkit did not write" if others else ""
    return check_of("digests", wrong, f"the SHA-256 of {len(known)} files are those of optkit.json{beside}")


def _tokenizer(artifact: Artifact) -> Check:
    found = sorted({path.name for pattern in VOCABULARIES for path in artifact.directory.glob(pattern)})
    broken = []
    for name in (*found, "tokenizer_config.json"):
        path = artifact.directory / name
        if name.endswith(".json") and path.is_file():
            try:
                read_json(path)
            except OptkitError as error:
                broken.append(f"{name} is not JSON: {error}")
    if TOKENIZER in found and not broken:
        broken += _refusal_of_tokenizers(artifact.directory / TOKENIZER)
    missing = [] if found else ["there is no tokenizer"]
    return check_of("tokenizer", missing + broken, ", ".join(found))


def _refusal_of_tokenizers(path: Path) -> list[str]:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing more special
        return [f"{path.name} is no tokenizer: {error}"]
    return []
