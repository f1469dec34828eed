"""How hidden states behind a block are read, beside the norms of transformers' own model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from optkit.model.checkpoint import Checkpoint
from optkit.model.readings import readings
from optkit.model.skeleton import Skeleton
from tests.conftest import TinyModel
from tests.support.changes import changed_copy
from tests.support.tiny_models import CONFIGS, SIZES


@pytest.mark.parametrize(
    ("kind", "of_blocks", "of_head", "added"),
    [
        ("gemma3", "model.layers.{}.input_layernorm", "model.norm", 1),
        ("gpt2", "transformer.h.{}.ln_1", "transformer.ln_f", 0),
    ],
)
def test_the_next_norm_and_the_gains_of_all_later_ones(
    tiny_model: TinyModel, kind: str, of_blocks: str, of_head: str, added: int
) -> None:
    source = tiny_model(kind)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    skeleton = Skeleton(Checkpoint(source))
    inputs = skeleton.capture_inputs(torch.arange(16).view(2, 8), "cpu", 2)
    count, given = len(skeleton.blocks), torch.randn(2, inputs.hidden.shape[-1], generator=torch.manual_seed(0))
    for index in (0, count - 1):
        with skeleton.loaded(skeleton.blocks[index], "cpu", ""):
            as_next, by_gains = readings(skeleton, index, inputs.hidden, inputs.batches[0].calls[index])
        places = [*(of_blocks.format(later) for later in range(index + 1, count)), of_head]
        norms = [model.get_submodule(place) for place in places]
        torch.testing.assert_close(as_next(given), norms[0](given))
        squares = torch.stack([(norm.weight.detach() + added).square() for norm in norms])
        expected = given * (squares / squares.mean(1, keepdim=True)).mean(0).sqrt()
        torch.testing.assert_close(by_gains(given), expected, rtol=1e-4, atol=1e-5)


def test_a_norm_that_reads_nothing_adds_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    source = changed_copy(tiny_model("llama"), tmp_path, lambda held: held | {name: torch.zeros_like(held[name])})
    skeleton, norms = Skeleton(Checkpoint(source)), load_file(source / "model.safetensors")
    inputs = skeleton.capture_inputs(torch.arange(16).view(2, 8), "cpu", 2)
    with skeleton.loaded(skeleton.blocks[0], "cpu", ""):
        as_next, by_gains = readings(skeleton, 0, inputs.hidden, inputs.batches[0].calls[0])
    assert not as_next(inputs.hidden).any()
    others = torch.stack([norms[f"model.{each}.weight"].square() for each in ("layers.2.input_layernorm", "norm")])
    expected = (others / others.mean(1, keepdim=True)).sum(0).div(3).sqrt()
    torch.testing.assert_close(by_gains(torch.ones_like(expected)), expected)


def test_blocks_without_a_norm_in_front_read_them_as_they_are(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "olmo2", {"model_type": "olmo2", **SIZES})
    skeleton = Skeleton(Checkpoint(tiny_model("olmo2")))
    inputs = skeleton.capture_inputs(torch.arange(16).view(2, 8), "cpu", 2)
    with skeleton.loaded(skeleton.blocks[0], "cpu", ""):
        found = readings(skeleton, 0, inputs.hidden, inputs.batches[0].calls[0])
    assert [type(each) for each in found] == [nn.Identity]
