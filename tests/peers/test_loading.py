"""The same packed directory, opened by optkit and by transformers with compressed-tensors: the same
model.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from optkit.kernels.cpu.native import exact_products
from optkit.session import open_session
from tests.conftest import TinyModel
from tests.support.packed_models import save_packed

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("bits", "symmetric", "group_size"), [(4, True, 32), (4, False, 64), (8, True, 64), (3, False, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_gives_the_same_logits(
    kind: str, bits: int, symmetric: bool, group_size: int, dtype: torch.dtype, tiny_model: TinyModel, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    grid = {"bits": bits, "symmetric": symmetric, "group_size": group_size}
    save_packed(tiny_model(kind), tmp_path / "packed", tmp_path / "plain", dtype=dtype, **grid)  # type: ignore[arg-type]
    tokens = torch.randint(1, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=dtype).eval()
    with torch.no_grad(), exact_products():
        ours = open_session(tmp_path / "packed").logits(tokens)
        theirs = peer(tokens).logits.float()
    apart = float((ours - theirs).norm() / theirs.norm())
    assert apart < (1e-5 if dtype == torch.float32 else 0.03)
