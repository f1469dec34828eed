"""Modules that compute something else, or are watched by hooks, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def replaced_forward(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let each module compute by its function within the block."""
    held = {module: vars(module).get("forward") for module in forwards}  # hooks put one there
    try:
        for module, forward in forwards.items():
            module.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for module, before in held.items():
            del module.forward
            if before is not None:
                module.forward = before


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Take hooks, as `register_..._hook` returned them, away behind the block."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield
