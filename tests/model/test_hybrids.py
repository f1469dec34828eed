"""Blocks of hybrids, run one by one, compute what the whole model does."""

import pytest
import torch

from optkit.model.checkpoint import Checkpoint
from optkit.model.head import logits_behind
from optkit.model.skeleton import Skeleton
from tests.conftest import TinyModel
from tests.support.near import near
from tests.support.opened import transformers_logits
from tests.support.skeletons import run_all_blocks, some_tokens

KINDS = ("mamba", "mamba2", "jamba", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h")
OTHERS = ("qwen3_next", "qwen3_5", "lfm2", "minimax", "recurrent_gemma", "falcon_mamba")


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_block_by_block_equals_the_whole_model(kind: str, tiny_model: TinyModel) -> None:
    tokens, skeleton = some_tokens(), Skeleton(Checkpoint(tiny_model(kind)))
    hidden = run_all_blocks(skeleton, tokens, batch_size=2)[-1]
    skeleton.load_outside_("cpu")
    with torch.no_grad():
        whole = transformers_logits(tiny_model(kind), tokens)
        assert near(logits_behind(skeleton.model, skeleton.blocks, hidden), whole, 1e-6)
    held = [name for block in skeleton.blocks for name in skeleton.block_tensors(block)]
    assert sorted((*held, *skeleton.outside_tensors)) == sorted(skeleton.checkpoint.tensors)
