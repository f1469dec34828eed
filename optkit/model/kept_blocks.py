"""What finished blocks of a stage left: a run that was stopped goes on behind the last of them.

PLACE/kept.json                 how many, what was found in them, size and time of each file; written last
PLACE/block-00003.safetensors   the tensors that the stage made of a block
PLACE/states-00003              the hidden states behind it, as they lie in memory; of one block alone, and
                                none behind the model's last one if nobody reads them
PLACE/encoded                   those behind the encoder of an encoder-decoder
PLACE/spare                     states that are out of date, over which the next ones are written
PLACE/NAME.json                 what was measured in front of the first block

Of several processes each writes the states of its share, states-00003-1 and so on. The first writes
all else, kept.json once the states of all are there. To write over a file takes a tenth of the time of
writing a new one, for which the disk has to find room.

States of gigabytes may take longer than a block. They are written so seldom that they cost a twentieth of
the time at most; blocks behind them count as finished once states are written again. So a kill costs one
block, or PAUSE times as long as the states take.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optkit.common.atomic import remember, write_text_atomically
from optkit.common.byte_sizes import size_text
from optkit.common.files import object_if_any
from optkit.common.grouping import some
from optkit.environment import PACKAGES, describe_environment
from optkit.errors import ResourceError
from optkit.model.copies import beside_computing, on_gpu, own_copies
from optkit.model.together import ALONE, Together
from optkit.model.writer import disk_space_for, save_tensors
from optkit.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.blocks import BlockInputs

KEPT, ENCODED, SPARE = "kept.json", "encoded", "spare"
DECIDING = "optkit", "device_name", "cpu_kernels", "cuda", *PACKAGES
"""What decides, beside the key of a step, which bits come out of it."""
PAUSE = 20
"""How many times as long as hidden states take to write passes at least until they are written again."""
BYTES_S = 1e9
"""How fast they are written, until it is known."""
SMALL_BYTES = 1 << 26
"""Smaller states are written behind each block."""
WAIT_S = 120.0
"""How long the first process waits for the states of the others, once its own are written."""
TELL_S = 10.0
"""How long it waits before it says so."""
T = TypeVar("T")


class KeptBlocks:
    """The finished blocks of one run of a stage; `place` None keeps nothing."""

    def __init__(
        self,
        place: Path | None,
        device: str,
        progress: Progress,
        label: str,
        reserved_bytes: int,
        together: Together = ALONE,
    ) -> None:
        """`reserved_bytes` of the disk are left free for what the stage itself is going to write."""
        if place and together.count > 1:
            place /= f"of-{together.count}"
        self._place, self._progress, self._label, self._reserved = place, progress, label, reserved_bytes
        self._together = together
        described = describe_environment(device) if place else {}
        self._about = {name: value for name, value in described.items() if name in DECIDING}
        self._inputs: BlockInputs | None = None
        self._read = 0
        """Behind how many blocks at most the hidden states are read."""
        self._facts: Mapping[str, Any] | None = None
        """None as long as nothing can be kept."""
        self._due = -1
        """The block behind which hidden states are written next, or were if it is done."""
        self._done_s = self._writing_s = 0.0
        """When the last block was done, with what was waited since, and how long its states take to write."""
        self._measured: dict[str, list[int] | None] = {}
        """The files of what was measured in front of the first block, as `_seen`."""
        self._writer = ThreadPoolExecutor(1, "kept blocks")
        self._writing: Future[None] | None = None
        self._kept: Mapping[str, Any] = together.tell(self._whole(place) if place and together.first else {})

    @property
    def done(self) -> int:
        """How many blocks need not be computed."""
        return int(self._kept.get("done", 0))

    def resume(
        self, total: int, inputs: BlockInputs | None, facts: Mapping[str, Any], last_is_read: bool = False
    ) -> range:
        """Return which of so many blocks are left to do; from here on each that is done is kept.

        The hidden states of the inputs become those in front of the first of them, or behind the last one
        if somebody reads them. `facts` holds dicts and lists of JSON values, which are filled with what was
        found in the others.
        """
        self._inputs, self._facts = inputs, facts
        self._read, self._due = total if last_is_read else total - 1, self.done - 1
        size = inputs.hidden.nbytes if inputs else 0
        self._done_s, self._writing_s = time.monotonic(), size / BYTES_S if size >= SMALL_BYTES else 0.0
        if self._place and inputs:
            inputs.settle = self._settle
        if self.done:
            self._progress.say(f"{self._label}: resumed at block {min(self.done + 1, total)} of {total}")
            for name, container in facts.items():
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(self._kept["facts"][name])
            if self._place and inputs:
                if inputs.following and self._mine(ENCODED) in self._kept["files"]:
                    _read_states(self._place / self._mine(ENCODED), inputs.hidden)
                    inputs.following()
                if self.done <= self._read:
                    _read_states(self._place / self._mine(_states(self.done - 1)), inputs.hidden)
        return range(self.done, total)

    def each(self, produced: Iterable[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the tensors of all blocks: of those that are kept, then what is produced of the others,
        which calls `resume` first. Raises FileNotFoundError for a file that went since.

        What was made on a GPU is copied while the next block is, and yielded behind it.
        """
        from safetensors.torch import load_file

        done, copies = self.done, deque[Future[dict[str, "Tensor"]]]()
        for number in range(done):
            yield load_file(f"{self._place}/{_block(number)}") if self._together.first else {}
        try:
            for number, tensors in enumerate(produced, start=done):
                made = tensors if self._together.first else {}
                late, size = on_gpu(made.values()), sum(each.nbytes for each in made.values())
                copies.append(self._writer.submit(own_copies, made, beside_computing(late)))
                del tensors, made
                self._settle()  # first, as what it could not write ends the keeping
                self._look_ahead(number)
                if self._place and self._facts is not None:
                    self._keep(self._place, number, copies[-1], size, self._facts)
                while len(copies) > (late is not None):
                    yield copies.popleft().result()
            yield from (each.result() for each in copies)
        finally:
            self._settle()
            self._writer.shutdown()

    def measured(self, name: str, measure: Callable[[], T]) -> T:
        """Return JSON values that were measured in front of the first block; if they are kept, those."""
        path = self._place / f"{name}.json" if self._place else None
        found = self._together.tell(object_if_any(path) if path else {})
        if path is None or found.get("about") != self._about:
            found = {"about": self._about, "measured": self._together.tell(measure())}
            if path and self._together.first:
                remember(path, json.dumps(found))
        if path:
            self._measured[path.name] = _seen(path)
        measured: T = found["measured"]
        return measured

    def _whole(self, place: Path) -> Mapping[str, Any]:
        """Return what is kept, nothing if any of it was changed or made otherwise."""
        there = (place / KEPT).exists()
        found = object_if_any(place / KEPT) if there else {}
        for path in (*place.glob("states-*"), *place.glob(f"{ENCODED}*")):  # that a kill left
            if path.name not in found.get("files", {}):
                path.unlink()
        if not there:
            return {}
        known = found.get("files", {KEPT: None}).items()
        changed = [name for name, seen in known if not seen or _seen(place / name) != seen]
        if not changed and found["about"] == self._about:
            return found
        why = f"{changed[0]} was changed or cut off" if changed else "device or versions are others now"
        self._progress.warn(f"{self._label}: {why}, so the blocks that were kept are dropped")
        shutil.rmtree(place, ignore_errors=True)
        return {}

    def _keep(
        self, place: Path, number: int, tensors: Future[dict[str, Tensor]], size: int, facts: Mapping[str, Any]
    ) -> None:
        """Begin to write a block of so many bytes; the hidden states are read until `_settle`."""
        states, known = {}, self._kept.get("files", {})
        counts = number == self._due or not self._is_read(number)
        if self._inputs and counts:
            if self._is_read(number):
                states[self._mine(_states(number))] = self._inputs.hidden
            if self._inputs.encoded is not None and self._mine(ENCODED) not in known:
                states[self._mine(ENCODED)] = self._inputs.encoded
        needed = size + sum(hidden.nbytes for hidden in states.values())
        old = [name for name in known if name.startswith("states-")] if counts else []
        files = {name: seen for name, seen in known.items() if name not in old} | self._measured
        # a copy, since the stage goes on to fill them
        self._kept = {"about": self._about, "done": number + 1, "facts": json.loads(json.dumps(facts)), "files": files}
        reading, spare = beside_computing(next(iter(states.values()), None)), place / self._mine(SPARE)

        def write() -> None:
            with disk_space_for(place, needed), reading:
                place.mkdir(parents=True, exist_ok=True)
                free = shutil.disk_usage(place).free + (spare.stat().st_size if spare.exists() else 0)
                if free < needed + self._reserved:
                    what = f"no room for {size_text(needed)} beside what the stage writes"
                    raise ResourceError(what, where=str(place))
                started = time.monotonic()
                for name, hidden in states.items():
                    _write_states(place / name, hidden, spare)
                if needed - size >= SMALL_BYTES:
                    self._writing_s = time.monotonic() - started
                if not self._together.first:
                    files.update(dict.fromkeys(states))
                    return
                save_tensors(place / _block(number), tensors.result())
                others = [f"{name}-{rank}" for name in states for rank in range(1, self._together.count)]
                self._wait_for([place / name for name in others])
                files.update({name: _seen(place / name) for name in (_block(number), *states, *others)})
                if counts:
                    write_text_atomically(place / KEPT, json.dumps(self._kept))
                for name in old:
                    (place / name).rename(place / f"{SPARE}{name[len(_states(number)) :]}")

        self._writing = self._writer.submit(write)

    def _is_read(self, number: int) -> bool:
        """Whether the hidden states behind a block are read."""
        return self._inputs is not None and number < self._read

    def _look_ahead(self, number: int) -> None:
        """Find out behind which block, this one or a later one, hidden states are written next. The first process
        tells the others.
        """
        took, self._done_s = time.monotonic() - self._done_s, time.monotonic()
        if self._place and self._is_read(number) and number > self._due:
            self._due = self._together.tell(number + int(PAUSE * self._writing_s / took))

    def _mine(self, name: str) -> str:
        """Return what this process calls its share of a file."""
        return name if self._together.first else f"{name}-{self._together.rank}"

    def _wait_for(self, paths: Sequence[Path]) -> None:
        """Wait until other processes have written their files. Raises ResourceError if they do not."""
        started, told = time.monotonic(), False
        while missing := [path for path in paths if not path.exists()]:
            waited = time.monotonic() - started
            ranks = some([f"process {path.name.rpartition('-')[2]} of {self._together.count}" for path in missing])
            if waited > WAIT_S or not missing[0].parent.exists():
                why = f"{ranks} did not write its hidden states within {waited:.0f} s"
                raise ResourceError(why, where=str(missing[0]))
            if waited > TELL_S and not told:
                self._progress.say(f"{self._label}: waiting for hidden states of {ranks}")
                told = True
            time.sleep(0.01)

    def _settle(self) -> None:
        """Wait for the block that is being written."""
        writing, self._writing = self._writing, None
        began = time.monotonic()
        try:
            if writing:
                writing.result()
        except Exception as error:  # of the disk, safetensors or a GPU: the stage itself needs nothing of it
            self._progress.warn(
                f"{self._label}: finished blocks are no longer kept, so a stopped run begins anew: {error}"
            )
            self._facts = None
            shutil.rmtree(f"{self._place}", ignore_errors=True)
        self._done_s += time.monotonic() - began  # else waiting would bring more of it


def _block(number: int) -> str:
    return f"block-{number:05d}.safetensors"


def _states(number: int) -> str:
    return f"states-{number:05d}"


def _write_states(path: Path, hidden: Tensor, spare: Path) -> None:
    import torch

    passed = torch.empty(hidden.shape[1:], dtype=hidden.dtype, pin_memory=hidden.is_cuda)
    part = path.with_name(f"{path.name}.part")  # others look whether it is whole by its name
    with suppress(FileNotFoundError):
        spare.rename(part)
    with part.open("r+b" if part.exists() else "wb") as file:
        for sequence in hidden:
            file.write(passed.copy_(sequence).view(torch.uint8).numpy().data)
        file.truncate()
    part.rename(path)


def _read_states(path: Path, hidden: Tensor) -> None:
    import torch

    hidden.copy_(torch.from_file(str(path), size=hidden.numel(), dtype=hidden.dtype).view(hidden.shape))


def _seen(path: Path) -> list[int] | None:
    """Return size and time of change of a file, None without it."""
    status = path.stat() if path.is_file() else None
    return [status.st_size, status.st_mtime_ns] if status else None
