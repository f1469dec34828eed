"""A model on the meta device, as its config.json describes it, and the dtype of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from optkit.common.out_of_resources import is_out_of_memory
from optkit.errors import BARE, SourceError, first_line
from optkit.model.attention_choice import attention_options
from optkit.model.checkpoint import Checkpoint
from optkit.model.config_file import AGAIN
from optkit.model.experts import put_apart_
from optkit.model.shape import FLOAT_NAMES
from optkit.model.state_kernels import silence_fallbacks_
from optkit.model.task import architectures_of, loader_of

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each) for name, each in FLOAT_NAMES.items()}
"""Float dtypes by the names that safetensors uses."""
POOLER = "pooler"
"""What transformers puts behind encoders whose features are asked for."""


def empty_model(
    checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool = False, **options: Any
) -> PreTrainedModel:
    """Return the model of a checkpoint's config.json on the meta device.
    `options` go to transformers' `from_config`.

    Attention keeps all that the model asks for. Raises SourceError for an architecture that
    transformers cannot build.
    """
    where, chosen = str(checkpoint.directory), attention_options(checkpoint.config, options)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        loader = getattr(transformers, loader_of(checkpoint.config))
        with init_empty_weights(include_buffers=False), _no_random_numbers():
            model = loader.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **chosen)
    except Exception as error:  # whatever transformers makes of numbers that it does not expect
        if is_out_of_memory(error):
            raise
        needs_code = "auto_map" in checkpoint.config and not trust_remote_code
        remedy = AGAIN if isinstance(error, BARE) else ""
        if needs_code:
            remedy = "Read the code in it, then set `trust_remote_code: true` in the recipe's `model:`"
        raise SourceError(
            f"transformers cannot build {architectures_of(checkpoint.config)}",
            where=where,
            why=first_line(error),
            remedy=remedy,
        ) from error
    if POOLER in dict(model.named_children()) and not any(f"{POOLER}." in name for name in checkpoint.tensors):
        model.pooler = None  # features are asked for, which stand in front of it
    put_apart_(model, checkpoint.tensors)
    silence_fallbacks_(checkpoint.config)
    return model.requires_grad_(False).eval()


@contextmanager
def _no_random_numbers() -> Iterator[None]:
    """Draw none for tensors on the meta device: finding out what comes of it takes longer than all else."""
    own = {name: vars(torch.Tensor).get(name) for name in ("normal_", "uniform_")}
    for name in own:
        setattr(torch.Tensor, name, _unless_meta(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, fill in own.items():
            if fill is None:
                delattr(torch.Tensor, name)  # there is that of the base class again
            else:
                setattr(torch.Tensor, name, fill)


def _unless_meta(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return tensor if tensor.is_meta else fill(tensor, *arguments, **keywords)

    return filled


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return `Checkpoint.dtype` as torch has it."""
    found: torch.dtype = getattr(torch, checkpoint.dtype)
    return found
