"""What stands behind the blocks, run alone, against the whole model; and block gradients against
those of the whole model.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optkit.algorithms.sensitivity import Seen
from optkit.errors import SourceError
from optkit.model.blocks import Block
from optkit.model.checkpoint import Checkpoint
from optkit.model.head import logits_behind
from optkit.model.skeleton import Skeleton
from optkit.stages.sensitivity.gradients import BlockGradients
from tests.conftest import TinyModel
from tests.support.near import near

KINDS = ["llama", "gemma3", "gpt2", "gptj", "opt", "mixtral", "gpt_oss"]


def random_tokens(sequences: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(0, 500, (sequences, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_alone_gives_the_logits_of_the_model(tiny_model: TinyModel, kind: str) -> None:
    skeleton, tokens = Skeleton(Checkpoint(tiny_model(kind))), random_tokens()
    skeleton.load_("", "cpu")
    left: list[torch.Tensor] = []
    last = skeleton.blocks[-1].module
    handle = last.register_forward_hook(
        lambda _module, _inputs, output: left.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        expected = skeleton.model(tokens).logits
        handle.remove()
        found = logits_behind(skeleton.model, skeleton.blocks, left[0][:, 5:12])
    assert near(found, expected[:, 5:12])
    assert "forward" not in last.__dict__


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_gradients_block_by_block_are_those_of_the_whole_model(
    tiny_model: TinyModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = torch.randn(20, 512, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(
        "optkit.stages.sensitivity.gradients.fisher_probe", lambda logits, _generator: probe[None].to(logits.dtype)
    )
    source, tokens = tiny_model(kind), random_tokens(2)
    skeleton = Skeleton(Checkpoint(source))
    passes = BlockGradients(skeleton, tokens, "cpu", probes=1, seed=0)
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cpu")
        passes.forward_(index)
        skeleton.release_(block.name)
    passes.turn_()
    found: dict[str, list[Seen]] = {}
    for index in reversed(range(len(skeleton.blocks))):
        skeleton.load_(skeleton.blocks[index].name, "cpu")
        found |= passes.backward_(index, skeleton.linears(skeleton.blocks[index]))
        skeleton.release_(skeleton.blocks[index].name)
    whole = Skeleton(Checkpoint(source))
    whole.load_("", "cpu")
    modules = {name: module for block in whole.blocks for name, module in whole.linears(block).items()}
    for module in modules.values():
        module.weight.requires_grad_()
    for number, sequence in enumerate(tokens):
        whole.model.zero_grad()
        (whole.model(sequence[None]).logits[0] * probe).sum().backward()
        for name, module in modules.items():
            gradient = found[name][number].gradients[0].T @ found[name][number].inputs
            expected = (
                module.weight.grad if gradient.shape == module.weight.shape and kind != "gpt2" else module.weight.grad.T
            )
            assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_calls_of_one_layer_are_put_together() -> None:
    first, second = Seen(torch.ones(3, 2), torch.ones(1, 3, 4)), Seen(torch.zeros(2, 2), torch.zeros(1, 2, 4))
    both = first.beside(second)
    assert both.inputs.shape == (5, 2)
    assert both.gradients.shape == (1, 5, 4)


def test_a_model_that_does_not_hand_its_blocks_to_its_head_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(model_type="odd")
            self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            hidden = input_ids[..., None].float()
            for layer in self.layers:
                hidden = layer(hidden) + 1
            return SimpleNamespace(logits=hidden)

    model: Any = Odd()
    blocks = [Block(f"layers.{index}", module) for index, module in enumerate(model.layers)]
    with pytest.raises(SourceError) as caught:
        logits_behind(model, blocks, torch.zeros(1, 3, 1))
    assert str(caught.value) == (
        "odd: unsupported architecture Odd: what stands behind its blocks cannot be run alone. the hidden "
        "states that enter a block are not those that the block before it returned."
    )
