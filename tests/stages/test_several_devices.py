"""A calibration by several processes is the one by a single process, divided."""

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from optkit.algorithms.hessian import Hessian
from optkit.common.frozen import described
from optkit.errors import StageError
from optkit.keys import make_step_key
from optkit.model.checkpoint import Checkpoint
from optkit.model.together import Together
from optkit.recipe.recipe import TransformEntry
from optkit.source.calibration import Calibration
from optkit.stage import Context, Transform
from optkit.stages.auto_bits import AutoBits
from optkit.stages.awq import Awq
from optkit.stages.fp8 import Fp8
from optkit.stages.gptq import Gptq
from optkit.stages.prune import Prune
from optkit.stages.quantizing.input_ranges import InputRange
from optkit.stages.smoothquant import SmoothQuant
from optkit.training.launch import launch
from tests.support.encoder_decoders import write_pairs
from tests.support.near import near
from tests.support.remembered import Lines
from tests.support.running import run_stage
from tests.support.shared_stages import Runs

TinyModel = Callable[[str], Path]
STAGES: dict[str, Callable[..., Transform]] = {
    "llama": lambda **fields: Gptq(group_size=32, lm_head=True, **fields),
    "mixtral": lambda **fields: Gptq(group_size=32, **fields),
    "qwen3_next": lambda **fields: Gptq(group_size=32, **fields),
    "llama-awq": lambda **fields: Awq(group_size=32, **fields),
    "llama-fp8": lambda **fields: Fp8(rounding="gptq", activations="static", **fields),
    "llama-smoothquant": lambda **fields: SmoothQuant(**fields),
    "llama-prune": lambda **fields: Prune(method="wanda", allocation="owl", **fields),
}
"""Architecture and what is done to it; layers of one shape and of several, experts, a hybrid."""
QUICK = ["llama", "mixtral"]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are ended by Linux's means")


@pytest.fixture(scope="module")
def odd(letters: Path) -> Calibration:
    """Return a text whose sequences two processes cannot share alike."""
    return Calibration(dataset=str(letters), samples=15, sequence_length=64)


def stages(tiny_model: TinyModel, text: Calibration, names: list[str], **fields: Any) -> dict[str, Any]:
    return {
        name: (
            str(tiny_model(name.partition("-")[0])),
            described(STAGES[name](calibration=text, batch_size=4, **fields)),
        )
        for name in names
    }


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def differing(one: Path, two: Path) -> tuple[float, float]:
    """Return the shares of all codes, and of all floats, that differ."""
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    codes, floats = [torch.zeros(1)], [torch.zeros(1)]
    for name, tensor in first.items():
        other = second[name]
        assert tensor.shape == other.shape
        if tensor.dtype in (torch.int32, torch.int8, torch.float8_e4m3fn) and tensor.dim() == 2:
            changed = tensor.view(torch.uint8) ^ other.view(torch.uint8)
            halves = [changed & 15, changed >> 4] if tensor.dtype == torch.int32 else [changed]
            codes += [(each != 0).float().flatten() for each in halves]
        elif tensor.is_floating_point():
            floats.append(((tensor - other).abs() > 0.01 * tensor.abs()).float().flatten())
    return float(torch.cat(codes).mean()), float(torch.cat(floats).mean())


@on_linux
@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("names", [QUICK, pytest.param([*STAGES.keys() - QUICK], marks=pytest.mark.slow)])
def test_two_processes_leave_what_one_does(
    tiny_model: TinyModel, tmp_path: Path, odd: Calibration, names: list[str]
) -> None:
    place = tmp_path / "two"
    place.mkdir()
    alone = run_stage(Runs(runs=stages(tiny_model, odd, names)), tmp_path, tmp_path / "one").details
    runs = Runs(runs=stages(tiny_model, odd, names, devices=2))
    together = launch(runs, tmp_path, place, Context(workspace=tmp_path / "work"), 2, "test").details
    for name in names:
        one, two = (each[name]["details"] for each in (alone, together))
        assert one.keys() == two.keys()
        routed, expected = (list(each.get("expert_tokens", {}).values()) for each in (two, one))
        assert routed[:1] == expected[:1], "a router behind rounded layers may send a token elsewhere"
        assert [sum(each) for each in routed] == [sum(each) for each in expected]
        assert two.get("losses", {}) == pytest.approx(one.get("losses", {}), rel=0.25)
        codes, floats = differing(tmp_path / "one" / name, place / name)
        # sums in another order: a code that lies between two numbers goes to the other one, and what follows it
        # moves too; layers that are rounded in turn, and activations that are rounded, or routed, carry that on
        limit = 0.3 if name in ("llama", "llama-fp8", "llama-smoothquant") else 0.05
        assert codes < limit, name
        assert floats < limit, name


@on_linux
@pytest.mark.usefixtures("warm_children")
def test_nothing_but_the_order_of_sums_differs(tiny_model: TinyModel, tmp_path: Path, odd: Calibration) -> None:
    for count in (1, 2):
        stage = described(Gptq(group_size=32, calibration=odd, batch_size=1, devices=count))
        runs = Runs(runs={"mixtral": (str(tiny_model("mixtral")), stage)}, exact=True)
        (place := tmp_path / str(count)).mkdir()
        launch(runs, tmp_path, place, Context(workspace=tmp_path / "work"), count, "test")
    assert differing(tmp_path / "1" / "mixtral", tmp_path / "2" / "mixtral") == (0, 0)


