from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from optkit.errors import StageError
from optkit.model.shape import ModelShape, TensorInfo
from optkit.session import open_session
from optkit.settings import precision
from optkit.settings.precision import Precision
from tests.support.planning import plan_of

TOKENS = torch.arange(24).reshape(2, 12)


def shape(dtype: str = "F32", **config: object) -> ModelShape:
    return ModelShape(config, {"weight": TensorInfo(dtype, (2, 2))})


@pytest.mark.parametrize(
    ("mode", "dtype", "said"),
    [
        ("fp32", "float32", "precision: fp32"),
        ("tf32", "float32", "precision: tf32"),
        ("bf16", "bfloat16", "precision: bf16"),
        ("fp16", "float16", "precision: fp16"),
        ("autocast", None, "precision: autocast to bfloat16"),
    ],
)
def test_what_the_model_is_opened_in(mode: str, dtype: str | None, said: str) -> None:
    setting = Precision.model_validate({"mode": mode})
    assert setting.opened_dtype() == dtype
    assert setting.describe("cuda") == said
    assert not setting.exact


@pytest.mark.parametrize(("mode", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_computes_in_it(tiny_model: Callable[[str], Path], mode: str, dtype: torch.dtype) -> None:
    session = open_session(tiny_model("llama"), [Precision.model_validate({"mode": mode})])
    assert session.model.dtype == dtype
    exact = open_session(tiny_model("llama")).logits(TOKENS)
    cast = open_session(tiny_model("llama"), dtype=str(dtype).removeprefix("torch.")).logits(TOKENS)
    assert session.logits(TOKENS).equal(cast)
    assert not cast.equal(exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_is_torchs(tiny_model: Callable[[str], Path], dtype: str) -> None:
    session = open_session(tiny_model("llama"), [Precision.model_validate({"mode": "autocast", "dtype": dtype})])
    plain = open_session(tiny_model("llama"))
    assert session.model.dtype == torch.float32
    with torch.inference_mode(), torch.autocast("cpu", dtype=getattr(torch, dtype)):
        expected = plain.model(input_ids=TOKENS).logits.float()
    assert session.logits(TOKENS).equal(expected)
    assert not expected.equal(plain.logits(TOKENS))
    assert session.generate(TOKENS, 4)[:, 12].equal(expected[:, -1].argmax(-1))
    assert not torch.is_autocast_enabled("cpu")


def test_tensor_float32_is_on_within_calls_alone() -> None:
    with Precision(mode="tf32").computing("cuda"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("fields", "capability", "of", "message"),
    [
        (
            {"mode": "tf32"},
            None,
            shape(),
            r"^precision: tf32 does not run on cpu\. .*tensor cores of NVIDIA GPUs\. Use fp32 or bf16",
        ),
        (
            {"mode": "tf32"},
            (7, 5),
            shape(),
            r"^precision: this GPU \(compute capability 7\.5\) does not compute in tf32\. .*Use fp16",
        ),
        ({"mode": "bf16"}, (7, 5), shape(), r"does not compute in bfloat16"),
        ({"mode": "autocast"}, (7, 0), shape(), r"does not compute in bfloat16"),
        (
            {"mode": "autocast"},
            None,
            shape("BF16"),
            r"nothing to cast: the weights are bfloat16\. .*`- cast: \{dtype: float32\}`",
        ),
        ({"mode": "autocast"}, None, shape(quantization_config={}), None),
        (
            {"mode": "autocast"},
            None,
            shape(quantization_config={"bits": 4}),
            r"autocast cannot be used with packed weights\. .*Use bf16",
        ),
        ({"mode": "autocast", "dtype": "float16"}, (7, 5), shape(), None),
        ({"mode": "bf16"}, (9, 0), shape(), None),
        ({"mode": "fp16"}, None, shape("BF16"), None),
    ],
)
def test_what_is_refused_before_anything_runs(
    fields: dict[str, str],
    capability: tuple[int, int] | None,
    of: ModelShape,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "compute_capability", lambda device: capability)
    setting = Precision.model_validate(fields)
    device = "cuda" if capability else "cpu"
    if message is None:
        setting.check(of, device)
    else:
        with pytest.raises(StageError, match=message):
            setting.check(of, device)


def test_an_artifact_is_not_opened_where_the_device_has_no_such_numbers(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(StageError, match=r"^precision: tf32 does not run on cpu"):
        open_session(tiny_model("llama"), [Precision(mode="tf32")])


def test_a_plan_refuses_it_for_the_model_that_the_stages_leave(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    def plan(*stages: object) -> None:
        plan_of({"model": str(tiny_model("llama")), "stages": list(stages)}, tmp_path)

    plan({"precision": "autocast"})
    with pytest.raises(StageError, match="the weights are bfloat16"):
        plan("bf16", {"precision": "autocast"})
    with pytest.raises(StageError, match="tf32 does not run on cpu"):
        plan({"precision": "tf32"})


def test_fields_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="dtype is for autocast: leave it out, bf16 says it already"):
        Precision.model_validate({"mode": "bf16", "dtype": "float16"})
    with pytest.raises(ValidationError):
        Precision.model_validate({"mode": "fp8"})


@pytest.mark.gpu
def test_tensor_float32_on_a_gpu(tiny_model: Callable[[str], Path]) -> None:
    exact = open_session(tiny_model("llama"), device="cuda").logits(TOKENS)
    rounded = open_session(tiny_model("llama"), [Precision(mode="tf32")], device="cuda").logits(TOKENS)
    assert not rounded.equal(exact)
    assert rounded.sub(exact).abs().max() < 0.05 * exact.abs().max()
