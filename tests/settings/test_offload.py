import gc
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optkit_evals.serving import refuse_other_engines
from optkit_evals.throughput import Throughput
from pydantic import ValidationError

from optkit.errors import EvalError, OptkitError, RecipeError, StageError
from optkit.measure import EvalContext
from optkit.model.placement import Place, Room, Unit, place_by_room, placement_text, stored_units
from optkit.model.shape import ModelShape, TensorInfo
from optkit.pipeline import open_artifact, plan, run
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.session.torch_session import TorchSession
from optkit.settings import offload
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.offload import Offload
from tests.conftest import TinyModel
from tests.support.quick_evals import THROUGHPUT

plans = import_module("optkit.plan")
TOKENS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))


def opened(directory: Path, *settings: Any, dtype: str | None = None) -> TorchSession:
    session = open_session(directory, settings, dtype=dtype)
    assert isinstance(session, TorchSession)
    return session


def fitting(kind: str) -> dict[str, Place]:
    patterns = {"gpt2": ("transformer.h.1", "transformer.wte"), "llama": ("model.layers.1", "model.embed_tokens")}
    return dict.fromkeys(patterns.get(kind, ("model.layers.1", "lm_head")), "disk")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "mixtral", "gpt_oss"])
def test_the_results_are_those_of_the_model_in_memory(tiny_model: TinyModel, kind: str) -> None:
    plain, spread = opened(tiny_model(kind)), opened(tiny_model(kind), Offload(device_map=fitting(kind)))
    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert spread.logits(TOKENS).equal(plain.logits(TOKENS))
    assert spread.generate(TOKENS, 5).equal(plain.generate(TOKENS, 5))
    assert all(spread.decode_bytes(batch, 16) == plain.decode_bytes(batch, 16) for batch in (1, 3))


def test_an_embedding_on_disk_gets_tokens_from_where_they_are(tiny_model: TinyModel) -> None:
    alone, spread = (
        opened(tiny_model("llama")),
        opened(tiny_model("llama"), Offload(device_map={"model.embed_tokens": "disk"})),
    )
    assert spread.model.device.type == "meta"
    assert spread.generate(TOKENS, 5).equal(alone.generate(TOKENS, 5))


def test_in_a_smaller_dtype_the_logits_are_computed_in_slices(tiny_model: TinyModel) -> None:
    setting = Offload(device_map=fitting("llama"))
    plain, spread = (opened(tiny_model("llama"), *settings, dtype="bfloat16") for settings in ((), (setting,)))
    for _ in range(2):  # the hooks that copy weights are still there afterwards
        assert spread.logits(TOKENS).equal(plain.logits(TOKENS))


def test_the_notes_say_what_lies_where(tiny_model: TinyModel) -> None:
    session = opened(tiny_model("llama"), Offload(cpu_memory="300 kB"))
    assert session.notes == (
        "offload: 3 modules (131 kB) on cpu, 3 modules (444 kB) on disk",
        "offload: every forward pass copies 444 kB of weights to cpu",
    )
    assert opened(tiny_model("llama"), Offload()).notes == ("offload: 6 modules (575 kB) on cpu, nothing on disk",)


