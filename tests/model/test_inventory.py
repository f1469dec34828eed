"""Every tensor of a model is in what a stage leaves, in some form, or is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optkit.model.checkpoint import Checkpoint
from optkit.model.inventory import Inventory, extra_heads, take_inventory
from optkit.model.shape import ModelShape, TensorInfo
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Transform
from optkit.stages.gptq import Gptq
from optkit.stages.prune_structured import PruneStructured
from optkit.stages.rtn import Rtn
from tests.support.changes import changed_copy
from tests.support.predictions import predicted
from tests.support.running import run_stage
from tests.support.skeletons import some_tokens

WEIGHT = TensorInfo("BF16", (8, 8))
BLOCKS = {f"model.layers.{index}.up_proj.weight": WEIGHT for index in range(4)}
EXPERTS = {f"b.experts.{index}.{leaf}.weight": WEIGHT for index in range(3) for leaf in ("w1", "w2", "w3")}
FUSED = {"b.experts.gate_up_proj": TensorInfo("BF16", (3, 16, 8)), "b.experts.down_proj": TensorInfo("BF16", (3, 8, 8))}
CODES = {
    "x.weight_packed": TensorInfo("I32", (8, 1)),
    "x.weight_scale": WEIGHT,
    "x.weight_shape": TensorInfo("I64", (2,)),
}
FLOAT8 = {"x.weight": TensorInfo("F8_E4M3", (8, 8)), "x.weight_scale_inv": TensorInfo("F32", (1, 1))}
FOUR_BIT = {"x.weight": TensorInfo("U8", (32, 1)), "x.weight.absmax": WEIGHT}
MXFP4 = {
    f"b.experts.{leaf}{end}": TensorInfo("U8", (3, 8, 2))
    for leaf in ("gate_up_proj", "down_proj")
    for end in ("_blocks", "_scales")
}


def inventory(before: Any, after: Any, dropped: dict[str, str] | None = None, **config: Any) -> Inventory:
    return take_inventory(ModelShape({}, before), ModelShape(config, after), dropped or {})


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        ({"x.weight": WEIGHT}, {"x.weight": WEIGHT, "x.bias": WEIGHT}, {"kept": 1}),
        ({"x.weight": WEIGHT}, {"x.weight": TensorInfo("F32", (8, 8))}, {"changed": 1}),
        ({"x.weight": WEIGHT}, CODES, {"packed": 1}),
        ({"x.weight": WEIGHT}, FLOAT8, {"packed": 1}),
        ({"x.weight": WEIGHT}, FOUR_BIT, {"packed": 1}),
        (FLOAT8, {"x.weight": WEIGHT}, {"changed": 2}),
        (CODES, {"x.weight": WEIGHT}, {"changed": 3}),
        (EXPERTS, FUSED, {"changed": 9}),
        (FUSED, EXPERTS, {"changed": 2}),
        (MXFP4, FUSED, {"changed": 4}),
        (MXFP4, EXPERTS, {"changed": 4}),
    ],
)
def test_what_became_of_a_tensor(before: Any, after: Any, counts: dict[str, int]) -> None:
    found = inventory(before, after)
    assert (dict(+found.counts), found.lost) == (counts, [])


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({"x.weight": WEIGHT, "x.bias": WEIGHT}, {"x.weight": WEIGHT}, ["x.bias"]),
        ({"x.weight": WEIGHT}, {"x.weight_packed": WEIGHT}, ["x.weight"]),  # nobody could scale the codes
        (FLOAT8, {"x.weight": FLOAT8["x.weight"]}, ["x.weight_scale_inv"]),
        (EXPERTS, {name: info for name, info in EXPERTS.items() if ".2.w1" not in name}, ["b.experts.2.w1.weight"]),
        (FUSED, {name: info for name, info in EXPERTS.items() if ".2." not in name}, list(FUSED)),
        (EXPERTS, {name: TensorInfo("BF16", (2, 8, 8)) for name in FUSED}, list(EXPERTS)),
        ({"lm_head.weight": WEIGHT, "n.weight": WEIGHT}, {"n.weight": WEIGHT}, ["lm_head.weight"]),
    ],
)
def test_what_is_lost(before: Any, after: Any, lost: list[str]) -> None:
    assert inventory(before, after).lost == lost


def test_members_behind_one_that_was_dropped_are_numbered_anew() -> None:
    fewer = {f"model.layers.{index}.up_proj.weight": WEIGHT for index in range(2)}
    gone = {"model.layers.0": "removed", "model.layers.2": "removed"}
    found = inventory(BLOCKS, fewer, gone)
    assert (dict(+found.counts), found.dropped, found.lost) == ({"kept": 2, "dropped": 2}, gone, [])
    only_one = {name: WEIGHT for name in fewer if ".0." in name}
    assert inventory(BLOCKS, only_one, gone).lost == ["model.layers.3.up_proj.weight"]


def test_experts_of_a_block_behind_a_dropped_one_are_followed() -> None:
    def named(block: int, experts: int) -> dict[str, TensorInfo]:
        return {f"model.layers.{block}.experts.{index}.w1.weight": WEIGHT for index in range(experts)}

    gone = {"model.layers.0": "removed", "model.layers.1.experts.0": "merged"}
    assert inventory(named(0, 3) | named(1, 3), named(0, 2), gone).lost == []


def test_what_a_model_computes_the_same_without() -> None:
    table = {"model.embed_tokens.weight": WEIGHT}
    buffers = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": WEIGHT for index in range(3)}
    found = inventory({"lm_head.weight": WEIGHT} | table | buffers, table, vocab_size=8, tie_word_embeddings=True)
    assert found.lost == []
    assert found.dropped == {
        "lm_head.weight": "lm_head is tied to the embedding",
        "model.layers.*.self_attn.rotary_emb.inv_freq": "the model's code computes this buffer",
    }


@pytest.fixture
def proposing(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a model with a head behind its blocks, as DeepSeek-V3 has one, and one beside them."""

    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = {name.replace(".2.", ".3."): tensor + 1 for name, tensor in tensors.items() if ".layers.2." in name}
        return tensors | head | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}

    return changed_copy(tiny_model("llama"), tmp_path, add, num_nextn_predict_layers=1)


