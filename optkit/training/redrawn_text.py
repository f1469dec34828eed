"""Copies of a calibration text in which some tokens are drawn anew from what the unmodified model expects
there. Who learns from few tokens learns them by heart; copies bring other tokens in other contexts, at the
cost of one more pass through the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optkit.model.head import logits_of_tokens
from optkit.model.skeleton import Skeleton
from optkit.training.predicted_memory import logits_at_once

SHARE = 0.5
"""Of the tokens of a copy that are drawn anew."""


@torch.no_grad()
def redrawn(
    skeleton: Skeleton,
    tokens: Tensor,
    copies: int,
    device: str,
    batch_size: int,
    seed: int,
    less_memory: str,
    told: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return copies of a text, int64 [sequences, length] -> [copies * sequences, length].
    `told` is called behind each block.
    A token is drawn from what the model expects behind those before it in the text as it is; the first of each
    sequence stays. One block is on the device at a time. Raises as `Skeleton.capture_inputs` and `loaded` do.
    """
    inputs = skeleton.capture_inputs(tokens, device, batch_size)
    for index, block in enumerate(skeleton.blocks):
        with skeleton.loaded(block, device, less_memory):
            skeleton.advance_(index, inputs)
        told()
    skeleton.load_outside_(device)
    generator, drawn = torch.Generator(device).manual_seed(seed), []
    vocabulary = skeleton.model.get_output_embeddings().weight.shape[0]
    at_once = logits_at_once(device, vocabulary)
    for sequences in inputs.hidden.split(batch_size):  # as many at once as learn at once: the plan counts their logits
        for hidden in sequences.to(device).flatten(0, 1).split(at_once):
            expected = logits_of_tokens(skeleton.model, skeleton.blocks, hidden).float().softmax(-1)
            drawn.append(torch.multinomial(expected, copies, replacement=True, generator=generator).cpu())
    skeleton.release_outside_()
    next_tokens = torch.cat(drawn).view(*tokens.shape, copies)
    others = tokens[..., None].repeat(1, 1, copies)
    others[:, 1:] = next_tokens[:, :-1]
    anew = torch.rand(others.shape, generator=torch.Generator().manual_seed(seed)) < SHARE
    return torch.where(anew, others, tokens[..., None]).permute(2, 0, 1).flatten(0, 1)
