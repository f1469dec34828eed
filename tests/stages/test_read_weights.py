"""A layer whose weight the model's own code reads stays as it is, and what is written opens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.errors import SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.read_weights import Read
from optkit.session import open_session
from optkit.stage import Context
from optkit.stages.dequantize import Dequantize
from optkit.stages.int8 import Int8
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.opened import transformers_logits
from tests.support.running import run_stage
from tests.zoo.models import TOKENS as ZOO_TOKENS
from tests.zoo.models import plain_logits, save_model

TOKENS = torch.randint(1, 500, (2, 16), generator=torch.Generator().manual_seed(5))
RTN = Rtn(group_size=16, lm_head=True)
BACKED = Rtn(group_size=16, backend="llmcompressor")
"""Libraries write no codes in whole bytes."""
SHARED = ("0", "1", "gate_up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj")
KEPT: dict[str, tuple[Any, dict[str, Read]]] = {
    "mamba": (RTN, {"dt_proj": Read.COMPUTES, "out_proj": Read.OPENS}),
    "mamba2": (RTN, {"out_proj": Read.OPENS}),
    "falcon_mamba": (Int8(), {"dt_proj": Read.COMPUTES}),
    "jamba": (RTN, {"dt_proj": Read.COMPUTES}),
    "zamba2": (Int8(), dict.fromkeys(SHARED, Read.SHARED)),
    "bamba": (RTN, {}),
    "qwen3_5": (RTN, {}),
    "recurrent_gemma": (RTN, {}),
    "falcon": (RTN, {}),
}
CONTEXT = Context(device="cpu", seed=0)


@pytest.mark.parametrize("kind", KEPT)
def test_transformers_opens_what_is_written_and_computes_the_same(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    stage, expected = KEPT[kind]
    source = tiny_model(kind)
    report = stage.run(source, tmp_path, CONTEXT)
    kept = {name.rpartition(".")[2]: why for name, why in report.skipped.items() if why in tuple(Read)}
    assert kept == expected
    written, predicted = Checkpoint(tmp_path), stage.predict(Checkpoint(source).shape, "cpu")[1]
    assert written.shape.tensors == predicted.tensors
    assert kind == "zamba2" or written.config == predicted.config  # the other blocks' names of shared layers
    session = open_session(tmp_path)
    found = session.logits(TOKENS)
    session.close()
    wanted = transformers_logits(tmp_path, TOKENS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("kind", "stage", "message"),
    [
        ("recurrent_gemma", BACKED, r"rtn: none of the 13 .*fp8, int8 or nf4"),
        ("falcon", BACKED, r"rtn: none of the 8 layers .*a class for it.*Use the stage fp8\."),
        ("falcon", Int8(), r"int8: none of the 8 layers .*a class for it.*Use the stage fp8\."),
    ],
)
def test_a_model_whose_every_layer_is_missed_is_refused_and_told_what_works(
    kind: str, stage: Any, message: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(StageError, match=message):
        stage.predict(Checkpoint(tiny_model(kind)).shape, "cpu")


def test_inputs_of_four_dimensions_keep_a_layer_of_latent_attention_out_of_int8(tmp_path: Path) -> None:
    source, target = save_model("youtu", tmp_path / "source"), tmp_path / "target"
    report = run_stage(Int8(), source, target, CONTEXT)
    assert {name.rpartition(".")[2] for name, why in report.skipped.items() if why == Read.FOUR} == {"kv_b_proj"}
    found, wanted = open_session(target).logits(ZOO_TOKENS), plain_logits(target)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_codes_of_more_bits_than_config_json_says_are_refused(tmp_path: Path) -> None:
    run_stage(RTN, save_model("falcon", tmp_path / "model"), tmp_path / "packed", CONTEXT)
    file = tmp_path / "packed" / "model.safetensors"
    stored = load_file(file)
    codes = next(tensor for name, tensor in stored.items() if tensor.dtype == torch.int8 and name.endswith(".weight"))
    codes[0, 0] = -9
    save_file(stored, file)
    with pytest.raises(SourceError, match="codes do not fit the 4 bits that config.json says. See that config.json"):
        run_stage(Dequantize(), tmp_path / "packed", tmp_path / "floats", CONTEXT)
