"""Which layers of a quantized artifact cost the most.
It predicts the divergence that the error of each layer's weights causes by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from optkit.common.field_types import Count, SequenceLength, Several
from optkit.errors import EvalError
from optkit.measure import Eval, EvalContext, Metric, Session
from optkit.model.adapter import has_adapter
from optkit.model.checkpoint import Checkpoint
from optkit_evals.meanings import row
from optkit_evals.windows import WindowedText

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.kernels.stored_layer import QuantizedLayer

LARGEST_CHANGE = 0.02
"""Of a tensor's largest value: what rounding the other tensors to bfloat16 may change (it is
1/256), and no more.
"""


class Sensitivity(WindowedText, Eval):
    """The divergence that each quantized layer's error causes alone, predicted to second order.
    It gives the sum, and the layers that cost most.

    The errors are those of the artifact's own weights; what they do is predicted from gradients of
    the unmodified model's predictions (see `optkit.algorithms.sensitivity`), so the artifact is not
    run. If the sum is far from the measured divergence, the errors are too large for the
    prediction. Or something else than the rounding of weights is at work (rounded activations, the
    KV cache). An adapter beside the weights is refused: that of one layer makes up for what others
    do, and so the sum says nothing about it.
    """

    kind: ClassVar[str] = "sensitivity"
    example: ClassVar[str] = "- sensitivity: {dataset: wikitext2, windows: 16, worst: 10}"
    compares: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True
    layers_alone: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("predicted_kl_divergence", "layer_kl_divergence"), "nats/token"
    )

    window: SequenceLength = 512
    """Tokens of a window."""
    windows: Several | None = 16
    """Windows to measure on, from the start of the text; all of them when null."""
    worst: Count = 10
    """Layers to list, those that cost most."""

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Predict.
        Raises EvalError without a baseline and as `quantized_alone` and `WindowedText.cut` do.
        """
        import torch

        from optkit.algorithms.sensitivity import divergences
        from optkit.model.skeleton import Skeleton
        from optkit.stages.sensitivity.measure import layer_gradients

        if context.baseline is None:
            raise EvalError("there is no baseline", where="sensitivity", why="Errors are differences from its weights")
        before, after = Checkpoint(context.baseline.directory), Checkpoint(session.directory)
        layers = quantized_alone(before, after)
        windows = self.cut(context.baseline, context)
        device = context.baseline.device
        skeleton = Skeleton(before, dtype=torch.float32)
        found: dict[str, float] = {}
        for name, weight, seen in layer_gradients(
            skeleton, windows.tokens, layers, device, context.progress, context.seed
        ):
            change = stored_weight(layers[name], device) - weight
            found[name] = float(divergences(seen, [change])[0]) / windows.tokens.numel()
        if missing := layers.keys() - found.keys():
            outside = f"{len(missing)} layers outside the decoder blocks"
            context.warn(f"sensitivity: {outside} are not counted ({min(missing)})")
        protocol = f"{windows.protocol}; second order in the errors of the weights, each layer alone"
        summed = f"{protocol}, summed over {len(found)} layers"
        total = row(self, "predicted_kl_divergence", sum(found.values()), summed)
        worst = sorted(found, key=lambda name: (-found[name], name))[: self.worst]
        alone = (row(self, "layer_kl_divergence", found[name], protocol, labels={"layer": name}) for name in worst)
        return [total, *alone]


def quantized_alone(before: Checkpoint, after: Checkpoint) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a checkpoint that is otherwise as it was before. Raises
    EvalError if it is not.
    """
    from optkit.kernels.quant_methods import quantized_layers

    layers = quantized_layers(after)
    where, remedy = str(after.directory), "Take this eval out"
    if not layers:
        what, why = "no layer is quantized in a form that optkit reads", "The errors are those of quantized weights"
        raise EvalError(what, where=where, why=why, remedy=remedy)
    if has_adapter(after.directory):
        why = "It makes up for the errors of all layers together, and this eval predicts what those of each do alone"
        remedy += ", or put it in a recipe that ends before the adapter is trained"
        raise EvalError("an adapter lies beside its packed weights", where=where, why=why, remedy=remedy)
    replaced = {f"{name}.weight" for name in layers}
    for name in before.tensors:
        if name not in replaced and (name not in after.tensors or not _alike(before.read(name), after.read(name))):
            more = "A stage changed more than the layers that are quantized (folded scales, a rotation)"
            what, why = f"{name} differs from the unmodified model's", f"{more}, so their errors are not known"
            raise EvalError(what, where=where, why=why, remedy=remedy)
    return layers


def stored_weight(layer: QuantizedLayer, device: str) -> Tensor:
    """Return the weight that a quantized layer computes with, float32 [out, in]."""
    import torch

    module, _ = layer.build(None, torch.float32, device)
    if "input_scale" in module._buffers:
        # a scale for each token rounds the rows of the identity exactly, a calibrated one does not
        module._buffers["input_scale"] = None
    with torch.no_grad():
        columns: Tensor = module(torch.eye(layer.shape[1], device=device))
    return columns.T


def _alike(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape:
        return False
    if not before.is_floating_point():
        return bool(before.equal(after))
    return bool((before.float() - after.float()).abs().max() <= LARGEST_CHANGE * before.float().abs().max())
