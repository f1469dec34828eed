"""The losses against ten lines each of their own, and logits taken in parts against logits taken at
once.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM

from optkit.errors import SourceError
from optkit.model.blocks import find_blocks
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape
from optkit.progress import SilentProgress
from optkit.training import losses
from optkit.training.answers import KnownTeacher, TopTargets
from optkit.training.logits_in_parts import TwoParts
from optkit.training.objective import LossWeights, Objective
from optkit.training.predicted_memory import LOGIT_BYTES, Setup, predicted_memory
from optkit.training.shared_answers import SharedPlace
from optkit.training.student import checkpoint_activations_, open_student
from optkit.training.teacher import LiveTeacher
from tests.zoo.models import save_model


def drawn(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def plain_divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sum of T^2 p (log p - log q), as the definition has it."""
    p, q = ((each.double() / temperature).softmax(-1) for each in (teacher, student))
    return (p * (p.log() - q.log())).sum() * temperature**2


@given(seed=st.integers(0, 2**16), temperature=st.floats(0.5, 4.0))
@settings(max_examples=20)
def test_divergence(seed, temperature):
    student, teacher = drawn(seed, 5, 17).requires_grad_(), drawn(seed + 1, 5, 17)
    found = losses.divergence(student, teacher, temperature)
    found.backward()
    reference = student.detach().clone().requires_grad_()
    expected = plain_divergence(reference, teacher, temperature)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    assert torch.allclose(student.grad, reference.grad.float(), atol=1e-4)


@given(seed=st.integers(0, 2**16), temperature=st.floats(0.5, 4.0), count=st.integers(1, 16))
@settings(max_examples=20)
def test_top_divergence(seed, temperature, count):
    """The rest of the probability is one more outcome, on both sides."""
    student, teacher = drawn(seed, 4, 17).requires_grad_(), drawn(seed + 1, 4, 17)
    top, indices = losses.top_of(teacher, count, temperature)
    found = losses.top_divergence(student, top, indices, temperature)
    found.backward()
    reference = student.detach().clone().requires_grad_()
    p, q = ((each.double() / temperature).softmax(-1) for each in (teacher, reference))
    chosen = torch.zeros_like(p).scatter_(1, indices, 1.0).bool()
    expected = sum(
        (a * (a / b).log()).sum() + (1 - a.sum()) * ((1 - a.sum()) / (1 - b.sum())).log()
        for a, b in ((p[row, chosen[row]], q[row, chosen[row]]) for row in range(4))
    )
    expected = expected * temperature**2
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-3)
    assert torch.allclose(student.grad, reference.grad.float(), atol=2e-3)
    assert found.item() <= float(plain_divergence(student.detach(), teacher, temperature)) + 1e-3


def test_the_last_of_all_tokens_is_the_rest():
    student, teacher = drawn(1, 4, 9), drawn(2, 4, 9)
    found = losses.top_divergence(student, *losses.top_of(teacher, 8))
    assert float(found) == pytest.approx(float(plain_divergence(student, teacher, 1.0)), rel=1e-4)


def test_a_very_sure_teacher_is_kept_in_16_bits():
    """Logarithms of its other tokens' probabilities are larger than 16 bits hold."""
    teacher, ours = 5 * drawn(1, 6, 64), drawn(2, 6, 64).requires_grad_()
    top, indices = losses.top_of(teacher, 8, temperature=1e-4)
    found = losses.top_divergence(ours, top.half(), indices, temperature=1e-4)
    found.backward()
    assert 0 <= found.item() < 0.01
    assert bool(ours.grad.isfinite().all())


def test_hidden_and_attention():
    ours, theirs = drawn(1, 2, 3, 8), drawn(2, 2, 3, 8)
    expected = sum(float((a - b) ** 2) for a, b in zip(ours.flatten(), theirs.flatten(), strict=True)) / float(
        theirs.square().sum()
    )
    assert float(losses.hidden_distance(ours, theirs)) == pytest.approx(expected, rel=1e-5)
    few, many = drawn(3, 2, 2, 4, 4).softmax(-1), drawn(4, 2, 6, 4, 4).softmax(-1)
    p, q = many.mean(1), few.mean(1)
    expected = float((p * (p / q).log()).sum()) / (2 * 4)
    assert float(losses.attention_divergence(few, many)) == pytest.approx(expected, rel=1e-5)


def gradients(objective_: Objective, tokens: torch.Tensor, targets) -> tuple[float, dict[str, torch.Tensor]]:
    objective_.zero_grad(set_to_none=True)
    found = objective_(tokens, targets)
    found.total.backward()
    return found.total.item(), {
        name: each.grad.clone() for name, each in objective_.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "opt", "mixtral"])
def test_logits_in_parts_give_the_gradients_of_the_whole_model(tiny_model, kind, monkeypatch):
    """Tied and untied heads, with and without bias, Conv1D, experts."""
    tokens = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    teacher = drawn(5, 2, 12, 512)
    student = open_student(tiny_model(kind), "cpu").model
    logits = student(input_ids=tokens, use_cache=False).logits
    expected = 0.5 * plain_divergence(logits, teacher, 2.0).float() / 24
    expected = expected + 0.25 * functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    wanted = {name: each.grad.clone() for name, each in student.named_parameters() if each.grad is not None}

    class Whole:
        hidden_states = attentions = ()

        def divergence(self, logits, positions, temperature):
            return losses.divergence(logits, teacher.flatten(0, 1)[positions], temperature)

    monkeypatch.setitem(LOGIT_BYTES, "cpu", 4 * 512 * 5)
    weights = LossWeights(divergence=0.5, cross_entropy=0.25, temperature=2.0)
    total, found = gradients(Objective(student, weights), tokens, Whole())
    assert total == pytest.approx(expected.item(), rel=1e-4)
    assert found.keys() == {f"student.{name}" for name in wanted}
    for name, gradient in wanted.items():
        assert torch.allclose(
            found[f"student.{name}"], gradient, rtol=1e-3, atol=1e-6 + 1e-3 * float(gradient.abs().max())
        ), name


