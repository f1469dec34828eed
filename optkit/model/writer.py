"""Write a model directory.
Shards of safetensors are streamed to disk, then come the index, config.json and the files without
weights.

Names and index are those of transformers' `save_pretrained`, so that anything that opens a
checkpoint opens ours.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optkit.common.atomic import write_text_atomically
from optkit.common.out_of_resources import NO_ROOM, errno_of, more_room, room_error
from optkit.errors import ResourceError, StageError
from optkit.model.attention_choice import attention_options
from optkit.model.checkpoint import INDEX, SINGLE
from optkit.model.companions import find_companions
from optkit.model.copies import own_copy
from optkit.model.safetensors_file import SHARD_BYTES
from optkit.model.together import ALONE, Together
from optkit.progress import Task

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.skeleton import Skeleton


class CheckpointWriter:
    """Writes tensors to `target` as they come; at most a shard is in memory, and one that is being written.

    Used as a context manager it finishes on a clean exit and removes its own files on an error.
    """

    def __init__(self, target: Path, shard_bytes: int = SHARD_BYTES, *, beside: bool = False) -> None:
        """`beside`: a thread writes a shard while the next one is made."""
        self.target = Path(target)
        self._thread = ThreadPoolExecutor(1, "shards") if beside else None
        self._writing: Future[None] | None = None
        self.shard_bytes = shard_bytes
        self.size_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._storages: dict[int, str] = {}
        self._shards: list[tuple[Path, tuple[str, ...]]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of any shape; the caller must not change it afterwards.

        Raises StageError for a name that was added before or memory that another pending name
        shares, ResourceError when the disk is full.
        """
        if name in self._names:
            raise StageError(
                "the tensor is written twice", where=f"{self.target}: {name}", why="A checkpoint holds each name once"
            )
        tensor = own_copy(tensor)
        storage = tensor.untyped_storage().data_ptr()
        if tensor.nbytes and (other := self._storages.get(storage)):
            raise StageError(
                f"the tensor shares its memory with {other}",
                where=f"{self.target}: {name}",
                why="Tied weights are written once, under one name",
                remedy="Add only one of them, or a clone",
            )
        if self._pending and self._pending_bytes + tensor.nbytes > self.shard_bytes:
            self._flush()
        self._names.add(name)
        self._pending[name] = tensor
        self._storages[storage] = name
        self._pending_bytes += tensor.nbytes
        self.size_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard, give the shards their final names and write the index.
        Raises StageError if nothing was added.
        """
        if self._pending:
            self._flush()
        self._settle()
        if not self._shards:
            raise StageError("no tensor was written", where=str(self.target))
        if len(self._shards) == 1:
            self._shards[0][0].rename(self.target / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            path.rename(self.target / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self.target / INDEX, index)

    def _flush(self) -> None:
        path = self.target / f".shard-{len(self._shards) + 1:05d}.partial"
        tensors, size = self._pending, self._pending_bytes

        def save() -> None:
            with disk_space_for(path, size):
                save_tensors(path, tensors, {"format": "pt"})

        self._settle()
        if self._thread:
            self._writing = self._thread.submit(save)
        else:
            save()
        self._shards.append((path, tuple(tensors)))
        self._pending, self._pending_bytes, self._storages = {}, 0, {}

    def _settle(self) -> None:
        """Wait for the shard that is being written; raises what writing it raised."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.finish()
            else:
                with suppress(Exception):  # the error that ends it all is raised
                    self._settle()
        finally:
            for path in self.target.glob(".shard-*.partial"):
                path.unlink()


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; raises OSError if there is no room."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise room_error(error, path) or error from error


def write_blocks(
    skeleton: Skeleton, target: Path, changed: Iterable[Mapping[str, Tensor]], task: Task, together: Together = ALONE
) -> None:
    """Write every tensor of a model, block after block; `changed` yields those of each that are others.
    Of several processes the first writes. Raises SourceError for weights that are NaN or Inf,
    ResourceError when the disk is full.
    """
    if not together.first:
        for _ in changed:
            task.advance()
        return
    with CheckpointWriter(target) as writer:
        for name in skeleton.outside_tensors:
            writer.add(name, skeleton.checkpoint.read_finite(name))
        add_blocks(writer, skeleton, changed, task)


def add_blocks(
    writer: CheckpointWriter, skeleton: Skeleton, changed: Iterable[Mapping[str, Tensor]], task: Task
) -> None:
    """Write the blocks of a model alone; otherwise as `write_blocks`."""
    for block, tensors in zip(skeleton.blocks, changed, strict=True):
        for name in skeleton.block_tensors(block):
            writer.add(name, tensors[name] if name in tensors else skeleton.checkpoint.read_finite(name))
        task.advance(note=block.name)


def copy_companions(source: Path, target: Path, trusted: bool = False, config: Mapping[str, Any] | None = None) -> None:
    """Copy tokenizer, chat template, licence and the like, but not config.json, and write `config` as that.
    If `trusted`, code too (`optkit.model.companions`).

    Raises ResourceError when the disk is full.
    """
    for name, path in find_companions(Path(source), trusted).kept.items():
        if name == "config.json":
            continue
        link_or_copy(path, Path(target) / name, link=False)
    if config is not None:
        write_config(target, config)


def link_or_copy(file: Path, copy: Path, *, link: bool) -> None:
    """Link `copy` to the same file, which takes no space, if allowed and possible; else copy it.

    Raises ResourceError when the disk is full.
    """
    with disk_space_for(copy, file.stat().st_size):
        copy.parent.mkdir(parents=True, exist_ok=True)
        if link:
            with suppress(OSError):  # another disk, or one without links
                copy.hardlink_to(file.resolve())
                return
        shutil.copyfile(file, copy)


def write_config(target: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, whole or not at all; raises ResourceError when the disk is full.

    If transformers' own choice of attention leaves out what the model asks for, it names the one
    that does not, for who opens the model.
    """
    write_json(Path(target) / "config.json", attention_options(config, config))


@contextmanager
def disk_space_for(path: Path, size_bytes: int) -> Iterator[None]:
    """Turn "no space left" on `path` into a ResourceError with what was needed and is free."""
    try:
        yield
    except OSError as error:
        if (number := errno_of(error)) not in NO_ROOM:
            raise
        free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
        raise ResourceError(
            f"{NO_ROOM[number]}: {size_bytes:,} bytes were to be written and {free:,} are free",
            where=str(path),
            remedy=more_room(number),
        ) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file of JSON, whole or not at all; raises ResourceError when the disk is full."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with disk_space_for(path, len(text.encode())):
        write_text_atomically(path, text)
