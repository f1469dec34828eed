import json
import shutil
from pathlib import Path

import pytest
import torch
from optkit_evals.footprint import Footprint, share_of_zeros
from safetensors.torch import save_file

from optkit.common.own_files import OWN_FILES
from optkit.errors import EvalError, SourceError
from optkit.measure import EvalContext
from optkit.model.checkpoint import Checkpoint
from optkit.model.size_notes import notes_on_size
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.kv_scales import KvScales
from tests.support.bigram_session import BigramSession


def measure(directory: Path) -> dict[str, float]:
    session = BigramSession()
    session.directory = directory
    return {metric.name: metric.value for metric in Footprint().run(session, EvalContext())}


def write(directory: Path, tensors: dict[str, torch.Tensor], **quantization: object) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": "llama"} | ({"quantization_config": quantization} if quantization else {})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_a_float_checkpoint(tiny_model):
    directory = tiny_model("llama")
    found = measure(directory)
    assert found["bits_per_weight"] == 32
    assert "bits_per_quantized_weight" not in found
    assert found["weights_bytes"] == (directory / "model.safetensors").stat().st_size
    assert found["size_bytes"] == sum(path.stat().st_size for path in directory.iterdir())


def test_float_weights_with_a_quantized_cache(tiny_model, tmp_path):
    stage = KvScales(calibration=Calibration(dataset="python-reference", samples=8, sequence_length=16))
    stage.run(tiny_model("llama"), tmp_path, Context())
    found = measure(tmp_path)
    assert found["bits_per_weight"] == 32
    assert "bits_per_quantized_weight" not in found
    before, after = (Checkpoint(each).shape for each in (tiny_model("llama"), tmp_path))
    assert not [*notes_on_size(before, before, after)]


def test_compressed_tensors(tmp_path):
    tensors = {
        "embed.weight": torch.zeros(100, 64, dtype=torch.bfloat16),
        "up.weight_packed": int32(96, 8),
        "up.weight_scale": torch.zeros(96, 2, dtype=torch.bfloat16),
        "up.weight_zero_point": int32(12, 2),
        "up.weight_shape": torch.tensor([96, 64]),
        "up.bias": torch.zeros(96, dtype=torch.bfloat16),
    }
    found = measure(write(tmp_path / "m", tensors, quant_method="compressed-tensors"))
    bits = 96 * 8 * 32 + 96 * 2 * 16 + 12 * 2 * 32 + 2 * 64 + 96 * 16
    weights = 96 * 64 + 96
    assert found["bits_per_quantized_weight"] == pytest.approx(bits / weights)
    assert found["bits_per_weight"] == pytest.approx((bits + 6400 * 16) / (weights + 6400))
    assert 4.5 < found["bits_per_quantized_weight"] < 5.2


def test_widths_that_do_not_fill_their_words_are_counted_by_their_shape(tmp_path):
    tensors = {
        "up.weight_packed": int32(5, 2),
        "up.weight_scale": torch.zeros(5, 1),
        "up.weight_shape": torch.tensor([5, 10]),
    }
    found = measure(write(tmp_path / "m", tensors, quant_method="compressed-tensors"))
    assert found["bits_per_weight"] == pytest.approx((5 * 2 * 32 + 5 * 32 + 128) / 50)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("with_index", [True, False])
def test_gptq(tmp_path, bits, with_index):
    tensors = {
        "up.qweight": int32(64 * bits // 32, 96),
        "up.qzeros": int32(2, 96 * bits // 32),
        "up.scales": torch.zeros(2, 96, dtype=torch.float16),
        "norm.weight": torch.zeros(64, dtype=torch.float16),
    } | ({"up.g_idx": int32(64)} if with_index else {})
    found = measure(write(tmp_path / "m", tensors, quant_method="gptq", bits=bits))
    stored = 64 * 96 * bits + 2 * 96 * bits + 2 * 96 * 16 + (64 * 32 if with_index else 0)
    assert found["bits_per_quantized_weight"] == pytest.approx(stored / (64 * 96))
    assert found["bits_per_weight"] == pytest.approx((stored + 64 * 16) / (64 * 96 + 64))


def test_int8_weights_beside_their_scales(tmp_path):
    tensors = {"up.weight": torch.zeros(32, 64, dtype=torch.int8), "up.weight_scale": torch.zeros(32, 1)}
    found = measure(write(tmp_path / "m", tensors, quant_method="compressed-tensors"))
    assert found["bits_per_quantized_weight"] == pytest.approx((32 * 64 * 8 + 32 * 32) / (32 * 64))


def test_what_is_not_read_when_it_is_opened_does_not_count(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    before = measure(directory)["size_bytes"]
    for name in (*OWN_FILES, "pytorch_model.bin", "model.gguf", ".gitattributes"):
        (directory / name).write_bytes(b"x" * 1000)
    (directory / ".cache").mkdir()
    (directory / ".cache" / "more").write_bytes(b"x" * 1000)
    assert measure(directory)["size_bytes"] == before
    (directory / "chat_template.jinja").write_bytes(b"x" * 1000)
    assert measure(directory)["size_bytes"] == before + 1000


def test_layouts_that_are_not_known(tmp_path):
    unknown = write(tmp_path / "a", {"up.weight": torch.zeros(4, 4, dtype=torch.uint8)}, quant_method="bitsandbytes")
    with pytest.raises(
        EvalError, match="no quantized layer is recognised in a checkpoint of quant_method bitsandbytes"
    ):
        measure(unknown)
    shapeless = write(
        tmp_path / "b",
        {"up.weight_packed": int32(4, 4), "up.weight_scale": torch.zeros(4, 1)},
        quant_method="compressed-tensors",
    )
    with pytest.raises(EvalError, match="up: there is no weight_shape beside weight_packed"):
        measure(shapeless)
    bitless = write(tmp_path / "c", {"up.qweight": int32(4, 4), "up.scales": torch.zeros(1, 4)}, quant_method="gptq")
    with pytest.raises(EvalError, match="neither g_idx nor the bits of quantization_config"):
        measure(bitless)


def test_a_damaged_file(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(SourceError, match="It was cut off or overwritten"):
        measure(directory)


@pytest.mark.parametrize("pruned", [0.1, 0.5, 0.75])
def test_zeros_of_a_pruned_checkpoint_are_said(tmp_path, pruned):
    tensors = {f"model.layers.{index}.up_proj.weight": torch.rand(200, 40) + 0.1 for index in range(2)}
    tensors["embed_tokens.weight"] = torch.zeros(300, 40)
    for index in range(2):
        tensors[f"model.layers.{index}.up_proj.weight"][:, : int(40 * pruned)] = 0
    found = measure(write(tmp_path / "m", tensors))
    assert found.get("zeros") == (pytest.approx(pruned) if pruned > 0.2 else None)
    assert found["bits_per_weight"] == 32


def test_rows_that_are_looked_at_lie_all_over_a_weight(tmp_path):
    weight = torch.ones(1000, 8)
    weight[900:] = 0
    checkpoint = Checkpoint(write(tmp_path / "m", {"model.layers.0.up_proj.weight": weight}))
    assert share_of_zeros(checkpoint) == 0.25
    assert share_of_zeros(Checkpoint(write(tmp_path / "packed", {"up.weight_packed": int32(2, 2)}))) is None
