"""Measure the sensitivity of a model's layers, from a model's name to the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.errors import SourceError, UsageError
from optkit.execute import materialize
from optkit.model.as_floats import as_floats
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Layer, layers_of, select
from optkit.model.output_layer import outside_of
from optkit.model.shape import without_indices
from optkit.model.task import ENCODING, phrase_of
from optkit.pipeline import plan
from optkit.progress import Progress, SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.reports.sensitivity.report import LayerRow, SensitivityReport, order_layers
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.sensitivity.budget import Choice
from optkit.store.shared import open_store
from optkit.trust import say_code

if TYPE_CHECKING:
    from optkit.stages.sensitivity.measure import Rounding


def measure_model(
    model: str,
    *,
    calibration: Calibration,
    choices: Sequence[Choice],
    rounding: str = "gptq",
    device: str | None = None,
    store: Path | None = None,
    data: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> SensitivityReport:
    """Return what quantizing each layer alone would do to a model's predictions, for each choice.

    Of a packed model it is that of the floats which it stands for. Raises UsageError if a choice fits
    no layer, SourceError for packed weights that nobody here reads and if the text is too short.
    """
    progress = progress or SilentProgress()
    shelf = open_store(store, progress)
    wanted = load_recipe({"model": model, "evals": ["footprint"]}).trusting(trust_remote_code)
    todo = plan(wanted, device=device, store=shelf, data=data)
    say_code(todo.recipe, progress)
    context = Context(device=todo.device, progress=progress, data=data, trust_remote_code=trust_remote_code)
    with shelf.using([todo.steps[0].key]):
        place = materialize(todo, 0, shelf, context, set())
        packed = todo.steps[0].shape.quant_method
        with as_floats(place, trust_remote_code, todo.device) if packed else nullcontext(place) as floats:
            checkpoint = Checkpoint(floats)
            return _measure(model, checkpoint, calibration, choices, "rtn" if rounding == "rtn" else "gptq", context)


def _measure(
    model: str,
    checkpoint: Checkpoint,
    calibration: Calibration,
    choices: Sequence[Choice],
    rounding: Rounding,
    context: Context,
) -> SensitivityReport:
    if checkpoint.shape.task in ENCODING:
        what = "the sensitivity of layers is measured on what a causal language model predicts"
        why = f"It is {phrase_of(ENCODING)} ({', '.join(checkpoint.config['architectures'])})"
        remedy = "Leave out layers of onnx_quantize by `exclude`, and compare what the eval embedding says"
        raise SourceError(what, where=model, why=why, remedy=remedy)
    import torch

    from optkit.model.skeleton import Skeleton
    from optkit.stages.sensitivity.measure import grids_of, measure_sensitivity

    selection = select(layers_of(checkpoint.shape), tuple(outside_of(checkpoint.shape)), ("*",), (), "sensitivity")
    skipped = dict(selection.skipped)
    layers: dict[str, Layer] = {}
    for name, layer in selection.layers.items():
        unfit = [choice.form.label for choice in choices if not choice.fits(layer)]
        if unfit:
            skipped[name] = f"{unfit[0]} does not fit its {layer.inputs} columns"
        else:
            layers[name] = layer
    if not layers:
        name, reason = next((name, reason) for name, reason in skipped.items() if name in selection.layers)
        what = f"no layer can have all of the choices ({name}: {reason})"
        raise UsageError(what, where="--choices", remedy="Take other group sizes")
    text = calibration.pinned(context.data)
    tokens = calibration.tokens(checkpoint.directory, context.data, context.trust_remote_code)
    skeleton = Skeleton(checkpoint, dtype=torch.float32, trust_remote_code=context.trust_remote_code)
    grids = grids_of(checkpoint, {name: [choice.form for choice in choices] for name in layers})
    found = measure_sensitivity(skeleton, tokens, grids, rounding, context.device, context.progress)
    dtypes = {name: checkpoint.tensors[f"{name}.weight"].dtype for name in layers}
    weights = sum(layer.outputs * layer.inputs for layer in layers.values())
    stored = [sum(choice.size_bytes(layer, dtypes[name]) for name, layer in layers.items()) for choice in choices]
    rows = [_row(checkpoint, layer, found[name]) for name, layer in layers.items()]
    return SensitivityReport(
        model=model,
        rounding=rounding,
        protocol=f"{text.dataset} {text.split}, {len(tokens)} windows of {tokens.shape[1]} tokens, float32",
        choices=tuple(choice.word for choice in choices),
        labels=tuple(choice.form.label for choice in choices),
        bits_per_weight=tuple(round(8 * size / weights, 4) for size in stored),
        layers=order_layers(rows),
        skipped={**skipped, **skeleton.fused},
    )


def _row(checkpoint: Checkpoint, layer: Layer, divergence: Sequence[float]) -> LayerRow:
    place = checkpoint.shape.block(f"{layer.name}.weight")
    if place is None:
        raise SourceError(f"{layer.name} belongs to no block", where=str(checkpoint.directory))
    kind = without_indices(layer.name.removeprefix(f"{place[0]}.{place[1]}."))
    return LayerRow(
        name=layer.name, kind=kind, block=place[1], weights=layer.outputs * layer.inputs, divergence=tuple(divergence)
    )
