"""The norms that read what a block leaves, beside those that transformers has there."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from optkit.model.checkpoint import Checkpoint
from optkit.model.readers import readers
from optkit.model.skeleton import Skeleton
from tests.conftest import TinyModel
from tests.support.tiny_models import CONFIGS, SIZES


@pytest.mark.parametrize(
    ("kind", "of_blocks", "of_head"),
    [
        ("gemma3", "model.layers.{}.input_layernorm", "model.norm"),
        ("gpt2", "transformer.h.{}.ln_1", "transformer.ln_f"),
        ("olmo2", None, None),
    ],
)
def test_the_next_block_and_the_output_layer_read(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: str, of_blocks: str | None, of_head: str
) -> None:
    monkeypatch.setitem(CONFIGS, "olmo2", {"model_type": "olmo2", **SIZES})
    source = tiny_model(kind)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    skeleton = Skeleton(Checkpoint(source))
    inputs = skeleton.capture_inputs(torch.arange(16).view(2, 8), "cpu", 2)
    hidden, call = inputs.hidden, inputs.batches[0].calls
    for index in (0, len(skeleton.blocks) - 1):
        with skeleton.loaded(skeleton.blocks[index], "cpu", ""):
            found = readers(skeleton, index, hidden, call[index])
        behind = [of_blocks.format(index + 1)] if of_blocks and index == 0 else []
        expected = [model.get_submodule(name) for name in (*behind, of_head)] if of_head else [torch.nn.Identity()]
        assert len(found) == len(expected)
        for norm, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(norm(hidden), reference(hidden))
