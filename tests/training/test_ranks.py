"""A training by several processes is the one by a single process, divided."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.stage import Context
from optkit.stages.distill import Distill
from optkit.training.launch import launch
from tests.support.rank_stages import Trains

TinyModel = Callable[[str], Path]
WAYS = ("ddp-teacher-checkpointing", "fsdp-teacher-checkpointing", "fsdp-resumed")


@pytest.mark.usefixtures("warm_children")
@pytest.mark.skipif(sys.platform != "linux", reason="processes are ended by Linux's means")
def test_two_processes_train_as_one_does(tiny_model: TinyModel, tmp_path: Path) -> None:
    """With a teacher, gradient checkpointing, accumulation, pruned weights, and when killed and
    resumed; in float32 on CPUs by gloo.
    """
    places = {name: tmp_path / name for name in ("one", "two")}
    for place in places.values():
        place.mkdir()
    source, stage = tiny_model("llama"), Trains(ways=WAYS)
    alone = stage.run(source, places["one"], Context()).details
    together = launch(stage, source, places["two"], Context(workspace=tmp_path / "work"), 2, "test").details
    for way in WAYS:
        one, two = alone[way], together[way]
        assert two["curve"] == pytest.approx(one["curve"], rel=1e-5)
        assert two["held_out"] == pytest.approx(one["held_out"], rel=1e-5)
        assert two["resumed"] == one["resumed"] == ([6] if "resumed" in way else [])
        expected, found = (load_file(place / f"{way}.safetensors") for place in places.values())
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert found[name] == pytest.approx(tensor, rel=1e-3, abs=1e-5), name
        assert not found["model.layers.0.mlp.up_proj.weight"][:, ::2].any(), "pruned weights stay zeros"


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"batch_size 8 cannot be shared by 3 devices alike. Use 9."):
        Distill(devices=3)
    with pytest.raises(
        ValidationError, match=r"adamw_8bit cannot keep its state in parts. Use `parallel: ddp`, or `optimizer: adamw`."
    ):
        Distill(devices=2, parallel="fsdp", optimizer="adamw_8bit")


def test_more_devices_than_there_are_are_refused_in_the_plan(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    monkeypatch.setattr("optkit.devices.enough.cpu_cores", lambda: 1)
    monkeypatch.setattr("optkit.devices.enough.visible_gpus", lambda: 4)
    with pytest.raises(StageError) as caught:
        Distill(devices=2).predict(shape, "cpu")
    assert str(caught.value) == (
        "distill: 2 devices are asked for, and there is 1 CPU core. Each process takes one at "
        "least. Set `devices` to at most 1."
    )
    with pytest.raises(StageError) as caught:
        Distill(devices=8).predict(shape, "cuda")
    assert str(caught.value) == (
        "distill: 8 devices are asked for, and there are 4 GPUs. Each process takes one of its own. "
        "Set `devices` to at most 4."
    )
    with pytest.raises(StageError, match="2 devices are asked for, and cuda:1 is one. Say `--device cuda`."):
        Distill(devices=2).predict(shape, "cuda:1")
    Distill(devices=4).predict(shape, "cuda")
    monkeypatch.setattr("optkit.devices.enough.visible_gpus", lambda: 0)
    Distill(devices=8).predict(shape, "cuda")  # planned for another machine
