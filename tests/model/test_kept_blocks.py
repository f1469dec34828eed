"""Stages that were stopped go on behind the last finished block, and leave the same bytes."""

import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optkit.errors import ResourceError
from optkit.model import kept_blocks
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.together import Together
from optkit.progress import SilentTask
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report, Transform
from optkit.stages import rotate
from optkit.stages.auto_bits import AutoBits
from optkit.stages.awq import Awq
from optkit.stages.awq_scale import AwqScale
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.mx import Mx
from optkit.stages.prune import Prune
from optkit.stages.prune_structured import PruneStructured
from optkit.stages.rotate import Rotate
from optkit.stages.smoothquant import SmoothQuant
from tests.conftest import TinyModel, Warnings
from tests.support import remembered
from tests.support.encoder_decoders import write_pairs

STAGES: dict[str, Callable[[Calibration], Transform]] = {
    "gptq": lambda text: Gptq(group_size=32, calibration=text, lm_head=True),
    "gptq that learns": lambda text: Gptq(
        group_size=32, bits=2, calibration=text, learn="blocks", learning_steps=2, scale_steps=2
    ),
    "learning": lambda text: Gptq(group_size=32, calibration=text, learn="blocks", learning_steps=2, scale_steps=0),
    "mx that learns": lambda text: Mx(effort="best", learning_steps=2, scale_steps=2, copies=1, calibration=text),
    "awq": lambda text: Awq(group_size=32, grid_points=2, calibration=text),
    "awq_scale": lambda text: AwqScale(group_size=32, grid_points=2, calibration=text),
    "auto_bits": lambda text: AutoBits(average_bits=5.5, calibration=text, sensitivity_samples=2, held_out_samples=2),
    "rotate": lambda text: Rotate(),
    "smoothquant": lambda text: SmoothQuant(calibration=text),
    "fp8": lambda text: Fp8(rounding="gptq", activations="static", calibration=text),
    "prune": lambda text: Prune(allocation="owl", refinements=2, calibration=text),
    "prune_structured": lambda text: PruneStructured(
        remove_layers=1, intermediate_size=96, attention_heads=2, hidden_size=48, multiple_of=16, calibration=text
    ),
}


class Stopped(BaseException):
    """Nothing catches it, as nothing catches a kill."""


class Lines(Warnings):
    """Keeps what is said, too."""

    def say(self, line: str) -> None:
        self.lines.append(line)


def run(
    stage: Transform,
    source: Path,
    target: Path,
    workspace: Path | None,
    lines: Lines | None = None,
    device: str = "cpu",
) -> Report:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    return stage.run(source, target, Context(workspace=workspace, progress=lines or Lines(), device=device))


def stop_behind(blocks: int, patched: pytest.MonkeyPatch, stop: Callable[[], Any]) -> None:
    """Stop a stage as soon as so many blocks are kept."""
    keep, count = KeptBlocks._keep, [0]

    def kept(self: KeptBlocks, *arguments: Any) -> None:
        keep(self, *arguments)
        self._settle()
        count[0] += 1
        if count[0] == blocks:
            stop()

    patched.setattr(KeptBlocks, "_keep", kept)


def stopped() -> None:
    raise Stopped


def interrupted(stage: Transform, source: Path, place: Path, blocks: int = 1, device: str = "cpu") -> Path:
    """Return the workspace of a stage that was stopped when so many blocks were finished."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stopped):
        stop_behind(blocks, patched, stopped)
        run(stage, source, place / "stopped", place / "work", device=device)
    return place / "work"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def told(report: Report) -> dict[str, Any]:
    """Return a report without its time."""
    return {**vars(report), "details": {**report.details, "seconds": 0}}


@pytest.fixture(scope="module")
def few(letters: Path) -> Calibration:
    return Calibration(dataset=str(letters), samples=2, sequence_length=64)


@pytest.fixture(params=["states that are read", "blocks that run again"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How hidden states come to be where they were: as of a CPU, and as of a GPU."""
    if request.param == "blocks that run again":
        monkeypatch.setattr(kept_blocks, "writes_states", lambda size, on_gpu: False)


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.usefixtures("how")
def test_a_stage_goes_on_behind_its_last_finished_block(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str
) -> None:
    stage, lines = STAGES[kind](few), Lines()
    source = tiny_model("llama bfloat16" if stage.kind == "mx" else "llama")
    whole = run(stage, source, tmp_path / "whole", None)
    blocks = 2 if kind == "prune_structured" else 3
    for finished in (1, 3) if kind in ("gptq", "prune") else (blocks - 1,):
        work = interrupted(stage, source, tmp_path / str(finished), finished)
        resumed = run(stage, source, tmp_path / "resumed", work, lines)
        assert f": resumed at block {min(finished + 1, blocks)} of {blocks}" in " ".join(lines.lines)
        assert files(tmp_path / "resumed") == files(tmp_path / "whole")
        assert told(resumed) == told(whole)


