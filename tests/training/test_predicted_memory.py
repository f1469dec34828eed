"""The predicted peak memory of a training, beside the bytes of all tensors that are alive at once
on a CPU.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from optkit.errors import StageError
from optkit.model.attention_choice import EAGER
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape, TensorInfo
from optkit.progress import SilentProgress
from optkit.stages.distill import Distill
from optkit.training.data import split
from optkit.training.loop import Loop
from optkit.training.objective import LossWeights, Objective
from optkit.training.predicted_memory import Setup, predicted_memory
from optkit.training.student import checkpoint_activations_, open_student
from optkit.training.teacher import LiveTeacher
from optkit.training.training_options import TrainingOptions
from tests.support.crossed import crossed
from tests.support.live_memory import LiveBytes
from tests.support.planning import plan_of
from tests.support.tiny_models import CONFIGS, save_tiny_model

BATCH, LENGTH = 4, 128
WIDE_LLAMA = {
    **CONFIGS["llama"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        directory = root / kind
        return directory if directory.exists() else save_tiny_model(kind, directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "wide_llama", WIDE_LLAMA)
        patch.setitem(
            CONFIGS, "bloom", {"model_type": "bloom", "vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4}
        )
        yield make


def peak_and_setup(
    source: Path,
    *,
    half: bool,
    checkpointing: bool,
    accumulation: int,
    taught: bool,
    length: int = LENGTH,
    attention: float = 0.0,
) -> tuple[int, Setup]:
    """Train three steps, the last of which finds all of the optimizer's states."""
    tokens = torch.randint(0, 512, (3 * BATCH * accumulation + 2, length), generator=torch.Generator().manual_seed(0))
    data = split(tokens, ["text"] * len(tokens), held_out=2, seed=0, where="test")
    precision = torch.bfloat16 if half else torch.float32
    options = TrainingOptions(
        steps=3, batch_size=BATCH, accumulation=accumulation, learning_rate=1e-4, evaluations=1, patience=None
    )
    with LiveBytes() as live:
        student = open_student(source, "cpu")
        teacher = LiveTeacher(source, "cpu", precision, attention=attention > 0) if taught else None
        objective = Objective(
            student.model, LossWeights(float(taught), float(not taught), 0.0, attention), None, precision
        )
        if checkpointing:
            checkpoint_activations_(student.model)
        # a student that is the teacher has nothing to learn, which the loop says at its end
        with contextlib.suppress(StageError):
            Loop(objective, data, teacher, options, "test", SilentProgress()).run()
    shape = Checkpoint(source).shape
    setup = Setup(
        BATCH * length, length, half, checkpointing, accumulation, divergence=taught, attention_loss=attention > 0
    )
    return live.peak, replace(setup, teacher=shape if taught else None)


WAYS: dict[str, dict[str, bool]] = {
    "float32": {"half": False, "checkpointing": False, "accumulation": 1, "taught": False},
    "checkpointing": {"half": True, "checkpointing": True, "accumulation": 1, "taught": False},
    "taught": {"half": True, "checkpointing": False, "accumulation": 2, "taught": True},
}


@pytest.mark.parametrize(("kind", "way"), crossed(["wide_llama", "qwen2", "gpt2", "gemma3", "opt", "mixtral"], WAYS))
def test_the_peak_is_predicted_within_a_fifth(model: Callable[[str], Path], kind: str, way: dict[str, bool]) -> None:
    measured, setup = peak_and_setup(model(kind), **way)
    predicted = predicted_memory(Checkpoint(model(kind)).shape, setup)
    assert predicted.total == pytest.approx(measured, rel=0.2), predicted.by_kind()


@pytest.mark.parametrize(("kind", "way"), crossed(["gptj", "gpt_oss", "bloom", "gemma2"], WAYS))
def test_matrices_of_attention_are_counted(model: Callable[[str], Path], kind: str, way: dict[str, bool]) -> None:
    """They are most of what long sequences leave if attention has no kernel of its own."""
    measured, setup = peak_and_setup(model(kind), **way, length=384)
    predicted = predicted_memory(Checkpoint(model(kind)).shape, setup)
    assert predicted.total == pytest.approx(measured, rel=0.2), predicted.by_kind()


@pytest.mark.parametrize("kind", ["wide_llama", "gptj", "gemma2"])
def test_so_they_are_where_attention_is_taught(model: Callable[[str], Path], kind: str) -> None:
    measured, setup = peak_and_setup(model(kind), **WAYS["taught"], length=256, attention=1.0)
    assert predicted_memory(Checkpoint(model(kind)).shape, setup).total == pytest.approx(measured, rel=0.2)


