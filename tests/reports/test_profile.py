"""`optkit profile`: kinds of kernels, idle time, advice, and traces of tiny models."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optkit_cli.main import main
from optkit_cli.output import plain_text
from optkit_cli.profile_view import profile_view
from torch.autograd import DeviceType

from optkit.errors import EvalError, UsageError
from optkit.progress import SilentProgress
from optkit.reports.profiling import ProfileReport, profile_model
from optkit.reports.profiling import run as run_module
from optkit.reports.profiling import torch_trace as torch_trace_module
from optkit.reports.profiling.advice import Circumstances
from optkit.reports.profiling.kinds import kind_of
from optkit.reports.profiling.onnx_trace import trace_onnx_phases
from optkit.reports.profiling.run import circumstances
from optkit.reports.profiling.torch_trace import covered
from optkit.settings.compile import Compile
from optkit.settings.cuda_graphs import CudaGraphs
from tests.conftest import TinyModel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::_weight_int4pack_mm", "matmul"),
        ("quantized::embedding_bag_4bit_rowwise_offsets", "matmul"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", "matmul"),
        ("void gemmSN_TN_kernel<float, 128>", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matmul"),
        ("void at::native::tinygemm_m16n8k16_chunk_kernel<...>", "matmul"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("GroupQueryAttention", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm"),
        ("SkipSimplifiedLayerNormalization", "norm"),
        ("aten::native_layer_norm", "norm"),
        ("triton_poi_fused_mul_silu_3", "elementwise"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
            "elementwise",
        ),
        ("aten::mul", "elementwise"),
        ("QuickGelu", "elementwise"),
        ("RotaryEmbedding", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "copies"),
        ("aten::cat", "copies"),
        ("GatherBlockQuantized", "copies"),
        ("Torch-Compiled Region: 0/0", "compiled"),
        ("aten::as_strided", "other"),
        ("aten::transpose", "other"),
        ("optkit_cpu::packed_linear", "matmul"),
        ("linear", "matmul"),
        ("attend", "attention"),
        ("something_else", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_union_of_intervals() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_kernels_are_read_and_ranges_are_not() -> None:
    def event(
        name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA, marked: bool = False
    ) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(
            name=name, device_type=device, time_range=span, is_user_annotation=marked, self_cpu_time_total=7.0
        )

    events = [
        event("gemm", 0, 10),
        event("gemm", 5, 15),
        event("Memcpy HtoD", 30, 31),
        event("decode 1", 0, 100),
        event("mine", 0, 100, marked=True),
        event("aten::mm", 0, 50, DeviceType.CPU),
    ]
    found = torch_trace_module._read(SimpleNamespace(events=lambda: events), 1.0, DeviceType.CUDA)
    assert found.busy_s == pytest.approx(16e-6)
    assert [(line.name, line.kind, line.calls) for line in found.lines] == [
        ("gemm", "matmul", 2),
        ("Memcpy HtoD", "copies", 1),
    ]
    assert found.lines[0].seconds == pytest.approx(20e-6)
    of_cpu = torch_trace_module._read(SimpleNamespace(events=lambda: events), 1.0, DeviceType.CPU)
    assert [line.name for line in of_cpu.lines] == ["aten::mm"]
    assert of_cpu.busy_s == pytest.approx(7e-6)


def test_every_kernel_of_our_own_has_a_kind() -> None:
    sources = (Path(__file__).parents[2] / "optkit" / "kernels" / "cuda").glob("*.cu")
    names = {
        name
        for source in sources
        for name in re.findall(r"__global__ void[^;{]*?\b(\w+)\([^()]*\) \{", source.read_text())
    }
    assert not [name for name in names if kind_of(name) == "other"]


def test_a_tiny_model_is_traced(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "profile",
        str(tiny_model("llama")),
        "--prompt",
        "16",
        "--new-tokens",
        "4",
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    assert main([*words, "--json", "--quiet"]) == 0
    report = ProfileReport.model_validate_json(capsys.readouterr().out)
    assert [(each.name, each.steps) for each in report.phases] == [("prefill", 1), ("decode", 3)]
    for each in report.phases:
        assert each.kinds["matmul"] > 0
        assert each.whole_s == pytest.approx(each.traced_s, rel=0.01)
        counts = {line.name: line.calls for line in each.top}
        # 3 blocks of 7 layers; lm_head of a prompt is a bmm
        assert counts["aten::mm"] in (21 * each.steps, 22 * each.steps)
        names = {
            event["name"]
            for event in json.loads((tmp_path / "out" / each.trace).read_text())["traceEvents"]
            if "name" in event
        }
        assert {"aten::mm", "prefill" if each.name == "prefill" else "decode 3"} <= names
    shown = plain_text(*profile_view(report, tmp_path))
    assert "prefill: " in shown
    assert "prefill.trace.json, decode.trace.json" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


def test_an_onnx_model_is_traced_by_onnx_runtime(tiny_onnx: Callable[[str, str], Path], tmp_path: Path) -> None:
    report = profile_model(tiny_onnx("llama", "int4"), tmp_path / "out", prompt=8, new_tokens=3, device="cpu")
    assert report.engine == "onnxruntime"
    decode = report.phases[1]
    products = {line.name: line.calls for line in decode.top if line.kind == "matmul"}
    assert products["MatMulNBits"] >= 2 * 3
    assert decode.share("attention") > 0
    events = json.loads((tmp_path / "out" / "decode.trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "model_run" for event in events) == 2


@pytest.mark.parametrize(
    ("device", "elsewhere", "said"),
    [
        ("cuda", False, "an ONNX model cannot be profiled on a GPU. ONNX Runtime's profile holds the launches"),
        ("cpu", True, "ONNX Runtime GenAI does not say where its time goes. Take `engine` out of onnx_provider"),
    ],
)
def test_onnx_models_that_cannot_be_traced(device: str, elsewhere: bool, said: str, tmp_path: Path) -> None:
    session = SimpleNamespace(device=device, generates_elsewhere=elsewhere, directory=tmp_path)
    with pytest.raises(EvalError) as raised:
        trace_onnx_phases(session, torch.zeros(1, 4), 2, tmp_path)  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_mistakes_are_told(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"--nvtx: NVTX ranges are marks on a GPU's timeline\. Leave it out on a CPU"):
        profile_model(tiny_model("llama"), tmp_path, device="cpu", nvtx=True)
    with pytest.raises(
        EvalError, match=r"encoder: it generates no tokens\. What is traced is a prompt and the tokens after it"
    ):
        run_module._check(SimpleNamespace(directory="encoder"), 1, 2, nvtx=False)
    with pytest.raises(
        EvalError, match=r"a prompt of 600 and 16 new tokens are more than the model's 512 positions\. Lower --prompt"
    ):
        profile_model(tiny_model("llama"), tmp_path, device="cpu", prompt=600)
    assert main(["profile", str(tmp_path / "none"), "--store", str(tmp_path / "store")]) == 1
    assert "no such model" in capsys.readouterr().err


def test_a_model_that_is_no_directory_is_made_in_the_store(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def materialize(todo: object, *_: object) -> Path:
        asked.append(todo.recipe.model.name)  # type: ignore[attr-defined]
        return tiny_model("llama")

    monkeypatch.setattr(
        run_module,
        "plan",
        lambda recipe, device, store: SimpleNamespace(recipe=recipe, device=device, steps=[SimpleNamespace(key="k")]),
    )
    monkeypatch.setattr(run_module, "materialize", materialize)
    with run_module.located("org/name", "cpu", tmp_path, SilentProgress()) as directory:
        assert directory == tiny_model("llama")
    assert asked == ["org/name"]
    with run_module.located(str(tmp_path), "cpu", None, SilentProgress()) as directory:
        assert directory == tmp_path


def test_what_is_known_of_a_session() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "gptq"}, _attn_implementation="eager")
    session = SimpleNamespace(device="cuda:1", dtype="float16", model=SimpleNamespace(config=config))
    known = circumstances(session, [Compile(mode="reduce-overhead")])
    assert known == Circumstances("cuda", "reduce-overhead", True, "float16", "eager", "torch")
    assert circumstances(SimpleNamespace(device="cpu", dtype="float32"), [Compile()]).compiled is None
    assert circumstances(session, [CudaGraphs()]).compiled == "cuda_graphs"


@pytest.mark.gpu
def test_a_gpu_is_traced(tiny_model: TinyModel, tmp_path: Path) -> None:
    report = profile_model(tiny_model("llama"), tmp_path, prompt=16, new_tokens=4, device="cuda")
    assert all(each.kinds["matmul"] > 0 and each.calls > 0 for each in report.phases)
    assert (tmp_path / "memory.pickle").stat().st_size > 0
    assert profile_model(tiny_model("llama"), tmp_path, prompt=16, new_tokens=4, device="cuda", nvtx=True).phases == ()


def test_python_runs_ahead_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Session:
        device = "cuda"

        def queue(self, tokens: torch.Tensor, new_tokens: int) -> Iterator[torch.Tensor]:
            for step in range(new_tokens):
                happened.append(f"step {step}")
                yield tokens

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append(f"wait for {device}"))
    prefill_s, decode_s = torch_trace_module.time_phases(Session(), torch.zeros(1, 1), 3)  # type: ignore[arg-type]
    assert happened == ["step 0", "wait for cuda", "step 1", "step 2", "wait for cuda"]
    assert prefill_s > 0
    assert decode_s > 0
