"""Hidden states that wait in main memory give the bytes of those that lie on the device."""

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from optkit import environment
from optkit.common.garbage import uncollected
from optkit.model import blocks, calibration_memory, entering, kept_blocks, memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.passage import Passage
from optkit.model.skeleton import Skeleton
from optkit.progress import Task
from optkit.source.calibration import Calibration
from optkit.stage import Transform
from optkit.stages.awq import Awq
from optkit.stages.gptq import Gptq
from optkit.stages.prune_structured import PruneStructured
from tests.conftest import TinyModel
from tests.model.test_blocks_that_run_again import FORMS
from tests.model.test_kept_blocks import STAGES, Lines, few, files, interrupted, run
from tests.support.encoder_decoders import write_pairs

__all__ = ["few"]
STREAMING = {name: made for name, made in (STAGES | FORMS).items() if name != "rotate"}  # that has 32 tokens
QUICK = ("balanced", "learning", "nvfp4", "auto_bits", "prune", "prune_structured")
"""Between them they take hidden states in all ways: in turn, at random, several models' together."""


Made: TypeAlias = Mapping[str, Tensor]
GOING = ("gptq", "balanced", "prune", "prune_structured")


class Late(Passage):
    """Copies on a CPU, one behind the other, and none before somebody waits for it."""

    carried = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._left: deque[tuple[Tensor, Tensor]] = deque()

    def begin(self, waiting: Tensor) -> Callable[[], Tensor]:
        brought = torch.full_like(waiting, torch.nan)
        self._left.append((brought, waiting))

        def given() -> Tensor:
            while any(to is brought for to, _ in self._left):
                self._copy()
            return brought

        return given

    def put_(self, waiting: Tensor, made: Tensor) -> None:
        self._left.append((waiting, made))

    def end(self) -> None:
        while self._left:
            self._copy()

    def _copy(self) -> None:
        Late.carried += 1
        to, given = self._left.popleft()
        to.copy_(given)


def in_batches(stage: Transform) -> Transform:
    """Return a stage to which each sequence is a batch."""
    return stage.model_copy(update={"batch_size": 1} if "batch_size" in type(stage).model_fields else {})


