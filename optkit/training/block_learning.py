"""Learn the codes and scales of one decoder block at a time, so that it returns what the unmodified
model has there.

    minimize the mean over tokens and readings R of |R(B(x; codes, scales)) - R(y)|^2 / |R(y)|^2

x is what the quantized model has in front of the block, and y what the unmodified model has behind
it. So a block makes up for the errors of those before it (GPTAQ, arXiv:2504.02692). R are the norm
of the next block and the gains of all later ones (`readings`). Each token counts the same. Gradients
go straight through the rounding, as in `fake_quantization` (Block-AP of EfficientQAT,
arXiv:2407.11062); a step moves a weight by a share of its layer's mean scale, so one learning rate
serves all layers and bits (SignRound, arXiv:2309.05516). What is kept is a mean over the last steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from optkit.algorithms.grid import QuantizedWeight
from optkit.common.tensor_float32 import tensor_float32
from optkit.model.blocks import Batch, BlockInputs, Call
from optkit.model.readings import readings
from optkit.model.replaced_forward import replaced_forward
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import float_weight, put_weight_
from optkit.training.fake_quantization import Coded, FakeQuantized, Scales
from optkit.training.optimizer import BETAS, learning_rate
from optkit.training.recorded_step import RecordedStep
from optkit.training.student import ZerosStay

WEIGHT_RATE = 4e-3
"""Highest learning rate of the weights behind the codes, in mean scales of their layer."""
SCALE_RATE = 2e-3
"""Highest learning rate of the logarithms of the scales."""
WARMUP = 0.05
"""Share of the steps in which the learning rates rise."""
AVERAGED = 1 / 6
"""Share of the steps over which the mean is taken that is kept: 20 of 120."""


class BlockLearner:
    """Runs the unmodified model beside the quantized one, block by block, and teaches each block."""

    def __init__(
        self,
        skeleton: Skeleton,
        inputs: BlockInputs,
        steps: int,
        seed: int,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`inputs`: what goes into the first block of both; `told` hears of each step."""
        self.skeleton, self.steps, self.seed, self.told = skeleton, steps, seed, told
        self.wanted = inputs.copied()
        """What the unmodified model has behind the blocks that were entered."""
        self.weights: dict[str, Tensor] = {}
        """Of the layers of the block that was entered last, float32 [out, in]."""
        self._entered = 0
        self._readings: Sequence[Callable[[Tensor], Tensor]] = ()

    def enter_(self, index: int, inputs: BlockInputs, modules: Mapping[str, nn.Module]) -> None:
        """Keep what a loaded block with its float weights returns, and the weights of its layers.
        Blocks before it that a run before this one finished are run again.
        """
        for finished in range(self._entered, index):
            with self.skeleton.loaded(self.skeleton.blocks[finished], str(inputs.device), ""):
                self.skeleton.advance_(finished, inputs, self.wanted)
        self.skeleton.advance_(index, inputs, self.wanted)
        self.weights = {name: float_weight(module).clone() for name, module in modules.items()}
        self._entered = index + 1

    @tensor_float32()
    def learn_(
        self,
        index: int,
        inputs: BlockInputs,
        modules: Mapping[str, nn.Module],
        starts: Mapping[str, Coded],
        zeros_stay: Collection[str],
    ) -> tuple[dict[str, QuantizedWeight], tuple[float, float]]:
        """Return the codes of the layers in `starts`, and the loss before and after.
        The modules compute with them from then on. Codes that do not lower the loss are not taken.

        `zeros_stay`: layers whose weights of 0 stay 0.
        """
        layers = {name: _layer(self.weights[name], modules[name], each) for name, each in starts.items()}
        for name in zeros_stay:
            layers[name].weight.register_hook(ZerosStay(layers[name].weight))
        first = inputs.batches[0]
        self._readings = readings(self.skeleton, index, inputs.at(first), first.calls[index])
        with replaced_forward({modules[name]: layer.forward for name, layer in layers.items()}):
            before = self._mean_loss(index, inputs)
            self._train_(index, inputs, layers)
            after = self._mean_loss(index, inputs)
        if not after < before:
            return {name: each.weight for name, each in starts.items()}, (before, before)
        learned = {name: layer.codes() for name, layer in layers.items()}
        for name, weight in learned.items():
            put_weight_(modules[name], weight.dequantize())
        return learned, (before, after)

    def _train_(self, index: int, inputs: BlockInputs, layers: Mapping[str, FakeQuantized]) -> None:
        if not layers:
            return
        weights = [each.weight for each in layers.values()]
        growths = [each.growth for each in layers.values() if each.growth.requires_grad]
        peaks = [WEIGHT_RATE * each.base.abs().mean() for each in layers.values()]
        peaks += [peaks[0].new_tensor(SCALE_RATE)] * len(growths)
        learning = [*weights, *growths]
        optimizer, set_rates = _optimizer(learning, torch.stack(peaks))
        means, share = [each.detach().clone() for each in learning], min(1.0, 1 / (AVERAGED * max(1, self.steps)))

        def descend(call: Call, hidden: Tensor, wanted: Tensor) -> None:
            optimizer.zero_grad()  # first: a recording that failed leaves gradients that nobody computed
            with torch.enable_grad():
                self._loss(index, call, hidden, wanted).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for mean, each in zip(means, learning, strict=True):
                mean.lerp_(each.detach(), share)

        steps: dict[tuple[int, torch.Size], RecordedStep] = {}  # each distinct call has its own
        for step, batch in enumerate(drawn(inputs.batches, self.steps, self.seed + index)):
            set_rates(learning_rate(step / self.steps, 1.0, WARMUP))
            call, hidden = batch.calls[index], inputs.at(batch)
            recorded = steps.setdefault((id(call), hidden.shape), RecordedStep(partial(descend, call)))
            recorded(hidden, inputs.at(batch, self.wanted))
            self.told(f"{self.skeleton.blocks[index].name} learns, step {step + 1} of {self.steps}")
        for mean, each in zip(means, learning, strict=True):
            each.detach().copy_(mean)

    def _loss(self, index: int, call: Call, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean squared error of each token relative to its mean square, as later blocks read it."""
        block, half = self.skeleton.blocks[index].module, self.skeleton.dtype is not torch.float32
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=half):
            found = call.graph(block, hidden).float()
        return torch.stack([_error(read(found), read(wanted.float())) for read in self._readings]).mean()

    @torch.no_grad()
    def _mean_loss(self, index: int, inputs: BlockInputs) -> float:
        losses = [
            self._loss(index, batch.calls[index], hidden, wanted)
            for (batch, hidden), (_, wanted) in zip(inputs.each(), inputs.each(self.wanted), strict=True)
        ]
        return float(torch.stack(losses).mean())


def _error(found: Tensor, wanted: Tensor) -> Tensor:
    size = wanted.square().mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((found - wanted).square().mean(-1) / size).mean()


def drawn(batches: Sequence[Batch], steps: int, seed: int) -> Iterator[Batch]:
    """Yield a batch for each step: all of them in a random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        yield batches[order.pop()]


def _optimizer(
    parameters: Sequence[nn.Parameter], peaks: Tensor
) -> tuple[torch.optim.Optimizer, Callable[[float], object]]:
    """Return AdamW with a rate for each parameter, and what sets the rates to a share of their peaks.
    They lie in one tensor on the device, where a recorded step reads them.
    """
    rates = torch.zeros_like(peaks)
    groups = [{"params": [each], "lr": rate} for each, rate in zip(parameters, rates.unbind(), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True, capturable=rates.is_cuda)
    return optimizer, lambda share: torch.mul(peaks, share, out=rates)


def _layer(weight: Tensor, module: nn.Module, start: Coded) -> FakeQuantized:
    bias = module.bias if isinstance(module.bias, nn.Parameter) else None
    scales: Scales = "learned" if start.grid.learns_scales else "fixed"
    return FakeQuantized(weight, bias, start.weight, start.grid, scales, start.round_inputs)
