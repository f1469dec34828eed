"""Blocks of models that see, one by one, are given and leave what they are in the whole model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from optkit.model.attention_choice import attention_options
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from tests.support.vision_models import IMAGES, ImagePrompts, save_vision_model


def watch(blocks: Iterable[nn.Module], seen: list[Tensor]) -> None:
    """Keep what goes into blocks and what comes out."""

    def observe(_module: nn.Module, given: Any, named: Any, output: Any) -> None:
        seen.append((given[0] if given else named["hidden_states"]).clone())
        seen.append(output[0] if isinstance(output, tuple) else output)

    for block in blocks:
        block.register_forward_hook(observe, with_kwargs=True)


@pytest.mark.parametrize("kind", IMAGES)
def test_block_by_block_computes_what_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    source, prompts = save_vision_model(kind, tmp_path), ImagePrompts(kind)
    skeleton, ours = Skeleton(Checkpoint(source)), list[Tensor]()
    inputs = skeleton.capture_inputs(prompts, "cpu")
    watch((block.module for block in skeleton.blocks), ours)
    for index, block in enumerate(skeleton.blocks):
        with skeleton.loaded(block, "cpu", ""):
            skeleton.advance_(index, inputs)
    options = attention_options(skeleton.checkpoint.config, {"dtype": torch.float32})
    whole, theirs = AutoModelForImageTextToText.from_pretrained(source, **options).eval(), list[Tensor]()
    watch((whole.get_submodule(block.name) for block in skeleton.blocks), theirs)
    with torch.no_grad():
        for number, prompt in enumerate(prompts):
            theirs.clear()
            whole(**prompt)
            of_prompt = ours[2 * number :][:: 2 * len(prompts)], ours[2 * number + 1 :][:: 2 * len(prompts)]
            torch.testing.assert_close(of_prompt, (theirs[::2], theirs[1::2]), atol=3e-6, rtol=0)
            seen = theirs[-1]
            whole(**{**prompt, "pixel_values": 1 - prompt["pixel_values"]})
            assert not torch.allclose(theirs[-1], seen, atol=1e-3)