def test_fused_experts_are_written_to_the_folder_while_the_model_is_open(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    session = opened(tiny_model("mixtral"), Offload(device_map={"model.layers.*": "disk"}, folder=str(folder)))
    assert len(list(folder.rglob("*.safetensors"))) == 4
    session.close()
    assert list(folder.iterdir()) == []


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_the_folder_goes_with_a_model_that_nobody_closed(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    session: Any = opened(tiny_model("mixtral"), Offload(device_map={"model.layers.*": "disk"}, folder=str(folder)))
    assert list(folder.rglob("*.safetensors"))
    del session
    gc.collect()
    assert list(folder.iterdir()) == []


def test_transformers_own_engine_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(EvalError, match=r"continuous batching does not apply .*offloaded come and go"):
        refuse_other_engines(opened(tiny_model("llama"), Offload(cpu_memory="300 kB")))


def test_throughput_is_measured_as_ever(tiny_model: TinyModel) -> None:
    session = opened(tiny_model("llama"), Offload(cpu_memory="300 kB"))
    grid = Throughput(prompts=(8,), new_tokens=3, repeats=2, warmup=1, limit_s=1)
    rows = {metric.name: metric.value for metric in grid.run(session, EvalContext())}
    assert rows["decode_bytes_per_s"] / rows["decode_tokens_per_s"] == pytest.approx(session.decode_bytes(1, 9))


def test_a_recipe_through_plan_and_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    recipe = {
        "model": str(tiny_model("qwen2")),
        "name": "spread",
        "stages": [{"offload": {"cpu_memory": "400 kB"}}],
        "evals": [THROUGHPUT, "footprint"],
    }
    planned = plan(load_recipe(recipe), device="cpu", store=tmp_path / "store")
    assert planned.forecasts == ("offload: 3 modules (262 kB) on cpu, 2 modules (297 kB) on disk",)
    scorecard = run(load_recipe(recipe), out=tmp_path / "out", device="cpu", store=tmp_path / "store")
    assert scorecard.settings == ("offload: weights in main memory (at most 400 kB), then on disk",)
    assert any(note.startswith("offload: ") and "on disk" in note for note in scorecard.notes)
    record = json.loads((tmp_path / "out" / "optkit.json").read_text())
    assert record["settings"][0]["offload"]["cpu_memory"] == "400 kB"
    again: Any = open_artifact(tmp_path / "out", device="cpu")
    assert any(parameter.is_meta for parameter in again.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_on_a_gpu_weights_wait_in_main_memory_and_on_disk(tiny_model: TinyModel, kind: str) -> None:
    place: dict[str, Place] = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.embed_tokens": "cpu"}
    alone: Any = open_session(tiny_model(kind), (), "cuda")
    spread: Any = open_session(tiny_model(kind), [Offload(device_map=place)], "cuda")
    for _ in range(2):
        assert spread.logits(TOKENS).equal(alone.logits(TOKENS))
        assert spread.generate(TOKENS, 5).equal(alone.generate(TOKENS, 5))
    assert "(pinned) to cuda" in spread.notes[1]
    assert spread.decode_bytes(2, 9) == alone.decode_bytes(2, 9)
    for room in ({"cpu_memory": "200 kB"}, {}):  # no block of Mixtral fits on the GPU, which computes all the same
        small: Any = open_session(tiny_model(kind), [Offload(gpu_memory="300 kB", **room)], "cuda")
        assert small.logits(TOKENS).equal(alone.logits(TOKENS))
        assert " in main memory, " in small.notes[0]


@pytest.mark.parametrize("setting", [Offload(device_map={"*": "cpu"}), Offload(gpu_memory="65.6 kB")])
def test_something_lies_on_the_gpu_or_accelerate_would_compute_on_the_cpu(setting: Offload) -> None:
    units = [
        Unit("model.embed_tokens", 65536, 65536),
        Unit("model.layers.0", 99000, 20000, True),
        Unit("model.norm", 256, 256),
        Unit("lm_head", 0, 0),
    ]
    places = setting.place(units, setting.room("cuda", 10**9))
    assert [name for name, place in places.items() if place == "gpu"] == ["model.norm"]


def test_an_unmodified_model_without_room_is_measured_with_it_too(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {
        "model": str(tiny_model("llama")),
        "name": "spread",
        "stages": ["bf16", {"offload": {"cpu_memory": "300 kB"}}],
        "evals": [THROUGHPUT],
    }
    with_room = plan(load_recipe(recipe), device="cpu", store=tmp_path / "store")
    monkeypatch.setattr(plans, "_has_room", lambda shape, device: False)
    planned = plan(load_recipe(recipe), device="cpu", store=tmp_path / "store")
    assert planned.forecasts[1] == "offload: for the unmodified model too, which has no room on cpu alone"
    assert planned.baseline_key not in (with_room.baseline_key, planned.artifact_key)
    assert planned.evals[0].baseline_key != with_room.evals[0].baseline_key
    scorecard = run(load_recipe(recipe), out=tmp_path / "out", device="cpu", store=tmp_path / "store")
    assert any(note.startswith("offload: every forward pass copies") for note in scorecard.baseline_notes)
    alone = plan(load_recipe({**recipe, "stages": ["offload"]}), device="cpu", store=tmp_path / "store")
    assert alone.baseline_key == alone.artifact_key


def test_how_much_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "gpu_memory_bytes", {"cuda": 50, "cuda:1": 51, "cuda:2": None}.__getitem__)
    assert [plans._has_room(shape(), device) for device in ("cpu", "cuda", "cuda:1", "cuda:2")] == [
        True,
        False,
        True,
        True,
    ]


def shape(tensors: Mapping[str, int] | None = None, **config: object) -> ModelShape:
    sizes = tensors or {
        "model.embed.weight": 10,
        "model.layers.0.a.weight": 20,
        "model.layers.1.a.weight": 20,
        "model.norm.weight": 1,
    }
    return ModelShape(config, {name: TensorInfo("I8", (size,)) for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("fields", "of", "message"),
    [
        (
            {},
            shape(quantization_config={"bits": 4}),
            r"^offload: packed weights cannot be offloaded\. .*layout of their kernels",
        ),
        (
            {"gpu_memory": "19 B"},
            shape(),
            r"^offload: 19 B cannot hold the largest tensor, 20 B in model\.layers\.0\. .*Allow 20 B",
        ),
        (
            {"device_map": {"model.layer.*": "cpu"}},
            shape(),
            r"'model\.layer\.\*' matches no decoder block .*model\.layers\.0",
        ),
        ({"folder": "/proc/none"}, shape(), r"^offload: nothing can be written to /proc/none\. /proc is not writable"),
        ({"gpu_memory": "20 B"}, shape(), None),
        ({"device_map": {"layers.1": "disk"}}, shape({"layers.1.a.weight": 3}), None),
        ({"device_map": {"transformer.h.?": "disk"}}, shape({"h.1.a.weight": 3}), None),
    ],
)
def test_what_is_refused_before_anything_runs(
    fields: dict[str, Any], of: ModelShape, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.os, "access", lambda path, mode: str(path) != "/proc")
    setting = Offload.model_validate(fields)
    if message is None:
        setting.check(of, "cuda")
    else:
        with pytest.raises(StageError, match=message):
            setting.check(of, "cuda")


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StageError, match=r"nothing can be written to .*file is a file\. Name another folder"):
        Offload(folder=str(tmp_path / "file")).check(shape(), "cpu")


def test_packed_weights_are_refused_when_a_model_is_opened(tiny_model: TinyModel, tmp_path: Path) -> None:
    run(
        load_recipe({"model": str(tiny_model("llama")), "stages": ["rtn"]}),
        out=tmp_path / "out",
        device="cpu",
        store=tmp_path / "s",
    )
    with pytest.raises(StageError, match=r"^offload: packed weights cannot be offloaded"):
        open_session(tmp_path / "out", [Offload()])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"gpu_memory": "much"},
            r"'much' is no size\. Write 20 GiB, ",
        ),
        ({"cpu_memory": 0}, r"'0' is no size"),
        (
            {"device_map": {"lm_head": "cpu"}, "gpu_memory": "1 GB"},
            r"gpu_memory and cpu_memory are for device_map: auto",
        ),
        ({"device_map": {"lm_head": "cuda"}}, r"'gpu', 'cpu' or 'disk'"),
    ],
)
def test_fields_that_say_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Offload.model_validate(fields)


