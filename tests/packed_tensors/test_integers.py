"""What compressed-tensors' readers are told of integer codes."""

from __future__ import annotations

import pytest

from optkit.packed_tensors.integers import PackQuantized


def test_the_order_of_rounding_is_told_by_a_name_that_every_reader_knows() -> None:
    """Humming's schema takes `weight` alone; `static` is an alias of it in compressed-tensors."""
    ordering = pytest.importorskip("compressed_tensors.quantization").ActivationOrdering
    told = PackQuantized(4, 32, symmetric=True, activation_order=True).scheme()["weights"]["actorder"]
    assert told == ordering.WEIGHT.value
    assert told not in ordering.get_aliases()
    assert PackQuantized(4, 32, symmetric=True).scheme()["weights"]["actorder"] is None
