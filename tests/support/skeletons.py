"""What tests of the skeleton share: tokens, transformers' own model to compare with, changed copies
of a model directory.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton

LENGTH = 24


def some_tokens(rows: int = 5, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(3))


def reference(directory: Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> PreTrainedModel:
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options).eval()


def real(module: nn.Module) -> bool:
    devices = {parameter.device.type for parameter in module.parameters()}
    assert len(devices) == 1
    return devices == {"cpu"}


def run_all_blocks(skeleton: Skeleton, tokens: Tensor, batch_size: int) -> list[Tensor]:
    """Return the output of each block, float [sequences, length, hidden], with one block real at a
    time.
    """
    inputs = skeleton.capture_inputs(tokens, "cpu", batch_size)
    outputs = []
    for index, block in enumerate(skeleton.blocks):
        skeleton.load_(block.name, "cpu")
        assert [real(other.module) for other in skeleton.blocks] == [other is block for other in skeleton.blocks]
        skeleton.advance_(index, inputs)
        skeleton.release_(block.name)
        outputs.append(inputs.hidden.clone())
    return outputs


def logits_of(directory: Path) -> Tensor:
    skeleton = Skeleton(Checkpoint(directory))
    skeleton.load_("", "cpu")
    with torch.no_grad():
        return skeleton.model(some_tokens()).logits
