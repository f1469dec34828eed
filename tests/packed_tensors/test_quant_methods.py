"""Which checkpoints optkit opens with layers of its own, and which group of a config each of their
layers has.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.algorithms.packing import unpack_compressed_tensors
from optkit.errors import SourceError
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.stages.fp8 import Fp8
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.near import near
from tests.support.packed_models import save_packed
from tests.support.running import run_stage


def checkpoint(directory: Path, **quantization: Any) -> Checkpoint:
    """Return a checkpoint of one packed layer of each format, under a given `quantization_config`."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    held = {
        "a.weight_packed": torch.zeros(8, 4, dtype=torch.int32),
        "a.weight_scale": torch.ones(8, 1),
        "a.weight_shape": torch.tensor([8, 32]),
        "b.qweight": torch.zeros(4, 8, dtype=torch.int32),
    }
    save_file(held, directory / "model.safetensors")
    return Checkpoint(directory)


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 4}}},
}


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        (PACKED, {"a": (8, 32)}),
        ({**PACKED, "format": "nvfp4-of-another-day"}, None),
        ({**PACKED, "config_groups": {"g": {"input_activations": {"num_bits": 8}}}}, None),
        ({**PACKED, "config_groups": {"g": {"output_activations": {"num_bits": 8}}}}, None),
        ({**PACKED, "config_groups": {}}, None),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 8}}, None),
        ({**PACKED, "transform_config": {"config_groups": {}}}, None),
        ({"quant_method": "gptq", "bits": 4}, {"b": (8, 32)}),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, None),
        ({"quant_method": "hqq", "bits": 4}, None),
    ],
)
def test_what_optkit_does_not_read_itself_is_left_to_transformers(
    quantization: dict[str, Any], found: dict[str, tuple[int, int]] | None, tmp_path: Path
) -> None:
    layers = quantized_layers(checkpoint(tmp_path / "m", **quantization))
    shapes = None if layers is None else {name: layer.shape for name, layer in layers.items()}
    assert shapes == found


def test_float_weights_have_no_layers_of_ours(tiny_model: TinyModel) -> None:
    assert quantized_layers(Checkpoint(tiny_model("llama"))) is None


@pytest.mark.parametrize("targets", [["a"], ["re:.*a$"], ["Linear"], None])
def test_a_layer_is_of_the_group_that_names_it_best(targets: list[str] | None, tmp_path: Path) -> None:
    groups = {
        "other": {"targets": ["re:^b"], "tag": 0},
        "all": {"targets": targets, "tag": 1} if targets else {"tag": 1},
    }
    if targets == ["a"]:
        groups = {"class": {"targets": ["Linear"], "tag": 0}, "pattern": {"targets": ["re:a"], "tag": 0}, **groups}
    layers = quantized_layers(checkpoint(tmp_path / "m", **{**PACKED, "config_groups": groups}))
    assert layers is not None
    assert layers["a"].scheme["tag"] == 1  # type: ignore[attr-defined]


def test_a_layer_that_no_group_names(tmp_path: Path) -> None:
    groups = {"g": {"targets": ["re:.*mlp.*"]}}
    with pytest.raises(
        SourceError, match=r"m: a: it is quantized and no group of config_groups names it.*belong together"
    ):
        quantized_layers(checkpoint(tmp_path / "m", **{**PACKED, "config_groups": groups}))


def test_groups_of_different_bits_in_one_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Half of the layers of a 4-bit model are taken from its 8-bit sister, each half under a group
    of its own.
    """
    source = tiny_model("llama")
    directories = {bits: tmp_path / str(bits) for bits in (4, 8)}
    for bits, directory in directories.items():
        save_packed(source, directory, tmp_path / f"plain{bits}", bits=bits)
    for kind in ("", "plain"):
        four, eight = (load_file(tmp_path / f"{kind}{bits}" / "model.safetensors") for bits in (4, 8))
        mixed = {name: (eight if ".mlp." in name else four)[name] for name in four}
        save_file(mixed, tmp_path / f"{kind}4" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directories[4] / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    config["quantization_config"]["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": weights},
        "group_1": {"targets": ["re:.*mlp.*"], "weights": {**weights, "num_bits": 8}},
    }
    (directories[4] / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(5, 30)[None]
    session = open_session(directories[4])
    assert near(session.logits(tokens), open_session(tmp_path / "plain4").logits(tokens), 1e-4)
    assert {note.split(" layers")[0] for note in session.notes if " layers " in note} == {
        "int4: 12 of 21",
        "int8: 9 of 21",
    }


def test_formats_of_different_kinds_in_one_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Feed-forward layers in 8-bit floats, attention in 4-bit integers: each is opened by the class
    of its own group.
    """
    source = tiny_model("llama")
    stages = {
        "float": Fp8(activations="none", include=("*.mlp.*",)),
        "packed": Rtn(group_size=32, include=("*.self_attn.*",)),
    }
    tensors = load_file(source / "model.safetensors")
    plain, groups = dict(tensors), {}
    for name, stage in stages.items():
        run_stage(stage, source, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        groups[name] = {**group, "targets": [f"re:.*{'mlp' if name == 'float' else 'self_attn'}.*"]}
        for tensor, stored in load_file(tmp_path / name / "model.safetensors").items():
            if tensor not in plain or stored.dtype != plain[tensor].dtype:
                tensors[tensor] = stored
    for layer in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
        del tensors[f"{layer}.weight"]
        parts = {leaf: tensors[f"{layer}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_shape")}
        plain[f"{layer}.weight"] = unpack_compressed_tensors(parts, 4).dequantize()
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            plain[name] = tensor.float() * tensors[name.replace(".weight", ".weight_scale")]
    config["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups}
    for directory, held in (("mixed", tensors), ("plain", plain)):
        shutil.copytree(source, tmp_path / directory)
        save_file(held, tmp_path / directory / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(config))
    session, tokens = open_session(tmp_path / "mixed"), torch.arange(5, 30)[None]
    assert near(session.logits(tokens), open_session(tmp_path / "plain").logits(tokens), 1e-4)
    assert sorted(note.split(" layers")[0] for note in session.notes if " layers " in note) == [
        "fp8: 9 of 21",
        "int4: 12 of 21",
    ]
