"""What finished blocks of a stage left: a run that was stopped goes on behind the last of them.

PLACE/kept.json                 how many, what was found in them, size and time of each file; written last
PLACE/block-00003.safetensors   the tensors that the stage made of a block
PLACE/states-00003              the hidden states behind it, as they lie in memory; of one block alone, and
                                none behind the model's last one if nobody reads them
PLACE/encoded                   those behind the encoder of an encoder-decoder
PLACE/NAME.json                 what was measured in front of the first block

Of several processes each writes the states of its share, states-00003-1 and so on. The first writes
all else, kept.json once the states of all are there.

States of gigabytes take longer to write than a GPU takes for a block. They are not written then: a run that
goes on runs through the finished blocks again, with the tensors that were made of them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from optkit.common.atomic import remember, write_text_atomically
from optkit.common.byte_sizes import size_text
from optkit.common.files import object_if_any
from optkit.common.grouping import some
from optkit.environment import PACKAGES, describe_environment
from optkit.errors import ResourceError
from optkit.model.copies import beside_computing, on_gpu, own_copies
from optkit.model.together import ALONE, Together
from optkit.model.writer import disk_space_for, save_tensors
from optkit.progress import Progress, SilentTask, Task

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.blocks import BlockInputs

KEPT, ENCODED, ORDER = "kept.json", "encoded", "order"
LAYOUT = 2
"""Of the files. Those of another one are dropped."""
DECIDING = "optkit", "device_name", "cpu_kernels", "cuda", *PACKAGES
"""What decides, beside the key of a step, which bits come out of it."""
SMALL_BYTES = 1 << 26
"""Smaller states of a GPU are written, too."""
WAIT_S = 120.0
"""How long the first process waits for the states of the others, once its own are written."""
TELL_S = 10.0
"""How long it waits before it says so."""
T = TypeVar("T")
Replay: TypeAlias = "Callable[[int, Mapping[str, Tensor]], None]"
"""Brings hidden states behind a block, bit by bit as the stage itself does. The block is given by its number and by
what was made of it.
"""


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
        self._about = {"layout": LAYOUT} | {name: value for name, value in described.items() if name in DECIDING}
        self._inputs: BlockInputs | None = None
        self._read = 0
        """Behind how many blocks at most the hidden states are read."""
        self._facts: Mapping[str, Any] | None = None
        """None as long as nothing can be kept."""
        self._replay: Replay | None = None
        """Makes hidden states again; None if they are written."""
        self._task: Task = SilentTask()
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
        self,
        total: int,
        inputs: BlockInputs | None,
        facts: Mapping[str, Any],
        replay: Replay | None = None,
        last_is_read: bool = False,
    ) -> range:
        """Return which of so many blocks are left to do; from here on each that is done is kept.

        The hidden states of the inputs become those in front of the first of them, or behind the last one
        if somebody reads them. `facts` holds dicts and lists of JSON values, which are filled with what was
        found in the others. Without `replay` hidden states are written, however long it takes.
        """
        self._inputs, self._facts, self._read = inputs, facts, total if last_is_read else total - 1
        written = inputs is None or writes_states(inputs.hidden.nbytes, inputs.device.type != "cpu")
        self._replay = None if written else replay
        if self._place and inputs:
            inputs.settle = self._settle
        if inputs and inputs.passage:
            size = size_text(inputs.hidden.nbytes)
            self._progress.say(f"{self._label}: the GPU is small, so hidden states ({size}) wait in main memory")
        if self.done:
            self._progress.say(f"{self._label}: resumed at block {min(self.done + 1, total)} of {total}")
            for name, container in facts.items():
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(self._kept["facts"][name])
            if self._place and inputs and self.done <= self._read:
                self._bring_(self._place, inputs)
        self._task.begin()
        return range(self.done, total)

    def _bring_(self, place: Path, inputs: BlockInputs) -> None:
        """Bring hidden states behind the last block that is done."""
        if self._replay:
            with self._progress.task(f"{self._label}: text through finished blocks", self.done, "blocks") as task:
                for number in range(self.done):
                    self._replay(number, _tensors(place, number))
                    task.advance()
            return
        if inputs.following and self._mine(ENCODED) in self._kept["files"]:
            _read_states(place / self._mine(ENCODED), inputs.hidden)
            inputs.following()
        _read_states(place / self._mine(_states(self.done - 1)), inputs.hidden)

    def each(self, produced: Iterable[Mapping[str, Tensor]], task: Task) -> Iterator[Mapping[str, Tensor]]:
        """Yield the tensors of all blocks: of those that are kept, then what is produced of the others,
        which calls `resume` first. Raises FileNotFoundError for a file that went since. `task` counts them.

        What was made on a GPU is copied while the next block is, and yielded behind it.
        """
        self._task = task
        done, copies = self.done, deque[Future[dict[str, "Tensor"]]]()
        for number in range(done):
            yield _tensors(self._place, number) if self._place and self._together.first else {}
        try:
            number = done - 1
            for tensors in produced:  # enumerate would hold what it gave until it has the next
                number, made = number + 1, tensors if self._together.first else {}
                late, size = on_gpu(made.values()), sum(each.nbytes for each in made.values())
                copies.append(self._writer.submit(own_copies, made, beside_computing(late)))
                del tensors, made
                self._settle()  # first, as what it could not write ends the keeping
                if self._place and self._facts is not None:
                    self._keep(self._place, number, copies[-1], size, self._facts)
                while len(copies) > (late is not None):
                    yield copies.popleft().result()
            yield from (each.result() for each in copies)
        finally:
            self._settle()
            self._writer.shutdown()
            self._inputs = self._replay = None  # which know this object: hidden states would stay until garbage goes

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
        states: dict[str, Tensor] = {}
        known = self._kept.get("files", {})
        if self._inputs and number < self._read and not self._replay:
            states[self._mine(_states(number))] = self._inputs.hidden
            if self._inputs.encoded is not None and self._mine(ENCODED) not in known:
                states[self._mine(ENCODED)] = self._inputs.encoded
        needed = size + sum(hidden.nbytes for hidden in states.values())
        old = [name for name in known if name.startswith("states-")]
        files = {name: seen for name, seen in known.items() if name not in old} | self._measured
        # a copy, since the stage goes on to fill them
        self._kept = {"about": self._about, "done": number + 1, "facts": json.loads(json.dumps(facts)), "files": files}
        reading = beside_computing(next(iter(states.values()), None))

        def write() -> None:
            with disk_space_for(place, needed), reading:
                place.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(place).free < needed + self._reserved:
                    what = f"no room for {size_text(needed)} beside what the stage writes"
                    raise ResourceError(what, where=str(place))
                for name, hidden in states.items():
                    _write_states(place / name, hidden)
                if not self._together.first:
                    files.update(dict.fromkeys(states))
                    return
                made = tensors.result()
                save_tensors(place / _block(number), made, {ORDER: json.dumps(list(made))})
                others = [f"{name}-{rank}" for name in states for rank in range(1, self._together.count)]
                self._wait_for([place / name for name in others])
                files.update({name: _seen(place / name) for name in (_block(number), *states, *others)})
                write_text_atomically(place / KEPT, json.dumps(self._kept))
                for name in old:
                    (place / name).unlink()

        self._writing = self._writer.submit(write)

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
        try:
            if writing:
                writing.result()
        except Exception as error:  # of the disk, safetensors or a GPU: the stage itself needs nothing of it
            self._progress.warn(
                f"{self._label}: finished blocks are no longer kept, so a stopped run begins anew: {error}"
            )
            self._facts = None
            shutil.rmtree(f"{self._place}", ignore_errors=True)


def _block(number: int) -> str:
    return f"block-{number:05d}.safetensors"


def _states(number: int) -> str:
    return f"states-{number:05d}"


def _tensors(place: Path, number: int) -> dict[str, Tensor]:
    """Return what was made of a block, in the order in which it was made: it decides what lies in which file."""
    from safetensors import safe_open

    with safe_open(place / _block(number), "pt") as file:
        return {name: file.get_tensor(name) for name in json.loads(file.metadata()[ORDER])}


def writes_states(size: int, on_gpu: bool) -> bool:
    """Whether hidden states of so many bytes take no longer to write than a block takes."""
    return not on_gpu or size < SMALL_BYTES


def _write_states(path: Path, hidden: Tensor) -> None:
    import torch

    part = path.with_name(f"{path.name}.part")  # others look whether it is whole by its name
    with part.open("wb") as file:
        for sequence in hidden:
            file.write(sequence.contiguous().cpu().view(torch.uint8).numpy().data)
    part.rename(path)


def _read_states(path: Path, hidden: Tensor) -> None:
    import torch

    hidden.copy_(torch.from_file(str(path), size=hidden.numel(), dtype=hidden.dtype).view(hidden.shape))


def _seen(path: Path) -> list[int] | None:
    """Return size and time of change of a file, None without it."""
    status = path.stat() if path.is_file() else None
    return [status.st_size, status.st_mtime_ns] if status else None
