import math

import pytest
import torch

from optkit.algorithms.hadamard import paley, random_rotation, walsh_hadamard


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_fast_transform_is_sylvesters_matrix(size: int) -> None:
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    want = torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)
    assert torch.allclose(walsh_hadamard(torch.eye(size, dtype=torch.float64)), want)
    vectors = torch.randn(3, 5, size, dtype=torch.float64)
    assert torch.allclose(walsh_hadamard(vectors), vectors @ want)


def test_the_fast_transform_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="12 is no power of two"):
        walsh_hadamard(torch.zeros(12))


# 12, 20: a prime less one; 28, 36: twice a prime more one; 52, 100: from fields of 25 and 49
# elements; 344: of 343.
@pytest.mark.parametrize("order", [4, 8, 12, 20, 24, 28, 36, 44, 52, 60, 84, 100, 104, 344])
def test_paleys_matrices_are_hadamard(order: int) -> None:
    matrix = paley(order)
    assert matrix is not None
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [2, 6, 16, 92, 172])
def test_paley_has_none_of_these_orders(order: int) -> None:
    assert paley(order) is None


@pytest.mark.parametrize(
    ("size", "is_hadamard"), [(64, True), (80, True), (576, True), (896, True), (1536, True), (27, False), (46, False)]
)
def test_a_rotation_is_orthogonal_and_random_in_its_signs(size: int, is_hadamard: bool) -> None:
    rotation = random_rotation(size, seed=3)
    matrix = rotation.matrix()
    assert rotation.size == size
    assert rotation.is_hadamard is is_hadamard
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    if is_hadamard:
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5))
    assert torch.equal(random_rotation(size, seed=3).matrix(), matrix)
    assert not torch.allclose(random_rotation(size, seed=4).matrix(), matrix)


@pytest.mark.parametrize("size", [11008, 14336, 28672, 4096, 6656])
def test_the_sizes_of_large_models_have_a_hadamard_matrix(size: int) -> None:
    rotation = random_rotation(size, seed=0)
    assert rotation.is_hadamard
    vectors = torch.zeros(2, size)
    vectors[0, 5], vectors[1, -1] = 1, 3
    rotated = rotation.apply(vectors)
    assert torch.allclose(rotated[0].abs(), torch.full((size,), size**-0.5))
    assert torch.allclose(rotated.double().norm(dim=-1), torch.tensor([1.0, 3.0]).double())


def test_it_rotates_the_last_dimension_in_the_dtype_given(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = random_rotation(24, seed=0)
    vectors = torch.randn(7, 3, 24, dtype=torch.bfloat16)
    want = (vectors.double() @ rotation.matrix()).bfloat16()
    assert torch.equal(rotation.apply(vectors), want)
    monkeypatch.setattr("optkit.algorithms.hadamard.CHUNK_ELEMENTS", 50)
    assert torch.equal(rotation.apply(vectors), want)
