"""Stream a model forward and backward, one block in memory at a time.
It gives what enters each linear layer, and the gradients that leave it.

The gradients are of random probes of the Fisher information of the predictions
(`optkit.algorithms.sensitivity`), a few for each sequence. Sequences run one by one, so that
everything that a layer sees at once, an expert's share of the tokens too, is of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optkit.algorithms.sensitivity import Seen, fisher_probe
from optkit.model.blocks import Call
from optkit.model.head import logits_behind
from optkit.model.prompts import Prompts
from optkit.model.replaced_forward import hooked
from optkit.model.skeleton import Skeleton

POSITIONS_AT_ONCE = 256
"""Positions whose logits are held together."""


class BlockGradients:
    """The hidden states in front of every block, and the gradients of the probes.
    These are behind the block that comes next, from the last on.
    """

    def __init__(self, skeleton: Skeleton, tokens: Tensor | Prompts, device: str, probes: int, seed: int) -> None:
        """tokens: int64 [sequences, sequence_length], or prompts with images. Nothing is computed yet but
        what enters the first block.
        """
        self.skeleton, self.device, self.probes = skeleton, device, probes
        self.generator = torch.Generator(device).manual_seed(seed)
        self.inputs = skeleton.capture_inputs(tokens, device, batch_size=1)
        self.entering: list[Tensor] = [self.inputs.hidden.to("cpu", copy=True)]
        """One for each block that ran forward, and what leaves the last of those: float [sequences,
        sequence_length, hidden].
        """
        self.behind: list[Tensor] = []
        """For each sequence, float [probes, sequence_length, hidden]."""

    def forward_(self, index: int) -> None:
        """Run a loaded block on all sequences and keep what leaves it."""
        self.skeleton.advance_(index, self.inputs)
        self.entering.append(self.inputs.hidden.to("cpu", copy=True))

    def turn_(self) -> None:
        """Draw the probes from the predictions.
        Take them back through the head to the output of the last block.
        """
        skeleton, leaving = self.skeleton, self.entering.pop()
        skeleton.load_outside_(self.device)
        for batch in self.inputs.batches:
            parts = leaving[batch.rows].to(self.device).split(POSITIONS_AT_ONCE, dim=1)
            self.behind.append(torch.cat([self._through_head(part) for part in parts], dim=1))
        skeleton.release_outside_()

    def backward_(self, index: int, layers: Mapping[str, nn.Module]) -> dict[str, list[Seen]]:
        """Return what the layers of a loaded block saw, sequence by sequence.
        Then the block in front of it is next.
        """
        entering = self.entering.pop()
        found: dict[str, list[Seen]] = {name: [] for name in layers}
        for number, batch in enumerate(self.inputs.batches):
            seen, self.behind[number] = self._backward(
                index, entering[batch.rows].to(self.device), batch.calls[index], self.behind[number], layers
            )
            for name, each in seen.items():
                found[name].append(each)
        return found

    def _through_head(self, hidden: Tensor) -> Tensor:
        """float [1, positions, hidden] -> float [probes, positions, hidden]."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = logits_behind(self.skeleton.model, self.skeleton.blocks, leaf)
        gradients = []
        for probe in range(self.probes):
            drawn = fisher_probe(logits.detach().float(), self.generator).to(logits.dtype)
            gradients.append(torch.autograd.grad(logits, leaf, drawn, retain_graph=probe + 1 < self.probes)[0])
        return torch.cat(gradients)

    def _backward(
        self, index: int, hidden: Tensor, call: Call, behind: Tensor, layers: Mapping[str, nn.Module]
    ) -> tuple[dict[str, Seen], Tensor]:
        """Return what the layers saw of one sequence, and the gradients in front of the block.
        These are float [probes, sequence_length, hidden].
        """
        names: list[str] = []
        entered: list[Tensor] = []
        left: list[Tensor] = []

        def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
            def observe(_module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
                names.append(name)
                entered.append(arguments[0].detach().flatten(0, -2))
                left.append(output if output.requires_grad else output.detach().requires_grad_())

            return observe

        watched = hooked(module.register_forward_hook(hook(name)) for name, module in layers.items())
        with watched, torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            leaving = call.graph(self.skeleton.blocks[index].module, leaf)
        each: list[list[Tensor]] = []
        for probe in range(self.probes):
            again = probe + 1 < self.probes
            found = torch.autograd.grad(
                leaving, [leaf, *left], behind[probe][None], retain_graph=again, materialize_grads=True
            )
            each.append(list(found))
        seen: dict[str, Seen] = {}
        for place, (name, inputs) in enumerate(zip(names, entered, strict=True), start=1):
            now = Seen(inputs, torch.stack([found[place].flatten(0, -2) for found in each]))
            seen[name] = seen[name].beside(now) if name in seen else now
        return seen, torch.cat([found[0] for found in each])
