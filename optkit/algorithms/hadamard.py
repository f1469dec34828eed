"""Orthogonal rotations of any size, randomized Hadamard if one is known, never formed.

A Hadamard matrix spreads every coordinate over all others, so that rotated weights have no outliers
(QuaRot, arXiv:2404.00456). Sizes factor into a power of two (Sylvester, by the fast Walsh-Hadamard
transform) and a small order that Paley's two constructions give from the squares of a finite field
(J. Math. Phys. 12, 1933): 12 and 28 and 36 and 344, not stored but computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

LARGEST_ORDER = 1024
"""The small factor is applied as a dense matrix, so a larger one would cost more than its better
spread is worth.
"""
CHUNK_ELEMENTS = 1 << 22
"""Numbers that are rotated in float64 at once."""


@dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix `diag(signs) (small x sylvester)`, of `size` rows.
    `sylvester` is a Hadamard matrix of a power of two.
    """

    signs: Tensor
    """float64 [size], each 1 or -1."""
    small: Tensor
    """float64 [order, order], orthogonal."""
    is_hadamard: bool
    """All entries have the same magnitude; false if no Hadamard matrix of the order is known and
    `small` is random.
    """

    @property
    def size(self) -> int:
        return self.signs.numel()

    def apply(self, vectors: Tensor) -> Tensor:
        """float [..., size] -> the same shape and dtype: times the matrix, computed in float64."""
        flat = vectors.reshape(-1, self.size)
        rotated = torch.empty_like(flat)
        step = max(1, CHUNK_ELEMENTS // self.size)
        for start in range(0, len(flat), step):
            rows = slice(start, start + step)
            rotated[rows] = self._rotated(flat[rows].double()).to(flat.dtype)
        return rotated.view(vectors.shape)

    def matrix(self) -> Tensor:
        """Return float64 [size, size]."""
        return self.apply(torch.eye(self.size, dtype=torch.float64, device=self.signs.device))

    def to(self, device: str | torch.device) -> Rotation:
        return Rotation(self.signs.to(device), self.small.to(device), self.is_hadamard)

    def _rotated(self, vectors: Tensor) -> Tensor:
        order = len(self.small)
        parts = (vectors * self.signs).view(len(vectors), order, -1)
        return (self.small.T @ walsh_hadamard(parts)).reshape(vectors.shape)


def random_rotation(size: int, seed: int) -> Rotation:
    """Return a rotation of `size` with random signs; the same one for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    odd = size // (size & -size)
    order = next((order for order in _multiples(odd, size) if order == 1 or paley(order) is not None), None)
    if order is not None:
        known = torch.ones(1, 1, dtype=torch.float64) if order == 1 else paley(order)
        assert known is not None
        return Rotation(signs, known / math.sqrt(order), True)
    gaussian = torch.randn(odd, odd, dtype=torch.float64, generator=generator)
    orthogonal, triangle = torch.linalg.qr(gaussian)
    return Rotation(signs, orthogonal * triangle.diagonal().sign(), False)


def walsh_hadamard(vectors: Tensor) -> Tensor:
    """float [..., 2^k] -> the same shape, times Sylvester's orthonormal Hadamard matrix."""
    size = vectors.shape[-1]
    if size & (size - 1):
        raise ValueError(f"{size} is no power of two")
    result, half = vectors, 1
    while half < size:
        pairs = result.reshape(*vectors.shape[:-1], size // (2 * half), 2, half)
        first, second = pairs.unbind(-2)
        result = torch.stack([first + second, first - second], dim=-2).reshape(vectors.shape)
        half *= 2
    return result / math.sqrt(size)


@cache
def paley(order: int) -> Tensor | None:
    """Return a Paley Hadamard matrix, float64 [order, order] of 1 and -1; None if none fits."""
    if order % 4:
        return None
    if (order - 1) % 4 == 3 and (squares := _quadratic_character(order - 1)) is not None:
        bordered = torch.zeros(order, order, dtype=torch.float64)
        bordered[0, 1:], bordered[1:, 0], bordered[1:, 1:] = 1, -1, squares
        return bordered + torch.eye(order, dtype=torch.float64)
    half = order // 2
    if (half - 1) % 4 == 1 and (squares := _quadratic_character(half - 1)) is not None:
        conference = torch.zeros(half, half, dtype=torch.float64)
        conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, squares
        identity = torch.eye(half, dtype=torch.float64)
        upper = torch.cat([conference + identity, conference - identity], dim=1)
        return torch.cat([upper, torch.cat([conference - identity, -conference - identity], dim=1)])
    return None


def _multiples(odd: int, size: int) -> list[int]:
    """Return the factors `odd * 2^k` of a size that a dense matrix may have, smallest first."""
    found, order = [], odd
    while size % order == 0 and order <= LARGEST_ORDER:
        found.append(order)
        order *= 2
    return found


def _quadratic_character(count: int) -> Tensor | None:
    """Return float64 [count, count] of differences in the field: 1 for squares, -1 for others.
    Equal elements have 0.

    None if there is no field of that many elements, or if its degree over the prime field is
    above 3.
    """
    found = _prime_power(count)
    if found is None:
        return None
    prime, degree = found
    elements = list(product(range(prime), repeat=degree))
    reduction = _irreducible(prime, degree)
    squares = {_squared(element, prime, reduction) for element in elements if any(element)}
    zero = (0,) * degree
    value = {element: 0.0 if element == zero else 1.0 if element in squares else -1.0 for element in elements}
    rows = [
        [value[tuple((a - b) % prime for a, b in zip(one, other, strict=True))] for other in elements]
        for one in elements
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _prime_power(number: int) -> tuple[int, int] | None:
    prime = next((divisor for divisor in range(2, math.isqrt(number) + 1) if number % divisor == 0), number)
    degree = round(math.log(number, prime)) if number > 1 else 0
    return (prime, degree) if 1 <= degree <= 3 and prime**degree == number else None


def _irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """Return c of the first x^degree = c[0] + c[1] x + ... that has no root in the prime field:
    irreducible up to degree 3.
    """
    for coefficients in product(range(prime), repeat=degree):
        values = (sum(c * x**power for power, c in enumerate(coefficients)) - x**degree for x in range(prime))
        if degree == 1 or all(value % prime for value in values):
            return coefficients
    raise AssertionError(f"there is a field of {prime}^{degree} elements")


def _squared(element: tuple[int, ...], prime: int, reduction: tuple[int, ...]) -> tuple[int, ...]:
    """Return a polynomial's square, lowest power first, in the field x^degree = `reduction`."""
    degree = len(element)
    powers = [0] * (2 * degree - 1)
    for (place, one), (other_place, other) in product(enumerate(element), repeat=2):
        powers[place + other_place] += one * other
    for place in range(2 * degree - 2, degree - 1, -1):
        for offset, coefficient in enumerate(reduction):
            powers[place - degree + offset] += powers[place] * coefficient
    return tuple(power % prime for power in powers[:degree])
