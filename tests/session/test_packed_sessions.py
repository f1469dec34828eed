"""Sessions of packed weights beside the float model of the same values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.errors import MissingPackageError, SourceError
from optkit.kernels.cpu.coded_linear import CodedLinear
from optkit.kernels.embedding_bag_linear import BagLinear
from optkit.kernels.packed_linear import PackedLinear
from optkit.session import open_session
from tests.conftest import TinyModel
from tests.support.changes import Change, changed_copy, without
from tests.support.crossed import crossed
from tests.support.near import near
from tests.support.opened import KINDS, prompt, reference
from tests.support.packed_models import fp8, rewritten, save_packed


@pytest.mark.parametrize(("kind", "method"), crossed(KINDS, ["compressed-tensors", "gptq"]))
def test_packed_weights_give_the_logits_of_the_float_model(
    kind: str, method: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    save_packed(tiny_model(kind), tmp_path / "packed", tmp_path / "plain", method=method)
    session, tokens = open_session(tmp_path / "packed"), prompt()
    with torch.no_grad():
        assert near(session.logits(tokens), reference(tmp_path / "plain")(tokens).logits, 1e-4)
    assert torch.equal(session.generate(tokens, 5), open_session(tmp_path / "plain").generate(tokens, 5))
    packed = [
        module for module in session.model.modules() if isinstance(module, (BagLinear, CodedLinear, PackedLinear))
    ]
    assert session.notes[0].split(" use ")[0] == f"int4: {len(packed)} of {len(packed)} layers"
    assert session.decode_bytes(1, 8) < 0.7 * open_session(tmp_path / "plain").decode_bytes(1, 8)


@pytest.mark.parametrize(
    ("bits", "form"),
    crossed(
        [2, 3, 4, 5, 6, 8],
        {
            f"{method} {'symmetric' if symmetric else 'asymmetric'}{' in order' * activation_order}": {
                "method": method,
                "symmetric": symmetric,
                "activation_order": activation_order,
            }
            for symmetric, activation_order in [(True, False), (False, False), (False, True)]
            for method in ("compressed-tensors", "gptq")
        },
    ),
)
def test_all_grids(bits: int, form: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain", bits=bits, group_size=64, **form)
    session, tokens = open_session(tmp_path / "packed"), prompt()
    with torch.no_grad():
        assert near(session.logits(tokens), reference(tmp_path / "plain")(tokens).logits, 1e-4)
    assert session.notes[0].startswith(f"int{bits}: 21 of 21 layers")


def test_tied_weights_are_held_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    model = open_session(tmp_path / "packed").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(parameter.is_meta for parameter in (*model.parameters(), *model.buffers()))


def test_an_unused_bias_of_autogptq_is_added(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain", method="gptq")
    name = "model.layers.0.mlp.up_proj.bias"
    with_bias = changed_copy(tmp_path / "packed", tmp_path, lambda held: held | {name: torch.zeros(128)})
    assert torch.equal(open_session(with_bias).logits(prompt()), open_session(tmp_path / "packed").logits(prompt()))


def test_packed_weights_that_do_not_fit_the_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    layer = "model.layers.0.mlp.up_proj"

    def broken(name: str, change: Change) -> Path:
        return changed_copy(tmp_path / "packed", tmp_path / name, change)

    with pytest.raises(SourceError, match=r"up_proj: there is no weight_scale"):
        open_session(broken("a", without(f"{layer}.weight_scale")))
    with pytest.raises(SourceError, match=r"model\.norm\.weight"):
        open_session(broken("b", without("model.norm.weight")))
    with pytest.raises(SourceError, match=r"are no weight \[128, 64\] of 2 to 6 or 8 bits"):
        words = torch.zeros(128, 5, dtype=torch.int32)
        open_session(broken("c", lambda held: held | {f"{layer}.weight_packed": words}))
    with pytest.raises(
        SourceError, match=r"model.other is quantized, and LlamaForCausalLM has no linear layer of that name"
    ):
        open_session(broken("d", lambda held: held | {"model.other.weight_packed": words[:1, :1]}))
    with pytest.raises(SourceError, match="no layer is quantized. The quantization_config says compressed-tensors"):
        told = json.loads((tmp_path / "packed" / "config.json").read_text())
        open_session(changed_copy(tmp_path / "plain", tmp_path / "e", **told))


def test_what_optkit_does_not_read_itself_is_left_to_transformers(tiny_model: TinyModel, tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}
    with pytest.raises((MissingPackageError, SourceError), match="gptqmodel|cannot open it"):
        open_session(changed_copy(tiny_model("llama"), tmp_path, quantization_config=awq))


def test_what_transformers_does_not_open_says_how_to_measure_it(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path / "packed", fp8, quant_method="modelopt", quant_algo="FP8")
    with pytest.raises(SourceError, match=r"does not open weights packed by modelopt\. .*Run a recipe of `dequantize`"):
        open_session(source)
