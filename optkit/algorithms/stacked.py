"""Operations on one matrix, or on several of equal shape: float [..., rows, columns].

One matrix takes torch's operators for one, which sum in their own order.
"""

from __future__ import annotations

from torch import Tensor


def taken(matrix: Tensor, order: Tensor) -> Tensor:
    """Return the rows of [..., rows, columns] in an order, int64 [..., taken]."""
    if order.dim() == 1:
        return matrix[order]
    return matrix.gather(-2, order.unsqueeze(-1).expand(*order.shape, matrix.shape[-1]))


def symmetric_taken(matrix: Tensor, order: Tensor) -> Tensor:
    """Return the rows and the columns of symmetric [..., size, size] in an order."""
    return matrix[order][:, order] if order.dim() == 1 else taken(taken(matrix, order).mT, order)


def subtract_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Take left @ right away from a total, [..., rows, columns]."""
    (total.addmm_ if total.dim() == 2 else total.baddbmm_)(left, right, alpha=-1)


def subtract_outer_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Take the outer product of [..., rows] and [..., columns] away from a total."""
    if total.dim() == 2:
        total.addr_(left, right, alpha=-1)
    else:
        total.baddbmm_(left.unsqueeze(-1), right.unsqueeze(-2), alpha=-1)


def diagonal_of(matrix: Tensor) -> list[float] | Tensor:
    """Return the diagonal of [..., size, size], to go through number by number: floats, or [size, ..., 1]."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    return diagonal.tolist() if diagonal.dim() == 1 else diagonal.movedim(-1, 0).unsqueeze(-1)


def by_row(*matrices: Tensor) -> zip[tuple[Tensor, ...]]:
    """Go through the rows of several [..., rows, columns] together."""
    return zip(*(each.movedim(-2, 0) for each in matrices), strict=True)
