"""Modules that compute something else for a while."""

import pytest
import torch
from torch import nn

from optkit.model.replaced_forward import replaced_forward


def test_what_a_module_computed_before_is_back_after_an_error_too() -> None:
    plain, hooked, given = nn.Identity(), nn.Identity(), torch.ones(1)
    hooked.forward = torch.neg
    with pytest.raises(KeyError), replaced_forward({plain: torch.zeros_like, hooked: torch.zeros_like}):
        assert (plain(given), hooked(given)) == (0, 0)
        raise KeyError
    assert (plain(given), hooked(given)) == (1, -1)
    assert "forward" not in vars(plain)
