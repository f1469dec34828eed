"""What a model is called with to calibrate it: windows of a text, or prompts with images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Prompts(Protocol):
    """What a model is called with, prompt by prompt: images make them of different lengths."""

    @property
    def longest(self) -> int:
        """The most tokens that one has."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield keywords of the model: `input_ids`, int64 [1, sequence], pixels and what else it takes."""

    def first(self) -> Self:
        """Return the first of them alone, with its length as the longest."""


def longest_of(prompts: Tensor | Prompts) -> int:
    """Return the most tokens that one of the sequences has."""
    return prompts.shape[1] if isinstance(prompts, Tensor) else prompts.longest


def few_of(prompts: Tensor | Prompts, sequences: int, length: int) -> Tensor | Prompts:
    """Return the start of a text, int64 [sequences, length], or the first prompt with images."""
    return prompts[:sequences, :length] if isinstance(prompts, Tensor) else prompts.first()


def in_batches(prompts: Tensor | Prompts, size: int) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
    """Yield the rows of batches, and what the model is called with for them.
    Prompts run one by one, so that no padding enters what is summed of hidden states.
    """
    if isinstance(prompts, Tensor):
        for start in range(0, len(prompts), size):
            rows = slice(start, min(start + size, len(prompts)))
            yield rows, {"input_ids": prompts[rows]}
    else:
        for index, inputs in enumerate(prompts):
            yield slice(index, index + 1), inputs


def takes_images(model: PreTrainedModel) -> bool:
    """Say whether a model can be called with images."""
    return "pixel_values" in signature(model.forward).parameters


def placed(inputs: Mapping[str, Tensor], device: str | torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a model is called with on its device, pixels in its dtype."""
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}
