import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from optkit.errors import SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.kv_scales import split_kv_scales
from optkit.session import open_session
from optkit.settings.compile import Compile
from optkit.settings.kv_cache import KvCache
from optkit.source.calibration import Calibration
from optkit.stage import Context, Format, Report
from optkit.stages.kv_scales import KvScales
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.changes import change_json, changing
from tests.support.predictions import predicted
from tests.support.running import run_stage

TEXT = Calibration(dataset="python-reference", samples=4, sequence_length=32)
TOKENS = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(1))
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def scaled(source: Path, target: Path, may_link: bool = False) -> Report:
    return run_stage(KvScales(calibration=TEXT, batch_size=3), source, target, Context(may_link=may_link))


def packed(source: Path, target: Path, **fields: Any) -> Path:
    run_stage(Rtn(group_size=32, **fields), source, target)
    return target


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_the_scales_are_the_largest_keys_and_values(
    tiny_model: TinyModel, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = scaled(tiny_model(kind), tmp_path / "scaled")
    seen: list[tuple[float, float]] = []
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32)
    real = DynamicLayer.update

    def update(layer: Any, keys: Tensor, values: Tensor, *more: Any, **most: Any) -> Any:
        seen.append((float(keys.abs().max()), float(values.abs().max())))
        return real(layer, keys, values, *more, **most)

    monkeypatch.setattr(DynamicLayer, "update", update)
    plain = DynamicCache()  # no sliding layers, whose update is another
    with torch.no_grad():
        model(TEXT.tokens(tiny_model(kind), None), past_key_values=plain, use_cache=True)
    written = load_file(tmp_path / "scaled" / "model-00002-of-00002.safetensors")
    for index, (key, value) in enumerate(seen):
        assert float(written[f"model.layers.{index}.self_attn.k_scale"]) == pytest.approx(key / 448, rel=1e-4)
        assert float(written[f"model.layers.{index}.self_attn.v_scale"]) == pytest.approx(value / 448, rel=1e-4)
    assert len(written) == 2 * len(seen)
    assert report.changed == len(seen)
    assert report.calibrated_on == (TEXT.identity(),)


@pytest.mark.parametrize("may_link", [True, False])
def test_weights_are_linked_where_they_may_be_and_nothing_is_lost(
    tiny_model: TinyModel, tmp_path: Path, may_link: bool
) -> None:
    source, target = shutil.copytree(tiny_model("llama"), tmp_path / "source"), tmp_path / "scaled"
    scaled(source, target, may_link=may_link)
    linked = target / "model-00001-of-00002.safetensors"
    assert linked.samefile(source / "model.safetensors") == may_link
    assert linked.read_bytes() == (source / "model.safetensors").read_bytes()
    assert not (target / "model.safetensors").exists()  # transformers and vLLM would read it instead of the index
    assert {path.name for path in source.iterdir()} - {"model.safetensors"} <= {path.name for path in target.iterdir()}
    before, after = Checkpoint(source), Checkpoint(target)
    assert set(after.tensors) - set(before.tensors) == {
        f"model.layers.{i}.self_attn.{leaf}" for i in range(3) for leaf in ("k_scale", "v_scale")
    }
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == after.shape.size_bytes
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] == SCHEME


