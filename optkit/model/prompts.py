"""What a model is called with to calibrate it: windows of a text, or prompts with images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.errors import StageError


class Prompts(Protocol):
    """What a model is called with, prompt by prompt: images make them of different lengths."""

    @property
    def longest(self) -> int:
        """The most tokens that one has."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield keywords of the model: `input_ids`, int64 [1, sequence], pixels and what else it takes."""

    def __getitem__(self, rows: slice) -> Self:
        """Return some of them."""


def longest_of(prompts: Tensor | Prompts) -> int:
    """Return the most tokens that one of the sequences has."""
    return prompts.shape[1] if isinstance(prompts, Tensor) else prompts.longest


def few_of(prompts: Tensor | Prompts, sequences: int, length: int) -> Tensor | Prompts:
    """Return the start of a text, int64 [sequences, length], or the first prompt with images."""
    return prompts[:sequences, :length] if isinstance(prompts, Tensor) else prompts[:1]


P = TypeVar("P", bound=Tensor | Prompts)


def spread_over(prompts: P, count: int) -> P:
    """Return so many of the sequences, evenly spread; all of them if there are fewer."""
    every: Any = prompts
    found: P = every[:: max(1, len(every) // count)][:count]
    return found


def tokens_in(prompts: Tensor | Prompts) -> int:
    """Return how many tokens the sequences have; prompts are made for it."""
    whole = [prompts] if isinstance(prompts, Tensor) else [inputs["input_ids"] for inputs in prompts]
    return sum(tokens.numel() for tokens in whole)


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


def refuse_images(model: PreTrainedModel, prompts: Tensor | Prompts, where: str) -> None:
    """Raise StageError for prompts with images if the model takes none."""
    if not isinstance(prompts, Tensor) and not model.config.is_encoder_decoder and not takes_images(model):
        what = f"{type(model).__name__} takes no images"
        raise StageError(what, where=where, remedy="Leave out calibration.images")


def takes_images(model: PreTrainedModel) -> bool:
    """Say whether a model can be called with images."""
    return "pixel_values" in signature(model.forward).parameters


def placed(inputs: Mapping[str, Tensor], device: str | torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a model is called with on its device, pixels in its dtype."""
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}