@pytest.mark.usefixtures("how")
def test_stacked_experts_go_on(tiny_model: TinyModel, tmp_path: Path, few: Calibration) -> None:
    stage, source = Mx(type="mxfp4", rounding="gptq", calibration=few), tiny_model("gpt_oss bfloat16")
    whole = run(stage, source, tmp_path / "whole", None)
    resumed = run(stage, source, tmp_path / "resumed", interrupted(stage, source, tmp_path))
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")
    assert told(resumed) == told(whole)
    assert len(whole.details["rounded_to_nearest"]) == 16  # 128 tokens, of which no expert gets all


def test_lm_head_is_rounded_by_the_same_kernels(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, asked = STAGES["gptq"](few), []
    work = interrupted(stage, tiny_model("llama"), tmp_path, 3)
    monkeypatch.setattr("optkit.stages.quantizing.hessians.why_not_native", lambda: asked.append("loaded"))
    run(stage, tiny_model("llama"), tmp_path / "resumed", work)
    assert "loaded" in asked


def test_lm_head_is_rotated_on_what_leaves_the_last_block(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotate_head, seen = rotate._rotate_head, list[torch.Tensor]()

    def rotated(job: Any, hidden: torch.Tensor) -> None:
        seen.append(hidden.clone())
        rotate_head(job, hidden)

    monkeypatch.setattr(rotate, "_rotate_head", rotated)
    run(Rotate(), tiny_model("llama"), tmp_path / "whole", None)
    run(Rotate(), tiny_model("llama"), tmp_path / "resumed", interrupted(Rotate(), tiny_model("llama"), tmp_path, 3))
    assert torch.equal(*seen)


@pytest.mark.parametrize("finished", [2, 3])
@pytest.mark.usefixtures("how")
def test_an_encoder_decoder_goes_on(tiny_encoder_decoder: TinyModel, tmp_path: Path, finished: int) -> None:
    source, pairs = tiny_encoder_decoder("BartForConditionalGeneration"), write_pairs(tmp_path / "pairs", False)
    text = Calibration(dataset=str(pairs), samples=6, sequence_length=40, input="input", field="target")
    stage = Gptq(group_size=32, calibration=text)
    run(stage, source, tmp_path / "whole", None)
    run(stage, source, tmp_path / "resumed", interrupted(stage, source, tmp_path, finished))
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


def test_a_killed_process_loses_one_block_at_most(tiny_model: TinyModel, tmp_path: Path, few: Calibration) -> None:
    stage, source, lines = STAGES["prune"](few), tiny_model("llama"), Lines()

    def work() -> None:
        torch.set_num_threads(1)
        stop_behind(2, pytest.MonkeyPatch(), lambda: os.kill(os.getpid(), signal.SIGKILL))
        run(stage, source, tmp_path / "killed", tmp_path / "work")

    killed = multiprocessing.get_context("fork").Process(target=work)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    run(stage, source, tmp_path / "resumed", tmp_path / "work", lines)
    assert lines.lines == ["prune: resumed at block 3 of 3"]
    run(stage, source, tmp_path / "whole", None)
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


@pytest.mark.parametrize("damaged", ["block-00000.safetensors", "states-00001", "kept.json"])
def test_what_was_damaged_is_dropped_and_said(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, damaged: str
) -> None:
    stage, source, lines = STAGES["prune"](few), tiny_model("llama"), Lines()
    work = interrupted(stage, source, tmp_path, 2)
    content = (work / damaged).read_bytes()
    (work / damaged).write_bytes(content[: len(content) // 2])
    run(stage, source, tmp_path / "resumed", work, lines)
    assert lines.lines == [f"prune: {damaged} was changed or cut off, so the blocks that were kept are dropped"]
    run(stage, source, tmp_path / "whole", None)
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "other"), [("describe_environment", lambda device: {"torch": "another"}), ("LAYOUT", 1)]
)
def test_blocks_of_other_versions_are_dropped(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, source, lines = STAGES["prune"](few), tiny_model("llama"), Lines()
    work = interrupted(stage, source, tmp_path)
    monkeypatch.setattr(kept_blocks, name, other)
    run(stage, source, tmp_path / "resumed", work, lines)
    assert lines.lines == ["prune: device or versions are others now, so the blocks that were kept are dropped"]


def test_room_on_the_disk_is_the_stages_own(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, source, lines = STAGES["prune"](few), tiny_model("llama"), Lines()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    run(stage, source, tmp_path / "made", tmp_path / "work", lines)
    said = lines.lines[0]
    assert said.startswith("prune: finished blocks are no longer kept, so a stopped run begins anew: ")
    assert re.search(r"no room for [\d.]+ kB beside what the stage writes", said)
    assert len(lines.lines) == 1
    assert not (tmp_path / "work").exists()


def refused(*_arguments: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_stage_goes_on_without_keeping(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, source, lines = STAGES["prune"](few), tiny_model("llama"), Lines()
    run(stage, source, tmp_path / "whole", None)
    monkeypatch.setattr(kept_blocks, "save_tensors", refused)
    run(stage, source, tmp_path / "made", tmp_path / "work", lines)
    said = "prune: finished blocks are no longer kept, so a stopped run begins anew: [Errno 13] Permission denied"
    assert lines.lines == [said]
    assert files(tmp_path / "made") == files(tmp_path / "whole")


def test_nothing_is_kept_behind_a_block_that_was_not(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = iter([SimpleNamespace(free=1_000)])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: next(room, SimpleNamespace(free=1 << 40)))
    run(Rotate(), tiny_model("llama"), tmp_path / "made", tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("kind", "name"), [("prune", "sparsities"), ("gptq that learns", "copies")])
def test_blocks_go_with_what_was_measured_for_them(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, name: str
) -> None:
    stage, source, lines = STAGES[kind](few), tiny_model("llama"), Lines()
    work = interrupted(stage, source, tmp_path, 2)
    (work / f"{name}.json").unlink()
    run(stage, source, tmp_path / "resumed", work, lines)
    said = f"{stage.kind}: {name}.json was changed or cut off, so the blocks that were kept are dropped"
    assert lines.lines == [said]
    run(stage, source, tmp_path / "whole", None)
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


@pytest.mark.parametrize(("kind", "states"), [("gptq", ["states-00002"]), ("prune", [])])
def test_states_that_nobody_reads_are_deleted_or_not_written(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, states: list[str]
) -> None:
    (tmp_path / "work").mkdir()
    for left in ("states-00007", "encoded", "encoded-1"):
        (tmp_path / "work" / left).write_bytes(b"of a run before")
    work = interrupted(STAGES[kind](few), tiny_model("llama"), tmp_path, 3)
    assert [path.name for path in work.iterdir() if path.name.startswith(("states", "encoded"))] == states


def test_blocks_of_a_gpu_come_behind_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "on_gpu", lambda tensors: next(iter(tensors)))
    events = []

    def produced() -> Iterator[dict[str, torch.Tensor]]:
        kept.resume(3, None, {})
        for number in range(3):
            events.append(f"made {number}")
            yield {"weight": torch.tensor([number])}

    kept = KeptBlocks(tmp_path / "work", "cpu", Lines(), "rotate", 0)
    for tensors in kept.each(produced(), SilentTask()):
        events.append(f"got {int(tensors['weight'])}")
    assert events == ["made 0", "made 1", "got 0", "made 2", "got 1", "got 2"]
    assert [int(load_file(path)["weight"]) for path in sorted((tmp_path / "work").glob("block-*"))] == [0, 1, 2]


def test_tensors_come_back_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    """Else other tensors would be the first of the next file of a model that has several."""
    made = {"wide": torch.ones(3), "narrow": torch.ones(3, dtype=torch.uint8), "a": torch.ones(3)}

    def produced(kept: KeptBlocks) -> Iterator[dict[str, torch.Tensor]]:
        yield from (made for _ in kept.resume(2, None, {}))

    for kept_before in (0, 2):
        begun, task = [], remembered.Lines()
        task.begin = lambda task=task, begun=begun: begun.append(len(task.lines))
        kept, orders = KeptBlocks(tmp_path / "work", "cpu", Lines(), "rotate", 0), []
        for tensors in kept.each(produced(kept), task):
            orders.append(list(tensors))
            task.advance()
        assert orders == [list(made)] * 2
        assert begun == [kept_before]  # the time of kept blocks foretells nothing


def test_who_does_not_write_its_states_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two, lines = Together(), Lines()
    two.count = 2
    kept = KeptBlocks(None, "cpu", lines, "gptq", 0, two)
    monkeypatch.setattr(kept_blocks, "WAIT_S", 0.05)
    monkeypatch.setattr(kept_blocks, "TELL_S", 0.0)
    with pytest.raises(ResourceError, match=r"states-00003-1: process 1 of 2 did not write its hidden states within"):
        kept._wait_for([tmp_path / "states-00003-1"])
    assert lines.lines == ["gptq: waiting for hidden states of process 1 of 2"]


def test_rounding_to_nearest_keeps_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    run(Fp8(), tiny_model("llama"), tmp_path / "made", tmp_path / "work")
    assert not (tmp_path / "work").exists()