def test_compressed_tensors_reads_its_config(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for source in (tiny_model("llama"), packed(tiny_model("llama"), tmp_path / "packed")):
        target = tmp_path / f"scaled-{source.name}"
        scaled(source, target)
        read = quantization.QuantizationConfig.model_validate(
            json.loads((target / "config.json").read_text())["quantization_config"]
        )
        assert (read.kv_cache_scheme.num_bits, read.kv_cache_scheme.type, read.kv_cache_scheme.dynamic) == (
            8,
            "float",
            False,
        )


@pytest.mark.parametrize("weights", ["float", "packed"])
def test_optkit_opens_it_with_a_float8_cache(tiny_model: TinyModel, tmp_path: Path, weights: str) -> None:
    source = tiny_model("qwen2") if weights == "float" else packed(tiny_model("qwen2"), tmp_path / "packed")
    scaled(source, tmp_path / "scaled")
    session = open_session(tmp_path / "scaled")
    assert session.notes[-1] == "kv cache: float8, with the scales of the checkpoint"
    plain, coded = open_session(source).logits(TOKENS), session.logits(TOKENS)
    assert 1e-3 < float((coded - plain).norm() / plain.norm()) < 0.3
    explicit = open_session(tmp_path / "scaled", [KvCache(dtype="fp8")])
    assert torch.equal(explicit.logits(TOKENS), coded)
    assert not any("kv cache" in note for note in explicit.notes)
    finer = open_session(tmp_path / "scaled", [KvCache(dtype="int8")]).logits(TOKENS)
    assert (finer - plain).norm() < (coded - plain).norm()
    with pytest.raises(StageError, match="a compiled step cannot use a KV cache of codes"):
        open_session(tmp_path / "scaled", [Compile(devices=("cpu",))])


@pytest.mark.parametrize("weights", ["float", "packed"])
def test_the_prediction_is_what_comes_out(tiny_model: TinyModel, tmp_path: Path, weights: str) -> None:
    source = tiny_model("llama") if weights == "float" else packed(tiny_model("mixtral"), tmp_path / "packed")
    scaled(source, tmp_path / "scaled")
    predicted(KvScales(calibration=TEXT), source, tmp_path / "scaled")
    assert KvScales.accepts == {Format.CHECKPOINT, Format.QUANTIZED}
    assert KvScales.produces is Format.QUANTIZED


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mixtral", "fails: its experts are floats. Put the stage behind one that quantizes the experts."),
        ("opt", "fails: its config.json has no num_key_value_heads. Take the stage out."),
    ],
)
def test_what_transformers_would_not_open_is_refused(
    kind: str, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(StageError) as caught:
        scaled(tiny_model(kind), tmp_path / "scaled")
    start = f"kv_scales: transformers would not open {kind} with scales for its KV cache. "
    assert str(caught.value) == start + f"compressed-tensors, which reads them, {message}"


def test_what_vllm_would_not_read_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=r"^kv_scales: the weights are stored in the format gptq\. .*Set format: compressed-tensors in"
    ):
        scaled(packed(tiny_model("llama"), tmp_path / "gptq", format="gptq"), tmp_path / "a")
    with pytest.raises(StageError, match=r"^kv_scales: no layer has a k_proj or qkv_proj\. "):
        scaled(tiny_model("gpt2"), tmp_path / "b")
    scaled(tiny_model("llama"), tmp_path / "once")
    with pytest.raises(
        StageError, match=r"^kv_scales: the model has scales for its KV cache already\. Take the stage out"
    ):
        scaled(tmp_path / "once", tmp_path / "twice")


def test_keys_that_are_not_numbers_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    with changing(source) as tensors:
        tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
    with pytest.raises(
        StageError,
        match=r"^kv_scales: model\.layers\.1\.self_attn: its keys or values are 0, NaN or Inf on the calibration text",
    ):
        scaled(source, tmp_path / "scaled")


def test_a_scale_that_is_missing_is_an_error(tiny_model: TinyModel, tmp_path: Path) -> None:
    scaled(tiny_model("llama"), tmp_path / "scaled")
    part = tmp_path / "scaled" / "model-00002-of-00002.safetensors"
    tensors = load_file(part)
    del tensors["model.layers.1.self_attn.v_scale"]
    save_file(tensors, part)
    index = tmp_path / "scaled" / "model.safetensors.index.json"
    change_json(index, lambda said: said["weight_map"].pop("model.layers.1.self_attn.v_scale"))
    with pytest.raises(
        SourceError,
        match=r"1 scales of the KV cache are missing: model\.layers\.1\.self_attn\.v_scale\. kv_cache_scheme",
    ):
        split_kv_scales(Checkpoint(tmp_path / "scaled"))
