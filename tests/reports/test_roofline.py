"""From bytes and operations to limits: known numbers, brute force, the table of devices, the
command and its picture.
"""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from optkit_cli.main import main

from optkit.devices import measured as measured_module
from optkit.devices.datasheets import ALIASES, Device
from optkit.devices.roof import Rate, Roof
from optkit.errors import ResourceError, SourceError, UsageError
from optkit.model.shape import ModelShape, TensorInfo
from optkit.reports.roofline import DEVICES, build_report, datasheet, measured_device, roof_generation, to_svg, work_of
from optkit.reports.roofline import models as models_module
from optkit.reports.roofline.forms import parse_form
from optkit.reports.roofline.limits import (
    compute_binds_from,
    decode_limit,
    gain,
    most_sequences,
    pays_until,
    prefill_limit,
)
from optkit.reports.roofline.models import work_of_model
from tests.conftest import TinyModel

SVG = "{http://www.w3.org/2000/svg}"
BF16, INT4 = parse_form("bf16", "bf16"), parse_form("int4g128", "bf16")
LLAMA_LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
    "input_layernorm": (4096,),
    "post_attention_layernorm": (4096,),
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
H200 = Device("H200", 4.23e12, {"bf16": 790e12, "int8": 1500e12}, 141e9, "measured")