def test_models_without_fused_attention_are_those_of_transformers() -> None:
    """Models with states instead of attention aside."""
    found = {kind for kind, name in CAUSAL.items() if not getattr(transformers, name)._supports_sdpa}
    assert found - {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"} == EAGER


SHAPE = ModelShape(
    {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 1000},
    {
        "model.embed_tokens.weight": TensorInfo("F32", (1000, 64)),
        **{
            f"model.layers.{index}.{name}.weight": TensorInfo("F32", shape)
            for index in range(2)
            for name, shape in {
                "self_attn.q_proj": (64, 64),
                "self_attn.k_proj": (64, 64),
                "self_attn.v_proj": (64, 64),
                "self_attn.o_proj": (64, 64),
                "mlp.gate_proj": (256, 64),
                "mlp.up_proj": (256, 64),
                "mlp.down_proj": (64, 256),
                "input_layernorm": (64,),
                "post_attention_layernorm": (64,),
            }.items()
        },
    },
)
ON_GPU = Setup(positions=4096, length=512, half=True, device="cuda")


def test_kinds_of_memory_are_those_of_adamw_in_float32() -> None:
    kinds = predicted_memory(SHAPE, ON_GPU)
    assert kinds.weights == 4 * SHAPE.elements
    assert kinds.optimizer == 8 * SHAPE.elements
    assert kinds.best_weights == 0, "they lie in main memory"
    assert kinds.computed_weights == 2 * sum(info.elements for info in SHAPE.tensors.values() if len(info.shape) == 2)
    assert kinds.total == sum(kinds.by_kind().values())
    eighth = predicted_memory(SHAPE, Setup(**{**vars(ON_GPU), "optimizer": "adamw_8bit"}))
    assert eighth.optimizer == 2 * SHAPE.elements


def test_gradient_checkpointing_and_fewer_tokens_take_less() -> None:
    plain, again, short = (
        predicted_memory(SHAPE, Setup(**{**vars(ON_GPU), **change}))
        for change in ({}, {"checkpointing": True}, {"positions": 2048})
    )
    assert again.activations < plain.activations
    assert short.activations == plain.activations // 2


def test_fsdp_divides_what_stands_and_the_batch() -> None:
    alone = predicted_memory(SHAPE, ON_GPU)
    parts = predicted_memory(SHAPE, Setup(**{**vars(ON_GPU), "devices": 2, "parallel": "fsdp"}))
    copies = predicted_memory(SHAPE, Setup(**{**vars(ON_GPU), "devices": 2}))
    assert parts.weights == alone.weights // 2
    assert parts.optimizer == alone.optimizer // 2
    assert parts.activations == copies.activations == alone.activations // 2
    assert copies.weights == alone.weights
    assert copies.gradients > alone.gradients, "DDP keeps its buckets"


def test_the_plan_says_what_a_training_takes(model: Callable[[str], Path]) -> None:
    shape = Checkpoint(model("qwen2")).shape
    cost, left = Distill().predict(shape, "cuda")
    assert left is shape
    assert sum(cost.by_kind.values()) == cost.gpu_bytes
    assert {"weights", "teacher", "optimizer", "activations", "logits"} <= set(cost.by_kind)
    on_cpu = Distill(precision="float32").predict(shape, "cpu")[0]
    assert on_cpu.ram_bytes == sum(on_cpu.by_kind.values())
    assert on_cpu.gpu_bytes == 0


def test_main_memory_beside_a_gpu_has_the_best_weights_and_what_a_checkpoint_copies(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.devices.enough.visible_gpus", lambda: 2)
    shape = Checkpoint(model("qwen2")).shape
    for fields, each in (({}, 4 + 8), ({"optimizer": "adamw_8bit"}, 4 + 4), ({"devices": 2}, 4 + 4 + 8)):
        assert Distill(**fields).predict(shape, "cuda")[0].ram_bytes == each * shape.elements


@pytest.mark.parametrize("kind", ["distill", "lora_recover"])
def test_the_teacher_of_a_pruned_student_is_the_whole_model(
    model: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    source = model("wide_llama")
    pruned = {"remove_layers": [1, 2, 3], "calibration": "python-reference"}
    fields = {"precision": "float32", "sequence_length": 8, "texts": ["python-reference"]}
    stages: list[Any] = [{"prune_structured": pruned}, {kind: fields}]
    cost = plan_of({"name": "r", "model": str(source), "stages": stages}, tmp_path).steps[-1].cost
    whole = 4 * Checkpoint(source).shape.elements
    assert whole <= cost.by_kind["teacher"] < 1.01 * whole
    assert cost.by_kind["weights" if kind == "distill" else "frozen weights"] < 0.8 * whole


def test_what_fsdp_cannot_divide_is_refused(model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.devices.enough.visible_gpus", lambda: 2)
    stage = Distill(devices=2, parallel="fsdp")
    with pytest.raises(
        StageError, match="the weights of experts cannot be divided. An expert that no token of a device is sent to"
    ):
        stage.predict(Checkpoint(model("mixtral")).shape, "cuda")
    packed = ModelShape({**SHAPE.config, "quantization_config": {"quant_method": "gptq"}}, SHAPE.tensors)
    with pytest.raises(StageError, match="the weights of packed layers cannot be divided. .* Set `parallel: ddp`."):
        stage.predict(packed, "cuda")
