"""Learn the scales of all layers so that the quantized model says what the unmodified one says.

    minimize the mean over tokens of KL(unmodified model || quantized model)

Codes stay. One block at a time has its weights on the device: hidden states go forward through all
of them, and the gradient comes back through each, which is run again for it. The codes of the
others wait in main memory. (E2E-QP of EfficientQAT, arXiv:2407.11062, which predicts the next token
instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.grid import QuantizedWeight
from optkit.common.tensor_float32 import tensor_float32
from optkit.model.blocks import Batch, BlockInputs
from optkit.model.head import logits_of_tokens
from optkit.model.replaced_forward import replaced_forward
from optkit.model.skeleton import Skeleton
from optkit.training.block_learning import drawn
from optkit.training.fake_quantization import Coded, straight_through
from optkit.training.losses import divergence
from optkit.training.objective import in_parts
from optkit.training.optimizer import BETAS, learning_rate
from optkit.training.predicted_memory import logits_at_once

SCALE_RATE = 1.2e-2
"""Highest learning rate of the logarithms of the scales, times the codes on one side of the middle.
The outermost weights then move by the same share of their scale, whatever the bits.
"""
WARMUP = 0.05
"""Share of the steps in which it rises."""


class ScaledCodes(nn.Module):
    """A linear layer with fixed codes; its scales can learn. The codes lie in main memory."""

    def __init__(self, coded: Coded, bias: Tensor | None, device: torch.device) -> None:
        """`coded`: in main memory; `bias`: on the device."""
        super().__init__()
        weight = coded.weight
        self.codes = weight.codes.pin_memory() if device.type == "cuda" else weight.codes
        self.grid, self.round_inputs, self.bias = coded.grid, coded.round_inputs, bias
        self.base, self.zeros = weight.scales.float().to(device), weight.zeros.float().to(device)
        self.growth = nn.Parameter(torch.zeros_like(self.base))

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        return F.linear(straight_through(self.round_inputs, hidden), self._weight(), self.bias)

    def learned(self) -> Coded:
        """Return the codes with the scales of now."""
        scales, zeros = self._scales().detach().cpu(), self.zeros.to("cpu", torch.uint8)
        return Coded(QuantizedWeight(self.codes, scales, zeros, self.grid.bits), self.grid, self.round_inputs)

    def _weight(self) -> Tensor:
        with torch.autocast(self.base.device.type, enabled=False):
            codes = self.codes.to(self.base.device, non_blocking=True).float().view(*self.base.shape, -1)
            return ((codes - self.zeros.unsqueeze(-1)) * self._scales().unsqueeze(-1)).view(self.codes.shape)

    def _scales(self) -> Tensor:
        scales = self.base * self.growth.exp()
        return scales + (self.grid.stored(scales) - scales).detach()


class ScaleLearner:
    """A quantized model whose scales learn from the unmodified one; a context, that holds all but the
    layers' weights on the device.
    """

    def __init__(self, skeleton: Skeleton, inputs: BlockInputs) -> None:
        """`inputs`: what goes into the first block, which stays as it is."""
        self.skeleton, self.inputs = skeleton, inputs
        self.wanted = inputs.copied()
        """What the unmodified model has behind the blocks that were put."""
        self.layers: list[dict[str, ScaledCodes]] = []
        """Of each block."""
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}

    def __enter__(self) -> Self:
        self.skeleton.load_outside_(self.inputs.device)
        return self

    def __exit__(self, *_: object) -> None:
        for block in self.skeleton.blocks:
            self.skeleton.release_(block.name)
        self.skeleton.release_outside_()

    def put(self, layers: Mapping[str, Coded], fixed: Callable[[str], bool]) -> None:
        """Add the next block, with codes in the place of the weights of layers; scales of `fixed` ones stay."""
        index, device = len(self.layers), self.inputs.device
        block = self.skeleton.blocks[index]
        self.skeleton.load_(block.name, device)
        self.skeleton.advance_(index, self.inputs, self.wanted)
        modules = self.skeleton.linears(block)
        places = {module: name for name, module in block.module.named_modules(prefix=block.name)}
        made = {}
        for name, coded in layers.items():
            bias = modules[name].bias
            made[name] = ScaledCodes(coded, None if bias is None else bias.detach(), device)
            made[name].growth.requires_grad_(not fixed(name))
            self._forwards[modules[name]] = made[name].forward
            self.skeleton.release_(places[modules[name]])
        self.layers.append(made)

    @tensor_float32()
    def learn_(self, steps: int, seed: int, told: Callable[[], None]) -> tuple[float, float]:
        """Let the scales learn; return the divergence in nats a token before and after.
        `told` is called behind each step.
        """
        layers = [layer for block in self.layers for layer in block.values()]
        learning = [layer for layer in layers if layer.growth.requires_grad]
        groups = [{"params": [layer.growth], "peak": SCALE_RATE / layer.grid.middle} for layer in learning]
        with replaced_forward(self._forwards):
            before = self._mean_divergence()
            if not groups:
                return before, before
            optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=0.0, fused=True)
            for step, batch in enumerate(drawn(self.inputs.batches, steps, seed)):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step / steps, group["peak"], WARMUP)
                self._descend(batch)
                optimizer.step()
                optimizer.zero_grad()
                told()
            after = self._mean_divergence()
        if not after < before:
            torch._foreach_zero_([layer.growth.detach() for layer in learning])
            after = before
        return before, after

    def _descend(self, batch: Batch) -> None:
        """Add the gradient of a batch to those of the scales."""
        states = [self.inputs.at(batch)]
        with torch.no_grad():
            for index in range(len(self.layers)):
                states.append(self._run(index, states[-1], batch))
        left = states.pop().detach().requires_grad_()
        with torch.enable_grad():
            self._divergence(left, batch).backward()  # type: ignore[no-untyped-call]
        outer = left.grad
        for index in reversed(range(len(self.layers))):
            entering = states.pop().detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(self._run(index, entering, batch), outer)
            outer = entering.grad

    def _run(self, index: int, hidden: Tensor, batch: Batch) -> Tensor:
        half = self.skeleton.dtype is not torch.float32
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=half):
            return batch.calls[index].graph(self.skeleton.blocks[index].module, hidden)

    def _divergence(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the mean over the tokens of a batch, by what left the last block."""
        model, blocks = self.skeleton.model, self.skeleton.blocks
        wanted = self.inputs.at(batch, self.wanted).flatten(0, 1)

        def compute(part: Tensor, positions: slice) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                teacher = logits_of_tokens(model, blocks, wanted[positions])
            loss = divergence(logits_of_tokens(model, blocks, part), teacher) / len(wanted)
            return loss, loss.detach()

        at_once = logits_at_once(hidden.device.type, model.get_output_embeddings().weight.shape[0])
        return in_parts(compute, hidden.flatten(0, 1), at_once, [])[0]

    @torch.no_grad()
    def _mean_divergence(self) -> float:
        found = []
        for batch, hidden in self.inputs.each():
            for index in range(len(self.layers)):
                hidden = self._run(index, hidden, batch)
            found.append(self._divergence(hidden, batch))
        return float(torch.stack(found).mean())
