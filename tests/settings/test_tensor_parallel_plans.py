"""Plans of transformers that would compute something else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from optkit.errors import StageError
from optkit.model.shape import ModelShape, TensorInfo
from optkit.settings.tensor_parallel import TensorParallel
from tests.zoo.configs import kinds, tiny_config


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma3", "splits its embedding"),
        ("paligemma", "splits its embedding"),
        ("aya_vision", "splits its embedding"),
        ("gemma3n_text", "its logits are others"),
        ("gemma3_text", ""),
        ("llava", ""),
        ("qwen2_vl", ""),
    ],
)
def test_models_that_transformers_splits_wrong(kind: str, why: str) -> None:
    config = tiny_config(kind, architectures=[kinds()[kind]]).to_dict()
    with pytest.raises(StageError, match=f"cannot be split. .*{why}.*or use offload") if why else nullcontext():
        TensorParallel(devices=2).check(ModelShape(config, {"a.weight": TensorInfo("F32", (8, 8))}), "cpu")