def heads(directory: Path, index: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{index}."
    stored = load_file(directory / "model.safetensors")
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}


def test_a_head_that_proposes_tokens_is_no_block(proposing: Path) -> None:
    shape = Checkpoint(proposing).shape
    assert extra_heads(shape) == ("model.layers.3",)
    assert len([place for place in shape.block_elements if place]) == 3
    beside = ModelShape({}, {"mtp.layers.0.fc.weight": WEIGHT, "model.mtp.0.x": WEIGHT, "model.smtp.x": WEIGHT})
    assert extra_heads(beside) == ("mtp", "model.mtp")


@pytest.mark.parametrize("kind", ["rtn", "gptq", "remove_layers"])
def test_it_travels_unchanged(proposing: Path, letters: Path, tmp_path: Path, kind: str) -> None:
    text = Calibration(dataset=str(letters), samples=4, sequence_length=32)
    stages: dict[str, Transform] = {
        "rtn": Rtn(group_size=32),
        "gptq": Gptq(group_size=32, calibration=text),
        "remove_layers": PruneStructured(remove_layers=(1,)),
    }
    before, target = heads(proposing, 3), tmp_path / "target"
    report = run_stage(stages[kind], proposing, target)
    after = heads(target, 2 if kind == "remove_layers" else 3)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    found = take_inventory(Checkpoint(proposing).shape, Checkpoint(target).shape, report.dropped)
    assert (found.lost, found.counts["added"]) == ([], 0)
    predicted(stages[kind], proposing, target)
    session: Any = open_session(target)
    assert session.logits(some_tokens()).isfinite().all()


def test_it_goes_with_a_model_that_becomes_narrower(proposing: Path, letters: Path, tmp_path: Path) -> None:
    text = Calibration(dataset=str(letters), samples=4, sequence_length=32)
    target = tmp_path / "target"
    report = run_stage(PruneStructured(intermediate_size=64, calibration=text), proposing, target)
    assert report.dropped == {"model.layers.3": "it proposes tokens, and its widths are those of the larger model"}
    assert heads(target, 3) == {}
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 0