@pytest.mark.slow
@on_linux
@pytest.mark.usefixtures("warm_children")
def test_processes_go_on_in_the_decoder(tiny_encoder_decoder: TinyModel, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs", False)
    text = Calibration(dataset=str(pairs), samples=5, sequence_length=40, input="input", field="target")
    stage = Gptq(group_size=32, calibration=text, devices=2)
    runs = {"llama": (str(tiny_encoder_decoder("BartForConditionalGeneration")), described(stage))}
    go_on(runs, tmp_path, 1, 3)


@on_linux
@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_processes_go_on_behind_the_last_block_that_all_finished(
    tiny_model: TinyModel, tmp_path: Path, odd: Calibration, killed: int
) -> None:
    go_on(stages(tiny_model, odd, ["llama"], devices=2), tmp_path, killed, 2)


def go_on(runs: dict[str, Any], tmp_path: Path, killed: int, blocks: int) -> None:
    """See that a run whose process is killed behind so many blocks goes on to the same bytes."""
    lines = Lines()

    def run(how: tuple[int, int] | None, workspace: Path) -> dict[str, bytes]:
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
        (tmp_path / "target").mkdir()
        context = Context(workspace=workspace, progress=lines)
        launch(Runs(runs=runs, killed=how), tmp_path, tmp_path / "target", context, 2, "test")
        return {path.name: path.read_bytes() for path in (tmp_path / "target" / "llama").iterdir()}

    whole = run(None, tmp_path / "other")
    with pytest.raises(StageError, match=rf"rank {killed} of 2 was ended by SIGKILL"):
        run((killed, blocks), tmp_path / "work")
    kept = sorted(path.name for path in (tmp_path / "work" / "llama" / "of-2").iterdir())
    assert "kept.json" in kept
    assert run(None, tmp_path / "work") == whole
    assert [line.partition(" at ")[0] for line in lines.lines if "resumed" in line] == ["gptq: resumed"]


class Twice(Together):
    """Two processes that took the same."""

    count = 2

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def joined(self, rows: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        return torch.cat([rows, rows])


@pytest.mark.parametrize("start", [lambda: Hessian(8), lambda: InputRange(8, "cpu", 4, hessian=True)])
def test_means_over_all_processes_are_over_all_tokens(start: Callable[[], Any]) -> None:
    rows = torch.randn(130, 8, generator=torch.Generator().manual_seed(0))
    alone, shared = start(), start()
    for each in (rows, rows):
        alone.add(each)
    shared.add(rows)
    shared.add_up_(Twice(), 260)
    assert shared.tokens == alone.tokens
    matrices = [each.matrix() if isinstance(each, Hessian) else each.hessian() for each in (shared, alone)]
    assert near(*matrices)


def test_one_device_is_in_no_key(text: Calibration) -> None:
    def key(**fields: Any) -> str:
        return make_step_key(TransformEntry(kind="gptq", value=Gptq(calibration=text, **fields)), "0" * 64, 0)

    assert key(devices=1) == key() != key(devices=2) != key(devices=4)


@pytest.mark.parametrize(
    ("stage", "fields", "message"),
    [
        (Gptq, {"devices": 3}, "2 calibration samples cannot be shared by 3 devices. Set devices to at most 2"),
        (Fp8, {"devices": 2, "calibration": None}, "devices share a calibration text, and none is read here. Leave"),
        (
            Gptq,
            {"devices": 2, "effort": "best"},
            "learn, which effort: best picks, has the unmodified model beside it, on one device. Leave out dev",
        ),
        (
            AutoBits,
            {"devices": 2, "average_bits": 5, "method": "rtn"},
            "devices share a calibration text, and rtn reads",
        ),
        (Gptq, {"devices": 2, "backend": "gptqmodel"}, "`devices`: gptqmodel has nothing like it"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    letters: Path, stage: type[Transform], fields: dict[str, Any], message: str
) -> None:
    few = Calibration(dataset=str(letters), samples=2, sequence_length=64)
    with pytest.raises(ValidationError, match=message):
        stage(**{"calibration": few, **fields})


def test_plans_know_the_share_of_each_device(
    tiny_model: TinyModel, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.devices.enough.visible_gpus", lambda: 4)
    monkeypatch.setattr("optkit.devices.enough.cpu_cores", lambda: 2)
    shape = Checkpoint(tiny_model("llama")).shape
    costs = [Gptq(calibration=text, group_size=32, devices=count).predict(shape, "cuda")[0] for count in (1, 2)]
    states = text.samples * text.sequence_length * 64 * 4
    assert costs[0].gpu_bytes - costs[1].gpu_bytes == states // 2
    assert costs[0].kept_bytes == costs[1].kept_bytes
    inside = {name: info.size_bytes for name, info in shape.tensors.items() if name.startswith("model.layers.0.")}
    ahead = sum(2 ** math.ceil(math.log2(size)) for size in inside.values())
    assert costs[1].ram_bytes - costs[0].ram_bytes == ahead + max(inside.values())  # what is read
    with pytest.raises(StageError, match=r"^gptq: 8 devices are asked for, and there are 4 GPUs"):
        Gptq(calibration=text, group_size=32, devices=8).predict(shape, "cuda")
    with pytest.raises(StageError, match=r"^prune: 2 devices are asked for, and cuda:1 is one. Say `--device cuda`"):
        Prune(method="wanda", calibration=text, devices=2).predict(shape, "cuda:1")