def test_a_teacher_says_nothing_new_about_itself(tiny_model):
    tokens = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    teacher = LiveTeacher(tiny_model("llama"), "cpu", hidden=True, attention=True)
    student = Objective(
        open_student(tiny_model("llama"), "cpu").model, LossWeights(hidden=1.0, attention=1.0), teacher.width
    )
    found = student(tokens, teacher.targets((), tokens))
    assert all(float(part) == pytest.approx(0.0, abs=1e-4) for part in found.parts.values())
    assert set(found.parts) == {"divergence", "hidden", "attention"}


def test_a_matrix_stands_between_widths_and_learns(tiny_model):
    tokens = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    teacher = LiveTeacher(tiny_model("gpt2"), "cpu", hidden=True)
    teacher.model.config.hidden_size = 48
    targets = teacher.targets((), tokens)
    targets.hidden_states = tuple(state[..., :48] for state in targets.hidden_states)
    built = Objective(open_student(tiny_model("llama"), "cpu").model, LossWeights(hidden=1.0), 48)
    assert [tuple(matrix.weight.shape) for matrix in built.projections] == [(48, 64)] * 3
    _, found = gradients(built, tokens, targets)
    assert float(found["projections.2.weight"].abs().max()) > 0


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_gradient_checkpointing_changes_no_bit(tiny_model, kind):
    """OPT has dropout in the layer's own forward pass."""
    tokens = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    built = Objective(open_student(tiny_model(kind), "cpu").model, LossWeights(0.0, 1.0))
    total, expected = gradients(built, tokens, None)
    checkpoint_activations_(built.student)
    calls = []
    find_blocks(built.student)[0].module.register_forward_pre_hook(lambda *_: calls.append(1))
    again, found = gradients(built, tokens, None)
    assert len(calls) == 2
    assert again == total
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_kept_answers_are_the_live_ones(tiny_model):
    tokens = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    teacher = LiveTeacher(tiny_model("llama"), "cpu")
    targets = teacher.targets((), tokens)
    kept = TopTargets(*losses.top_of(targets.logits(slice(0, 24)), 511))
    logits = drawn(3, 24, 512)
    live = targets.divergence(logits, slice(0, 24), 1.0)
    assert float(kept.divergence(logits, slice(0, 24), 1.0)) == pytest.approx(float(live), rel=1e-3)


def test_a_teacher_whose_code_mixes_dtypes_is_opened_in_float32_and_counted_so(tmp_path):
    source = save_model("xlstm", tmp_path / "xlstm")
    assert LiveTeacher(source, "cpu", torch.bfloat16).model.dtype == torch.float32
    shape = Checkpoint(source).shape
    other = ModelShape({**shape.config, "model_type": "llama"}, shape.tensors)
    setup = Setup(positions=64, length=32, half=True)
    counted, half = (predicted_memory(shape, replace(setup, teacher=each)) for each in (shape, other))
    assert counted.teacher == 2 * half.teacher
    assert counted.teacher >= 4 * sum(
        each.numel() for each in AutoModelForCausalLM.from_pretrained(source).parameters()
    )


def test_who_waited_for_the_answers_of_another_opens_no_teacher(tiny_model, tmp_path, monkeypatch):
    tokens = torch.randint(0, 512, (4, 12), generator=torch.Generator().manual_seed(0))
    one, two = (KnownTeacher(SharedPlace(tmp_path)) for _ in range(2))
    opened = []

    def learn(teacher: KnownTeacher) -> None:
        def open_teacher() -> LiveTeacher:
            opened.append(teacher)
            return LiveTeacher(tiny_model("llama"), "cpu")

        teacher.learn(range(4), tokens, open_teacher, 4, 1.0, 2, SilentProgress())

    @contextmanager
    def alone():
        learn(one)
        yield

    monkeypatch.setattr(two.shared, "alone", alone)
    learn(two)
    assert opened == [one]
    assert torch.equal(two.targets([2], tokens).top, one.targets([2], tokens).top)


def test_bfloat16_is_near(tiny_model):
    tokens = torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    weights = LossWeights(0.0, 1.0)
    student = open_student(tiny_model("llama"), "cpu").model
    exact, _ = gradients(Objective(student, weights), tokens, None)
    rough, found = gradients(Objective(student, weights, precision=torch.bfloat16), tokens, None)
    assert rough == pytest.approx(exact, rel=0.02)
    assert rough != exact
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}


def test_a_model_that_cannot_be_taken_apart(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    forward = model.forward
    model.forward = lambda **options: (
        out := forward(**options),
        out.__setitem__("logits", out.logits + model.model.norm.weight.sum()),
    )[0]
    first = iter(range(100))
    inner = model.model.forward
    model.model.forward = lambda **options: (
        out := inner(**options),
        out.__setitem__("last_hidden_state", out.last_hidden_state + next(first)),
    )[0]
    with pytest.raises(
        SourceError,
        match="llama: unsupported architecture LlamaForCausalLM: decoder and output layer cannot be run apart",
    ):
        TwoParts(model)
