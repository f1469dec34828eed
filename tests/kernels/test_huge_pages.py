"""Weights in huge pages, where Linux has none."""

import errno
import mmap
from typing import Any

import pytest
from torch import nn

from optkit.kernels.cpu import huge_pages


class _Without(mmap.mmap):
    def madvise(self, *_: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_weights_stay_where_they_are_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.mmap, "mmap", _Without)
    layer = nn.Linear(1024, 1024, bias=False)
    place = layer.weight.data_ptr()
    huge_pages.into_huge_pages_(layer)
    assert layer.weight.data_ptr() == place
