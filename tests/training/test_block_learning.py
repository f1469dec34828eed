"""`learn: blocks` of `gptq` on tiny models: blocks that return what the unmodified ones do, in the
same form as without it.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from optkit.algorithms.pruning import zeros_of_pruning
from optkit.errors import StageError
from optkit.model.blocks import BlockInputs
from optkit.model.checkpoint import Checkpoint
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.gptq import Gptq
from optkit.training import block_learning, scale_learning
from optkit.training.recorded_step import RecordedStep
from tests.conftest import TinyModel
from tests.stages.test_gptq_stage import outputs, weights
from tests.support.changes import changing
from tests.support.encoder_decoders import write_pairs
from tests.support.opened import transformers_logits
from tests.support.predictions import predicted
from tests.support.pruning import prune
from tests.support.running import run_stage

STEPS = 24


@pytest.fixture(scope="module")
def few(text: Calibration) -> Calibration:
    """Return four sequences of it."""
    return text.model_copy(update={"samples": 4})


def quantize(source: Path, target: Path, text: Calibration, steps: int | None = STEPS, **fields: Any) -> Report:
    """Quantize to 2 bits; `seed` is the context's. Blocks learn from the text alone, which is measured too."""
    context = Context(seed=fields.pop("seed", 0))
    fields = {"bits": 2, "group_size": 32, "batch_size": 2, "calibration": text, **fields}
    learn = {} if steps is None else {"learn": "blocks", "learning_steps": steps, "scale_steps": 0, "copies": 0}
    return run_stage(Gptq(**{**learn, **fields}), source, target, context)


@pytest.mark.parametrize(("kind", "fields"), [("llama", {"symmetric": False}), ("gpt2", {"format": "gptq", "bits": 3})])
def test_blocks_come_nearer_to_the_unmodified_ones(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, fields: dict[str, Any]
) -> None:
    source, bits = tiny_model(kind), fields.get("bits", 2)
    report = quantize(source, tmp_path / "learned", few, **fields)
    quantize(source, tmp_path / "gptq", few, None, **fields)
    for before, after in report.details["block_losses"].values():
        assert after < before
    tokens = few.tokens(source, None)
    original = outputs(source, tokens)
    ours, theirs = (
        (outputs(source, tokens, weights(tmp_path / place, bits)) - original).square().mean()
        for place in ("learned", "gptq")
    )
    assert ours < 0.9 * theirs
    assert Checkpoint(tmp_path / "learned").tensors == Checkpoint(tmp_path / "gptq").tensors
    assert (tmp_path / "learned/config.json").read_text() == (tmp_path / "gptq/config.json").read_text()


def test_elements_that_the_next_norm_hardly_reads_do_not_decide(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration
) -> None:
    """One element of the hidden states is 100 times as large and read a hundredth as much, as in Gemma."""
    source = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "source"))
    with changing(source) as tensors:
        growth = torch.ones(tensors["model.norm.weight"].numel())
        growth[0] = 100
        size = growth.square().mean().sqrt()
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor.mul_(size / growth)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.mul_(growth[:, None])
            elif "embed_tokens" in name:
                tensor.mul_(growth)
    quantize(source, tmp_path / "learned", few)
    quantize(source, tmp_path / "gptq", few, None)
    tokens = few.tokens(source, None)
    original = outputs(source, tokens)
    ours, theirs = (
        (outputs(source, tokens, weights(tmp_path / place, 2)) - original).square().mean()
        for place in ("learned", "gptq")
    )
    assert ours < 0.9 * theirs


def test_plain_transformers_opens_what_learned(tiny_model: TinyModel, tmp_path: Path, few: Calibration) -> None:
    source, tokens = tiny_model("llama"), few.tokens(tiny_model("llama"), None)
    quantize(source, tmp_path / "learned", few, 2)
    opened = transformers_logits(tmp_path / "learned", tokens, dtype=torch.float32)
    torch.testing.assert_close(opened, outputs(source, tokens, weights(tmp_path / "learned", 2)), rtol=1e-3, atol=1e-4)


