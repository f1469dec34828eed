"""Packed weights split over processes: each reads the share of its heads and columns."""

from pathlib import Path
from typing import Any

import pytest

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.checkpoint_share import CheckpointShare
from optkit.model.shape import TensorInfo
from optkit.session import open_session
from optkit.settings.tensor_parallel import TensorParallel
from optkit.stage import Context, Transform
from optkit.stages.fp8 import Fp8
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.settings.test_tensor_parallel import TOKENS, TWO, shape_of
from tests.support.near import near

PACKED: dict[str, tuple[str, Transform, float]] = {
    "int4": ("llama", Rtn(group_size=32, symmetric=False), 1e-4),  # its embedding is lm_head too
    "fp8": ("qwen2", Fp8(), 0.1),  # each process rounds its inputs of a layer with scales of its own
}


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("packed", PACKED)
def test_packed_weights_are_split_by_whole_groups(packed: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    name, stage, error = PACKED[packed]
    stage.run(tiny_model(name), tmp_path, Context())
    TWO.check(shape_of(tmp_path), "cpu")
    alone: Any = open_session(tmp_path)
    split: Any = open_session(tmp_path, [TWO])
    assert near(split.logits(TOKENS), alone.logits(TOKENS), error)
    if packed == "int4":
        assert split.generate(TOKENS, 6).equal(alone.generate(TOKENS, 6))
    held = [each["weights"] for each in split._ranks.opened]
    assert held == [pytest.approx(TWO.device_bytes(shape_of(tmp_path)), rel=0.1)] * 2
    split.close()


def test_packed_weights_that_cannot_be_split_say_why(tiny_model: TinyModel, tmp_path: Path) -> None:
    Rtn(group_size=64).run(tiny_model("llama"), tmp_path, Context())
    with pytest.raises(StageError, match=r"2 inputs of model\.layers\.\*\.mlp\.down_proj\.weight_scale"):
        TensorParallel(devices=4).check(shape_of(tmp_path), "cpu")
    whole = Checkpoint(tmp_path)
    with pytest.raises(StageError, match=r"down_proj\.weight_scale are no multiple of 4 devices\. .*group_size"):
        CheckpointShare(whole, 0, 4)
    with pytest.raises(StageError, match=r"o_proj\.weight_g_idx says that inputs are grouped in another order\. Each"):
        CheckpointShare(whole, 0, 2)._share_of("model.layers.0.self_attn.o_proj.weight_g_idx", TensorInfo("I32", (64,)))
    scheme = {**whole.config["quantization_config"], "kv_cache_scheme": {"type": "float"}}
    for changed in (scheme, {"quant_method": "gptq"}):
        with pytest.raises(StageError, match=r"^tensor_parallel: packed weights of this format or architecture cannot"):
            TWO.check(shape_of(tmp_path, quantization_config=changed), "cpu")