def test_settings_that_hold_addresses_are_refused_at_their_line(tiny_model: TinyModel) -> None:
    why = "cuda_graphs and offload exclude each other"
    with pytest.raises(OptkitError, match=why):
        open_session(tiny_model("llama"), [Offload(), CudaGraphs()])
    with pytest.raises(RecipeError, match="exclude each other"):
        load_recipe(
            {"model": str(tiny_model("llama")), "stages": ["offload", {"compile": {"devices": ["cpu", "cuda"]}}]}
        )


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 400),
    st.integers(0, 200),
)
def test_nothing_gets_more_than_its_room(sizes: list[tuple[int, bool]], gpu: int, cpu: int) -> None:
    units = [Unit(f"unit{index}", size, -(-size // 2), block) for index, (size, block) in enumerate(sizes)]
    largest = max(unit.largest_bytes for unit in units)
    if gpu < largest and sum(unit.size_bytes for unit in units) > gpu:
        with pytest.raises(StageError, match="cannot hold the largest tensor"):
            place_by_room(units, Room(gpu, cpu))
        return
    places = place_by_room(units, Room(gpu, cpu))
    used = {
        place: sum(unit.size_bytes for unit in units if places[unit.name] == place) for place in ("gpu", "cpu", "disk")
    }
    assert used["cpu"] <= cpu
    assert used["gpu"] + (largest if used["cpu"] + used["disk"] else 0) <= gpu
    order = [("gpu", "cpu", "disk").index(places[unit.name]) for unit in units if unit.is_block]
    assert order == sorted(order)


def test_where_things_lie_in_words() -> None:
    units = stored_units(shape())
    assert [unit.name for unit in units] == ["model.embed", "model.norm", "model.layers.0", "model.layers.1"]
    places: dict[str, Place] = {
        "model.embed": "gpu",
        "model.norm": "gpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
    }
    assert (
        placement_text(units, places, "cuda") == "2 modules (11 B) on cuda, 1 modules (20 "
        "B) in main memory, 1 modules (20 B) on disk"
    )
    assert (
        Offload(gpu_memory="20 GiB").describe("cuda") == "offload: at most 20 GiB of weights "
        "on cuda, then main memory, then disk"
    )
    assert Offload(device_map={"lm_head": "cpu"}).describe("cuda") == "offload: lm_head on cpu"