def test_a_step_is_given_tensors_of_one_shape(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded of it can be replayed; the last batch is smaller here."""
    shapes: list[set[torch.Size]] = []

    class Seen(RecordedStep):
        def __init__(self, step: Callable[..., None]) -> None:
            super().__init__(step)
            shapes.append(set())
            self.shapes = shapes[-1]

        def __call__(self, *tensors: torch.Tensor) -> None:
            self.shapes.update(tensor.shape for tensor in tensors)
            super().__call__(*tensors)

    monkeypatch.setattr(block_learning, "RecordedStep", Seen)
    quantize(tiny_model("llama"), tmp_path / "learned", text.model_copy(update={"samples": 3}), 4)
    assert {shape[0] for seen in shapes for shape in seen} == {1, 2}
    assert all(len(seen) <= 1 for seen in shapes)


@pytest.mark.parametrize(("learner", "part"), [("BlockLearner", "_train_"), ("ScaleLearner", "_descend")])
def test_learning_alone_computes_in_tensor_float32(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, learner: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = getattr(block_learning if learner == "BlockLearner" else scale_learning, learner)
    run, seen = getattr(owner, part), set()

    def watched(self: Any, *given: Any) -> Any:
        seen.add(torch.get_float32_matmul_precision())
        return run(self, *given)

    monkeypatch.setattr(owner, part, watched)
    stage = Gptq(bits=2, group_size=32, calibration=few, learn="blocks", learning_steps=1, scale_steps=1, copies=0)
    stage.run(tiny_model("llama"), tmp_path, Context())
    assert seen == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_experts_learn(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    experts = ("*experts*",)
    report = quantize(tiny_model("mixtral"), tmp_path / "learned", text, include=experts, batch_size=8)
    assert all(after < before for before, after in report.details["block_losses"].values())


def test_steps_that_harm_are_not_taken(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_learning, "SCALE_RATE", 3.0)
    source = tiny_model("llama")
    report = quantize(source, tmp_path / "wild", few, 3)
    quantize(source, tmp_path / "gptq", few, None, true_sequential=False)  # as where blocks learn
    assert all(after == before for before, after in report.details["block_losses"].values())
    assert (tmp_path / "wild/model.safetensors").read_bytes() == (tmp_path / "gptq/model.safetensors").read_bytes()


def test_blocks_and_scales_learn_from_copies_of_the_text_too(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[type, torch.Tensor]] = []
    for learner in (block_learning.BlockLearner, scale_learning.ScaleLearner):

        def begin(self: Any, skeleton: Any, inputs: BlockInputs, *rest: Any, begin: Any = learner.__init__) -> None:
            seen.append((type(self), inputs.hidden.clone()))
            begin(self, skeleton, inputs, *rest)

        monkeypatch.setattr(learner, "__init__", begin)
    quantize(tiny_model("llama"), tmp_path / "learned", few, 1, scale_steps=1, copies=2)
    assert [kind for kind, _ in seen] == [block_learning.BlockLearner, scale_learning.ScaleLearner]
    assert seen[0][1].equal(seen[1][1])
    text, *copies = seen[0][1].split(4)
    assert len(copies) == 2
    for copy in copies:
        assert copy[:, 0].equal(text[:, 0])
        assert 0.3 < (copy != text).any(-1).float().mean() < 0.7


def test_more_tokens_at_once_than_a_model_has_positions(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    source = tiny_model("gpt2")
    positions = Checkpoint(source).config["n_positions"]
    two = text.model_copy(update={"samples": 2, "sequence_length": positions, "packing": "joined"})
    fields = {"scale_steps": 1, "copies": 1, "format": "gptq", "bits": 3, "include": ("transformer.h.0.*",)}
    report = quantize(source, tmp_path / "learned", two, 0, **fields)
    assert all(0 < each < 10 for each in report.details["divergence"])


def test_the_seed_decides_and_nothing_else(tiny_model: TinyModel, tmp_path: Path, few: Calibration) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        quantize(tiny_model("llama"), tmp_path / name, few, 3, seed=seed, include=("model.layers.0.*",))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "other")]
    assert files[0] == files[1] != files[2]


def test_zeros_of_pruning_and_layers_rounded_to_nearest_stay(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration
) -> None:
    prune(tiny_model("llama"), tmp_path / "pruned", method="magnitude", sparsity=0.5)
    kept = "model.layers.1.mlp.down_proj"
    fields = {"overrides": {kept: {"method": "rtn"}}}
    quantize(tmp_path / "pruned", tmp_path / "learned", few, **fields)
    quantize(tmp_path / "pruned", tmp_path / "gptq", few, None, **fields)
    learned, gptq = (weights(tmp_path / name, 2) for name in ("learned", "gptq"))
    source = Checkpoint(tmp_path / "pruned")
    for name, weight in learned.items():
        zeros = zeros_of_pruning(source.read(f"{name}.weight").float())
        assert zeros is not None
        assert not weight[zeros].any() or name == kept
        assert torch.equal(weight, gptq[name]) == (name == kept)


def test_a_model_in_bfloat16_learns(tmp_path: Path, model: Path, few: Calibration) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = (model / "config.json").read_text().replace('"float32"', '"bfloat16"')
    (model / "config.json").write_text(config)
    report = quantize(model, tmp_path / "learned", few, scale_steps=4)
    assert all(after < 0.95 * before for before, after in report.details["block_losses"].values())
    before, after = report.details["divergence"]
    assert after < before


def test_encoder_decoders_are_refused_in_the_plan_and_in_the_run(
    tiny_encoder_decoder: TinyModel, few: Calibration, tmp_path: Path
) -> None:
    source, message = tiny_encoder_decoder("BartForConditionalGeneration"), "gptq.learn: blocks of encoder-decoders are"
    pairs = few.model_copy(update={"dataset": str(write_pairs(tmp_path / "pairs", False)), "input": "input"})
    stage = Gptq(calibration=pairs.model_copy(update={"field": "target", "samples": 2}), effort="best")
    for fails in (
        lambda: stage.predict(Checkpoint(source).shape, "cpu"),
        lambda: stage.run(source, tmp_path / "target", Context()),
    ):
        with pytest.raises(StageError, match=rf"{message} not held to .* Leave out learn"):
            fails()


def test_the_plan_knows_the_form_and_asks_for_more_memory(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration
) -> None:
    source = tiny_model("llama")
    quantize(source, tmp_path / "learned", few, 1)
    fields = {"bits": 2, "group_size": 32, "batch_size": 2, "calibration": few}
    learned = predicted(Gptq(**fields, learn="blocks"), source, tmp_path / "learned")
    assert learned.ram_bytes > predicted(Gptq(**fields), source, tmp_path / "learned").ram_bytes
    copied = predicted(Gptq(**fields, learn="blocks", copies=40), source, tmp_path / "learned")
    assert copied.ram_bytes > learned.ram_bytes
    fields["calibration"] = Calibration(dataset="pictures.jsonl", images="image", samples=4, sequence_length=64)
    none, many = (
        predicted(Gptq(**fields, learn="blocks", copies=copies), source, tmp_path / "learned") for copies in (0, 40)
    )
    assert many.ram_bytes == none.ram_bytes  # prompts with images have no copies


def test_keys_without_it_are_what_they_were(few: Calibration) -> None:
    assert not {"learn", "learning_steps", "scale_steps", "copies"} & set(Gptq(calibration=few).model_dump())


def test_steps_of_no_learning_are_refused(few: Calibration) -> None:
    learning = Gptq(calibration=few, learn="blocks").model_dump()
    assert (learning["learning_steps"], learning["scale_steps"]) == (120, 64)
    for steps in ("learning_steps", "scale_steps"):
        with pytest.raises(ValidationError, match=f"{steps} would not be read: take it out, or set learn: blocks"):
            Gptq(calibration=few, **{steps: 4})
    with pytest.raises(ValidationError, match="learning_steps and scale_steps are 0: nothing would learn"):
        Gptq(calibration=few, learn="blocks", learning_steps=0, scale_steps=0)


def test_effort_picks_fields_and_is_in_no_key(few: Calibration) -> None:
    assert Gptq(calibration=few, effort="best") == Gptq(calibration=few, learn="blocks")
    assert (
        Gptq(calibration=few, effort="balanced").model_dump() == Gptq(calibration=few, earlier_errors=0.5).model_dump()
    )
    assert Gptq(calibration=few, effort="balanced", earlier_errors=0).earlier_errors == 0
    assert Gptq(calibration=few, effort="fast") == Gptq(calibration=few)
    with pytest.raises(ValidationError, match="effort"):
        Gptq(calibration=few, effort="most")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_learns_what_the_cpu_learns(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # a CPU has no TF32
    for device in ("cpu", "cuda"):
        fields = {"bits": 2, "group_size": 32, "batch_size": 2, "learning_steps": STEPS}
        stage = Gptq(**fields, calibration=few, learn="blocks", copies=0)  # each device draws copies of its own
        report = run_stage(stage, tiny_model("llama"), tmp_path / device, Context(device=device))
        losses.append([after for _, after in report.details["block_losses"].values()])
    # in 24 steps a noise of 1e-5 in what a block is given moves its loss by up to 3% on one device
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "recorded"), [("llama", True), ("mixtral", False)])
def test_a_step_is_recorded_where_it_does_not_wait_for_the_gpu(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, made = tiny_model(kind), list[RecordedStep]()
    losses, before = [], torch.cuda.memory_allocated()
    for steps in (RecordedStep, Plain):
        monkeypatch.setattr(
            block_learning, "RecordedStep", lambda step, kind=steps: made.append(kind(step)) or made[-1]
        )
        stage = Gptq(bits=2, group_size=32, batch_size=2, calibration=few, learn="blocks", learning_steps=STEPS)
        report = run_stage(stage, source, tmp_path / steps.__name__, Context(device="cuda"))
        losses.append([after for _, after in report.details["block_losses"].values()])
    assert any(step._graph is not None for step in made) == recorded
    made.clear()
    assert torch.cuda.memory_allocated() - before < 300e6  # cuBLAS's workspaces are those of two streams
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


class Plain(RecordedStep):
    """One that is never recorded."""

    def _record(self, tensors: tuple[torch.Tensor, ...]) -> None:
        pass
