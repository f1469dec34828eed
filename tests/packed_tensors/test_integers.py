"""What compressed-tensors' readers are told of integer codes."""

import pytest
import torch

from optkit.algorithms.grid import Grid, minmax_scales, round_to_nearest
from optkit.packed_tensors.integers import BytesQuantized, IntQuantized, PackedFormat, PackQuantized


def test_the_order_of_rounding_is_told_by_a_name_that_every_reader_knows() -> None:
    """Humming's schema takes `weight` alone; `static` is an alias of it in compressed-tensors."""
    ordering = pytest.importorskip("compressed_tensors.quantization").ActivationOrdering
    told = PackQuantized(4, 32, symmetric=True, activation_order=True).scheme()["weights"]["actorder"]
    assert told == ordering.WEIGHT.value
    assert told not in ordering.get_aliases()
    assert PackQuantized(4, 32, symmetric=True).scheme()["weights"]["actorder"] is None


@pytest.mark.parametrize("form", [PackQuantized(5, 8, True), BytesQuantized(3, 8, False), IntQuantized()])
def test_what_was_packed_comes_back(form: PackedFormat) -> None:
    weight, symmetric = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), form.symmetric
    grid = Grid(form.bits, form.group_size, symmetric)
    rounded = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    found = form.unpack(form.pack(rounded, torch.float32))
    assert all(torch.equal(getattr(found, leaf), getattr(rounded, leaf)) for leaf in ("codes", "scales", "zeros"))