@pytest.fixture
def in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a GPU without room for hidden states, which are too large to be written."""
    monkeypatch.setattr(kept_blocks, "writes_states", lambda *_: False)
    monkeypatch.setattr(entering, "is_little_of_gpu", lambda *_: False)
    monkeypatch.setattr(entering, "Passage", Late)
    monkeypatch.setattr(memory, "_registered", lambda states, _: torch.empty_like(states, device="cpu"))
    monkeypatch.setattr(Late, "carried", 0)


@pytest.mark.parametrize(
    "kind", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STREAMING]
)
def test_stages_leave_the_same_bytes(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, request: pytest.FixtureRequest
) -> None:
    stage, source = in_batches(STREAMING[kind](few)), tiny_model("llama bfloat16")
    run(stage, source, tmp_path / "whole", None)
    request.getfixturevalue("in_main_memory")
    work, lines = interrupted(stage, source, tmp_path, 1), Lines()
    run(stage, source, tmp_path / "resumed", work, lines)
    assert Late.carried > 2
    assert re.search(r"the GPU is small, so hidden states \([\d.]+ kB\) wait", " ".join(lines.lines))
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


def test_a_batch_that_is_on_its_way_is_waited_for_if_nobody_takes_it() -> None:
    passage = Late(torch.device("cpu"))
    batches = tuple(blocks.Batch((slice(row, row + 1), slice(4)), ()) for row in range(3))
    inputs = blocks.BlockInputs(torch.ones(3, 4, 8), batches, passage=passage)
    _, first = next(inputs.each())
    assert first.eq(1).all()
    assert not passage._left


@pytest.mark.parametrize("architecture", ["mixtral", "T5ForConditionalGeneration"])
def test_other_models_leave_the_same_bytes(
    tiny_model: TinyModel,
    tiny_encoder_decoder: TinyModel,
    tmp_path: Path,
    few: Calibration,
    architecture: str,
    request: pytest.FixtureRequest,
) -> None:
    pairs = Calibration(
        dataset=str(write_pairs(tmp_path / "pairs", False)),
        input="input",
        field="target",
        samples=3,
        sequence_length=40,
    )
    source, text = (tiny_encoder_decoder, pairs) if architecture[0].isupper() else (tiny_model, few)
    stage = in_batches(Gptq(group_size=32, calibration=text))
    run(stage, source(architecture), tmp_path / "whole", None)
    request.getfixturevalue("in_main_memory")
    work = interrupted(stage, source(architecture), tmp_path, 1)
    run(stage, source(architecture), tmp_path / "resumed", work)
    assert Late.carried > 2
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


def watch_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """See that what was made of a block is gone when the next one is loaded."""
    each, load_ = KeptBlocks.each, Skeleton.load_
    made: list[weakref.ref[Tensor]] = []
    keeping: list[KeptBlocks] = []

    def watched(
        kept: KeptBlocks, produced: Iterable[Mapping[str, Tensor]], task: Task
    ) -> Iterator[Mapping[str, Tensor]]:
        def seen() -> Iterator[Mapping[str, Tensor]]:
            for tensors in produced:
                made[:] = map(weakref.ref, tensors.values())
                yield tensors
                del tensors

        keeping.append(kept)
        yield from each(kept, seen(), task)
        keeping.clear()

    def loading(skeleton: Skeleton, name: str, device: str | torch.device) -> None:
        for kept in keeping:
            kept._writer.submit(int).result()  # behind the thread's copies
            assert not any(tensor() is not None for tensor in made)
        load_(skeleton, name, device)

    monkeypatch.setattr(KeptBlocks, "each", watched)
    monkeypatch.setattr(Skeleton, "load_", loading)


@pytest.mark.parametrize(
    "kind", [name if name in GOING else pytest.param(name, marks=pytest.mark.slow) for name in STREAMING]
)
def test_states_go_with_the_stage_and_blocks_before_the_next_one(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def room(like: Tensor, shape: Sequence[int], gpu: torch.device | None) -> Tensor:
        states = memory.room_for_states(like, shape, gpu)
        made.append(weakref.ref(states.untyped_storage()))
        return states

    monkeypatch.setattr(entering, "room_for_states", room)
    monkeypatch.setattr(blocks, "room_for_states", room)
    watch_blocks(monkeypatch)
    source = tiny_model("llama bfloat16")
    with uncollected():
        run(STREAMING[kind](few), source, tmp_path / "made", tmp_path / "work")
        assert made
        assert not any(each() for each in made)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STREAMING)
def test_a_gpu_leaves_the_same_bytes(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = few.model_copy(update={"samples": 4})
    stage, source = in_batches(STREAMING[kind](text)), tiny_model("llama bfloat16")
    run(stage, source, tmp_path / "whole", None, device="cuda")
    monkeypatch.setattr(memory, "LITTLE_BYTES", 4 * 64 * 64 * 2 - 1)  # probes of a few tokens always stay
    monkeypatch.setattr(memory, "GPU_SHARE", 0)
    work = interrupted(stage, source, tmp_path, 1, "cuda")
    lines = Lines()
    run(stage, source, tmp_path / "resumed", work, lines, device="cuda")
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")
    assert "wait in main memory" in " ".join(lines.lines)


def test_a_plan_has_states_where_they_will_be(
    tiny_model: TinyModel, few: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    text = few.model_copy(update={"samples": 1 << 14})
    states = (1 << 14) * 64 * shape.config["hidden_size"] * 4
    stages: list[tuple[Transform, int]] = [(Gptq(group_size=32), 1), (Gptq(group_size=32, effort="balanced"), 2)]
    stages += [(Awq(), 1), (PruneStructured(remove_layers=1), 2), (PruneStructured(remove_layers=(1,)), 0)]
    for stage, streams in stages:
        whole, part = (
            (monkeypatch.setattr(calibration_memory, "gpu_memory_bytes", lambda _, size=size: size), None)[1]
            or stage.model_copy(update={"calibration": text}).predict(shape, "cuda")[0]
            for size in (8 * states, 8 * states - 1)
        )
        assert (whole.gpu_bytes - part.gpu_bytes, part.ram_bytes - whole.ram_bytes) == (streams * states,) * 2


def test_a_limit_of_torch_is_all_that_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30)
    for share, left, usable in ((1.0, 60, 90), (0.5, 20, 50), (0.2, 0, 30)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {None: share, 1: share}.__getitem__)
        for device in ("cuda", "cuda:1"):
            assert environment.memory(device) == environment.Memory(100, left)
            assert memory.usable_gpu_bytes(torch.device(device)) == usable
    assert memory.usable_gpu_bytes(torch.device("cpu")) is None


@pytest.mark.parametrize("refused", [0, 2])
def test_memory_is_known_to_cuda_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    known: list[int] = []
    gpu, current = torch.device("cuda:1"), ["cuda:0"]

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def register(place: int, size: int, flags: int) -> int:
        assert (size, flags, current[-1]) == (24, 0, "cuda:1")
        known.append(place)
        return refused

    def unregister(place: int) -> int:
        assert current[-1] == "cuda:1"
        known.remove(place)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    like, launched = torch.ones(2, dtype=torch.bfloat16), Mock(side_effect=RuntimeError)
    monkeypatch.setattr(torch, "zeros", launched)  # which raises what CUDA said before
    room = memory.room_for_states(like, (3, 4), gpu)
    assert [each.kwargs for each in launched.call_args_list] == [{"device": gpu}] * bool(refused)
    assert (room.shape, room.dtype, known) == ((3, 4), torch.bfloat16, [room.data_ptr()])
    del room
    assert len(known) == (1 if refused else 0)
