"""Masks by their properties, Wanda and SparseGPT against ten lines written from the papers, and
what each refinement promises.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.algorithms.gptq import relative_error
from optkit.algorithms.pruning import InputSquares, follows, kept, kept_by_pattern, wanda_scores, zeros_of_pruning
from optkit.algorithms.sparsegpt import BLOCK, curvature, refine_, sparsegpt
from optkit.algorithms.sparsity_pattern import Pattern

PATTERNS = [Pattern.parse(text) for text in ("unstructured", "2:4", "4:8")]


def layer(outputs: int = 12, inputs: int = 160, tokens: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a random weight and correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return torch.randn(outputs, inputs, generator=generator) * 0.05, mixed * torch.rand(inputs, generator=generator)


@settings(max_examples=60)
@given(
    pattern=st.integers(2, 9).flatmap(lambda of: st.builds(Pattern, st.integers(1, of - 1), st.just(of))),
    rows=st.integers(1, 5),
    groups=st.integers(1, 6),
    levels=st.integers(1, 1000),
    seed=st.integers(0, 1000),
)
def test_a_pattern_keeps_the_highest_of_every_group(
    pattern: Pattern, rows: int, groups: int, levels: int, seed: int
) -> None:
    # many are equal
    scores = torch.randint(
        0, levels, (rows, groups * pattern.of), generator=torch.Generator().manual_seed(seed)
    ).float()
    mask = kept_by_pattern(scores, pattern)
    assert mask.shape == scores.shape
    for group, stays in zip(scores.view(-1, pattern.of), mask.view(-1, pattern.of), strict=True):
        assert int((~stays).sum()) == pattern.zeros
        assert group[stays].min() >= group[~stays].max()
    assert follows(torch.ones_like(scores).masked_fill(~mask, 0), pattern)
    assert not follows(torch.ones_like(scores), pattern)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 5),
    inputs=st.integers(2, 40),
    sparsity=st.floats(0.01, 0.99),
    by_output=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_an_unstructured_mask_keeps_the_highest(
    rows: int, inputs: int, sparsity: float, by_output: bool, seed: int
) -> None:
    scores = torch.rand(rows, inputs, generator=torch.Generator().manual_seed(seed))
    mask = kept(scores, sparsity, None, by_output)
    for part, stays in zip(scores, mask, strict=True) if by_output else [(scores, mask)]:
        assert int((~stays).sum()) == round(sparsity * part.numel())
        assert not stays.any() or stays.all() or part[stays].min() >= part[~stays].max()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_wanda_is_ten_lines_of_its_paper(pattern: Pattern | None) -> None:
    weight, inputs = layer()
    squares = InputSquares(160)
    for part in inputs.split(250):
        squares.add(part.view(1, len(part), 160))
    assert squares.tokens == 600
    ours = weight.masked_fill(~kept(wanda_scores(weight, squares.norms()), 0.5, pattern, by_output=True), 0)
    metric = weight.abs() * inputs.norm(dim=0)
    expected = weight.clone()
    if pattern is None:
        expected.scatter_(1, metric.sort(dim=-1).indices[:, :80], 0.0)
    else:
        for start in range(0, 160, pattern.of):
            lowest = metric[:, start : start + pattern.of].topk(pattern.zeros, dim=1, largest=False).indices
            expected.scatter_(1, start + lowest, 0.0)
    assert torch.equal(ours, expected)


def reference_sparsegpt(weight: Tensor, hessian: Tensor, pattern: Pattern | None) -> Tensor:
    """Optimal brain surgery in the order of the inputs, with the inverse of what is left computed
    afresh each time.
    """
    left = weight.double().clone()
    damped = hessian.double() + 0.01 * hessian.diagonal().mean().double() * torch.eye(len(hessian))
    inverses = [torch.linalg.inv(damped[column:, column:]) for column in range(len(damped))]
    conditional = torch.stack([inverse[0, 0] for inverse in inverses])
    goes = torch.zeros_like(left, dtype=torch.bool)
    for column, inverse in enumerate(inverses):
        if column % (pattern.of if pattern else BLOCK) == 0:
            part = slice(column, column + (pattern.of if pattern else BLOCK))
            loss = left[:, part].square() / conditional[part]
            lowest = (
                loss.argsort(dim=1)[:, : pattern.zeros] if pattern else loss.flatten().argsort()[: loss.numel() // 2]
            )
            goes[:, part] = (
                torch.zeros_like(loss).scatter_(1, lowest, 1).bool()
                if pattern
                else torch.isin(torch.arange(loss.numel()), lowest).view_as(loss)
            )
        error = torch.where(goes[:, column], left[:, column], 0) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    return left.masked_fill(goes, 0).float()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_sparsegpt_is_the_surgery_of_its_paper(pattern: Pattern | None) -> None:
    weight, inputs = layer()
    hessian = inputs.T @ inputs / len(inputs)
    ours, expected = sparsegpt(weight, curvature(hessian), 0.5, pattern), reference_sparsegpt(weight, hessian, pattern)
    assert float((ours == 0).float().mean()) == 0.5
    # Two losses that float32 cannot tell apart change which weight goes, and what follows in its
    # row.
    assert ((ours == 0) != (expected == 0)).float().mean() < 0.01
    assert relative_error(weight, ours, hessian) == pytest.approx(relative_error(weight, expected, hessian), rel=0.02)
    same = ((ours == 0) == (expected == 0)).all(1)
    assert same.any()
    assert torch.allclose(ours[same], expected[same], atol=1e-4)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_each_method_leaves_less_error(pattern: Pattern | None) -> None:
    weight, inputs = layer(seed=1)
    hessian = inputs.T @ inputs / len(inputs)
    curved = curvature(hessian)
    pruned = [
        weight.masked_fill(~kept(weight.abs(), 0.5, pattern, by_output=False), 0),
        weight.masked_fill(~kept(wanda_scores(weight, inputs.norm(dim=0)), 0.5, pattern, by_output=True), 0),
        *(sparsegpt(weight, curved, 0.5, pattern, refinements) for refinements in (0, 1, 4, 20)),
    ]
    errors = [relative_error(weight, each, hessian) for each in pruned]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[2]


def test_refined_weights_are_the_least_squares_of_their_mask() -> None:
    weight, inputs = layer(outputs=5, inputs=40)
    hessian = curvature(inputs.T @ inputs / len(inputs)).hessian
    stays = torch.rand(5, 40, generator=torch.Generator().manual_seed(2)) < 0.5
    stays[0] = False
    pruned = weight.masked_fill(~stays, 0).T.contiguous()
    refine_(pruned, weight.T, hessian, 200)
    assert torch.equal(pruned.T != 0, stays)
    for row in range(1, 5):
        here, exact = stays[row], hessian.double()
        best = torch.linalg.solve(exact[here][:, here], exact[here] @ weight[row].double())
        assert torch.allclose(pruned.T[row, here].double(), best, atol=1e-4)


def test_of_equal_weights_that_of_an_input_that_is_never_there_goes_first() -> None:
    weight, inputs = layer(outputs=4, inputs=32)
    inputs[:, ::4] = 0
    pruned = sparsegpt(weight.sign(), curvature(inputs.T @ inputs / len(inputs)), 0.5, Pattern(1, 4))
    assert not pruned[:, ::4].any()
    assert pruned[:, 1::4].all()


def test_text_of_patterns() -> None:
    for text in ("2:4", "4:8", "1:4"):
        assert str(Pattern.parse(text)) == text
    assert Pattern.parse("1:4") == Pattern(3, 4)
    assert Pattern.parse("unstructured") is None
    for text in ("4:2", "0:4", "2-4", "4:4", ""):
        with pytest.raises(ValueError, match="is no pattern: take unstructured, or n:m with 0 < n < m"):
            Pattern.parse(text)


def test_few_zeros_are_no_pruning() -> None:
    weight = torch.ones(10, 10)
    weight[0] = 0
    assert zeros_of_pruning(weight) is None
    weight[1] = 0
    zeros = zeros_of_pruning(weight)
    assert zeros is not None
    assert int(zeros.sum()) == 20