def llama_8b() -> ModelShape:
    """Llama-3-8B."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (128256, 4096) for name in ("model.embed_tokens", "lm_head")
    }
    shapes["model.norm.weight"] = (4096,)
    for block in range(32):
        shapes |= {f"model.layers.{block}.{name}.weight": shape for name, shape in LLAMA_LAYER.items()}
    return ModelShape(CONFIG, {name: TensorInfo("BF16", shape) for name, shape in shapes.items()})


def test_llama_3_8b_on_an_h200() -> None:
    """Numbers that were worked out by hand: 8.03 billion weights, of which 0.525 are an embedding;
    int4 keeps lm_head in bf16.
    """
    work = work_of(llama_8b())
    assert work.elements == 8_029_995_008
    assert decode_limit(work, BF16, H200, 1, 0).tokens_per_s == pytest.approx(282, rel=0.002)
    assert decode_limit(work, INT4, H200, 1, 0).tokens_per_s == pytest.approx(889, rel=0.002)
    assert work.cache_bytes(BF16, 1, 512) == 2 * 8 * 128 * 2 * 32 * 512
    limit = prefill_limit(work, BF16, H200, 32, 512)
    blocks = 32 * sum(shape[0] * shape[1] for shape in LLAMA_LAYER.values() if len(shape) == 2)
    assert limit.matrix_flops == 2 * (blocks * 32 * 512 + 128256 * 4096 * 32)
    assert limit.attention_flops == 32 * 32 * 4 * 4096 * 512 * 513 // 2
    assert limit.seconds == pytest.approx((limit.matrix_flops + limit.attention_flops) / 790e12)
    assert limit.bound_by == "compute"


def test_the_side_that_binds() -> None:
    work = work_of(llama_8b())
    assert decode_limit(work, BF16, H200, 1, 512).bound_by == "weights"
    assert decode_limit(work, BF16, H200, 256, 512).bound_by == "KV cache"
    assert decode_limit(work, BF16, replace(H200, rates={"bf16": 1e12}), 1, 512).bound_by == "compute"
    limit = decode_limit(work, parse_form("int8", "bf16"), H200, 2000, 0)
    blocks, head = (limit.matrix_flops - 2 * 128256 * 4096 * 2000), 2 * 128256 * 4096 * 2000
    assert limit.compute_s == pytest.approx(blocks / 1500e12 + (head + limit.attention_flops) / 790e12)


def test_batches_at_which_a_form_stops_paying_are_those_of_a_search_and_of_the_formula() -> None:
    work = work_of(llama_8b())
    for context in (0, 64, 512, 4096):
        found = pays_until(work, INT4, BF16, H200, context)
        least = next((batch for batch in range(1, 3000) if gain(work, INT4, BF16, H200, batch, context) < 1.1), None)
        assert found == least
        bound = next(
            (batch for batch in range(1, 3000) if decode_limit(work, INT4, H200, batch, context).bound_by == "compute"),
            None,
        )
        assert compute_binds_from(work, INT4, H200, context) == bound
    one, two = (decode_limit(work, BF16, H200, batch, 64) for batch in (1, 2))
    operations, cache = two.compute_s - one.compute_s, one.cache_bytes / H200.bandwidth
    fixed = one.weight_bytes / H200.bandwidth
    assert compute_binds_from(work, BF16, H200, 64) == pytest.approx(fixed / (operations - cache), rel=0.01)
    assert compute_binds_from(work, BF16, H200, 4096) is None


def test_what_fits_in_memory() -> None:
    work = work_of(llama_8b())
    cache = work.cache_bytes(BF16, 1, 512)
    assert most_sequences(work, BF16, H200, 512) == int((141e9 - llama_8b().size_bytes) // cache)
    assert most_sequences(work, BF16, datasheet("t4"), 512) == 0


def test_the_table_of_devices_is_plausible() -> None:
    for device in DEVICES.values():
        assert device.source
        assert 0.2e12 < device.bandwidth < 10e12
        assert (
            device.rates["fp32"] <= device.rates[device.wide] <= device.rates["int8"] <= 4 * device.rates[device.wide]
        )
    assert set(ALIASES.values()) <= set(DEVICES)
    assert datasheet("A100") is DEVICES["a100-80gb"]
    assert datasheet("t4").wide == "fp16"
    with pytest.raises(
        UsageError,
        match=r"--device: 'h20' is no device here and none of the table\. cpu, cuda and cuda:N are "
        r"measured\. Did you mean 'h200'",
    ):
        datasheet("h20")


def test_forms_that_a_device_does_not_compute_in(tiny_model: TinyModel) -> None:
    work = work_of_model(str(tiny_model("llama")))
    report = build_report("m", work, datasheet("a100"), batches=(1,), prompt=8)
    assert [form.name for form in report.forms] == ["bf16", "int8", "int4g128"]
    report = build_report("m", work, datasheet("t4"), batches=(1,), prompt=8, forms=("bf16", "fp8", "stored"))
    assert report.notes == (
        "NVIDIA T4 has no rate for bf16: that of fp16 is taken",
        "NVIDIA T4 has no rate for fp8: that of fp16 is taken",
    )
    assert report.reference == "fp16"


def test_the_command_prints_draws_and_needs_no_torch(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["roofline", str(tiny_model("llama")), "--device", "h200", "--batch", "8,1", "--prompt", "64"]
    assert main([*words, "--plot", str(tmp_path / "limits.svg")]) == 0
    printed = capsys.readouterr().out
    assert "0.143 million weights on NVIDIA H200 SXM" in printed
    assert "below 1.1x bf16 from" in printed
    root = ElementTree.parse(tmp_path / "limits.svg").getroot()
    titles = [each.text for each in root.iter(f"{SVG}title")]
    assert len(titles) == 2 * 4 * 2
    assert all(title and "bound by" in title for title in titles)
    assert main([*words, "--json", "--bandwidth", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bandwidth"] == 1e12
    assert [cell["batch"] for cell in report["forms"][0]["decode"]] == [1, 8]
    code = f"import sys; from optkit_cli.main import main; main({words!r}); assert 'torch' not in sys.modules, 'torch'"
    root_of_project = Path(__file__).parents[2]
    path = ":".join(str(root_of_project / part) for part in ("", "cli", "evals"))
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)


def test_mistakes_on_the_command_line(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_model("llama"))
    for words, said in (
        (["--device", "h200", "--batch", "1,x"], "'1,x' is no list of numbers above 0. Write it as 1,8,32."),
        (["--device", "h200", "--plot", "a.pdf"], "'a.pdf' does not end in .svg or .png."),
        (["--device", "cpu", "--forms", "int5"], "'int5' is no form of weights"),  # nothing is measured
        (["--device", "cuda:99"], "use cpu, or the name of a device that is not here, e.g. h200"),
    ):
        assert main(["roofline", model, *words]) == 2
        assert said.lower() in capsys.readouterr().err.lower()
    monkeypatch.setattr(
        models_module,
        "shape_of_model",
        lambda _: ModelShape({"architectures": ["BertModel"], "model_type": "bert"}, {}),
    )
    with pytest.raises(
        SourceError, match=r"encoder: an encoder decodes nothing, and its limits are not counted\. Name a causal"
    ):
        work_of_model("encoder")
    monkeypatch.undo()
    (tmp_path / "model.onnx").touch()
    with pytest.raises(
        SourceError, match=r"the weights are in ONNX, whose work is not counted\. .* Name the checkpoint"
    ):
        work_of_model(str(tmp_path))


def test_a_png_is_drawn_by_cairosvg(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["roofline", str(tiny_model("llama")), "--device", "l4", "--plot", str(tmp_path / "limits.png")]
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    assert main(words) == 1
    assert "the package `cairosvg` is not installed. Run: pip install 'cairosvg'" in capsys.readouterr().err
    drawn: list[str] = []
    fake = SimpleNamespace(svg2png=lambda bytestring, write_to, scale: drawn.append(write_to))
    monkeypatch.setitem(sys.modules, "cairosvg", fake)
    assert main(words) == 0
    assert drawn == [str(tmp_path / "limits.png")]


def test_a_quantized_model_is_shown_as_it_is_stored(tiny_model: TinyModel, tmp_path: Path) -> None:
    tensors = dict(llama_8b().tensors)
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        tensors[f"{module}.weight_packed"] = TensorInfo("I32", (outputs, inputs // 8))
        tensors[f"{module}.weight_scale"] = TensorInfo("BF16", (outputs, inputs // 128))
    group = {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 128}}
    config = {
        **CONFIG,
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}},
    }
    work = work_of(ModelShape(config, tensors))
    assert work.elements == work_of(llama_8b()).elements
    stored = parse_form("stored", "bf16")
    assert work.stored_bytes(stored) == sum(info.size_bytes for info in tensors.values())
    assert [form.name for form in build_report("m", work, H200, batches=(1,), prompt=8).forms][-1] == "stored"


def test_safetensors_headers_are_enough(tmp_path: Path) -> None:
    shape, header, end = llama_8b(), {}, 0
    for name, info in shape.tensors.items():
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + info.size_bytes]}
        end += info.size_bytes
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert work_of_model(str(tmp_path)) == work_of(shape)


def test_a_device_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Rate(value=2e9, low=1e9, high=2.1e9, repeats=5)
    calls: list[str] = []

    def measure(device: str, _progress: object) -> Roof:
        calls.append(device)
        return Roof(
            reading=rate,
            copying=rate.model_copy(update={"value": 3e9, "low": 3e9, "high": 3e9}),
            products={"fp32": rate},
        )

    monkeypatch.setattr(measured_module, "measure_roof", measure)
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path))
    device, roof = measured_device("cpu")
    assert (device.bandwidth, device.rates) == (3e9, {"fp32": 2e9})
    assert device.source.startswith("measured here with torch ")
    assert roof.unsteady == "reading by 55%, fp32 by 55%"
    assert measured_device("cpu")[1] == roof
    assert calls == ["cpu"]
    assert roof_generation("cpu") == 0
    measured_device("cpu", again=True)
    assert roof_generation("cpu") == 1
    next((tmp_path / "roofs").iterdir()).write_text("{}")
    measured_device("cpu")
    assert calls == ["cpu"] * 3

    def fail(_device: str, _progress: object) -> Roof:
        raise MemoryError("no memory")

    monkeypatch.setattr(measured_module, "measure_roof", fail)
    with pytest.raises(
        ResourceError, match=r"cpu: memory ran out while the device was measured\. no memory\. Close what else uses it"
    ):
        measured_device("cpu", again=True)


def test_a_cpu_is_really_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "WARM_UP_S": 0.0,
        "LIMIT_S": 0.0,
        "CPU_BUFFER": 1 << 22,
        "SIDES": {"cpu": (64,)},
        "GROUP_S": {"cpu": 1e-4},
    }.items():
        monkeypatch.setattr(measured_module, name, value)
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path))
    monkeypatch.setattr(measured_module, "last_cache_bytes", lambda: 0)
    device, roof = measured_device("cpu")
    assert {"fp32", "bf16"} <= set(device.rates)
    for rate in (roof.reading, roof.copying, *roof.products.values()):
        assert 1e7 < rate.low <= rate.value <= rate.high < 1e14
        assert rate.repeats == measured_module.FEWEST_REPEATS


def test_buffers_are_larger_than_the_last_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1024K", "32M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert measured_module.last_cache_bytes(tmp_path) == 32 << 20
    assert measured_module.last_cache_bytes(tmp_path / "none") == 0
    assert measured_module.buffer_bytes("cpu") >= min(
        measured_module.CPU_BUFFER, 4 * measured_module.last_cache_bytes()
    )


@pytest.mark.gpu
def test_a_gpu_is_really_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path))
    device, roof = measured_device("cuda")
    assert 0.1e12 < device.bandwidth < 20e12
    assert {"fp32", "fp16"} <= set(device.rates)
    assert all(rate.value > 1e12 for rate in roof.products.values())


def test_the_picture_names_its_model_whatever_it_is_called(tiny_model: TinyModel) -> None:
    work = work_of_model(str(tiny_model("llama")))
    svg = to_svg(build_report("a & <b>", work, datasheet("h100"), batches=(1,), prompt=8, forms=("int8",)))
    assert "a &amp; &lt;b&gt;" in svg
    ElementTree.fromstring(svg)
