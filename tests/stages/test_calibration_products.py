"""How blocks compute on CPUs while a text runs through them, beside what transformers computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from optkit.kernels.cpu.native import why_not_native
from optkit.kernels.cpu.prompts import PromptPass
from optkit.model.blocks import BlockInputs
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.stages.quantizing.calibration_products import in_cpp
from tests.conftest import TinyModel

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))


def entered(source: Path) -> tuple[Skeleton, BlockInputs]:
    """Return a skeleton with its first block loaded, and five sequences in front of it, two at once."""
    skeleton = Skeleton(Checkpoint(source))
    tokens = torch.randint(0, 90, (5, 37), generator=torch.Generator().manual_seed(0))
    inputs = skeleton.capture_inputs(tokens, "cpu", 2)
    skeleton.load_(skeleton.blocks[0].name, "cpu")
    return skeleton, inputs


@pytest.mark.parametrize(("kind", "known"), [("llama", True), ("qwen2", True), ("gemma", False)])
def test_a_block_in_cpp_is_that_of_transformers(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: str, known: bool
) -> None:
    computed, own = [], PromptPass.hidden
    monkeypatch.setattr(PromptPass, "hidden", lambda *given: computed.append(1) or own(*given))
    skeleton, inputs = entered(tiny_model(kind))
    before, expected = inputs.hidden.clone(), inputs.hidden.clone()
    skeleton.advance_(0, inputs, expected)
    with in_cpp(skeleton, 0, inputs):
        skeleton.advance_(0, inputs, found := before.clone())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs.hidden, before)
    assert len(computed) == (3 if known else 0)


@pytest.mark.parametrize(
    ("architecture", "changed"), [("LlamaForSequenceClassification", {}), ("LlamaForCausalLM", {"is_causal": False})]
)
def test_other_heads_and_attention_are_left_to_the_model(
    tiny_model: TinyModel, tmp_path: Path, architecture: str, changed: dict[str, bool]
) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_model("llama"))
    config.__dict__ |= changed
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)
    skeleton, inputs = entered(tmp_path)
    expected, found = inputs.hidden.clone(), inputs.hidden.clone()
    skeleton.advance_(0, inputs, expected)
    with in_cpp(skeleton, 0, inputs):
        skeleton.advance_(0, inputs, found)
    assert torch.equal(found, expected)


def test_a_mask_is_left_to_the_model(tiny_model: TinyModel) -> None:
    skeleton, inputs = entered(tiny_model("llama"))
    batch = inputs.batches[0]
    hidden, call = inputs.hidden[batch.rows], batch.calls[0]
    mask = torch.ones(37, 37, dtype=torch.bool).tril().triu(-4)[None, None]
    masked = replace(call, keywords={**call.keywords, "attention_mask": mask})
    expected, other = (skeleton.run_block(0, hidden, each) for each in (masked, call))
    given = replace(inputs, batches=(replace(batch, calls=(masked,)),))
    with in_cpp(skeleton, 0, given):
        assert torch.equal(skeleton.run_block(0, hidden, masked), expected)
    assert not torch.allclose(expected, other, atol=1e-3)
