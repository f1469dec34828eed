"""`backend:`, a field of quantizing stages: another library works in its own environment.

A stage takes part by deriving from `Backed` and naming its backends:

    class Gptq(Backed):
        backend: Literal["optkit", "gptqmodel", "llmcompressor"] = "optkit"

What each library makes of the stage's fields stands in `offers.py`; a field that it cannot honour
is refused by name. A recipe without `backend`, or with `backend: optkit`, is what it was: the field
is then in no key. With a library, its pinned packages are in the key too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from optkit.backends.environments import Environment, Environments
from optkit.backends.libraries import LIBRARIES
from optkit.backends.older_transformers import PROBE_TOKENS, check_same_model, hand_over, logits_here
from optkit.backends.process import run_worker, work_directory
from optkit.backends.take_over import take_over
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Layer, Selection, layers_of
from optkit.model.output_layer import outside_of
from optkit.model.shape import ModelShape
from optkit.model.task import Task, is_built_in, refuse_multi_modal
from optkit.packed_tensors.base import LayerFormat, quantization_config
from optkit.packed_tensors.integers import PackedFormat
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Report
from optkit.stages.quantizing.backend_support import OFFERS, Offer
from optkit.stages.quantizing.fitting import either, unknown_architecture
from optkit.stages.quantizing.integers import WeightQuantizer
from optkit.stages.quantizing.recounting import recount

OWN = "optkit"
MODELS_IN_MEMORY = 2
"""A library holds the whole model, and about as much again while it works and saves."""


class Backed(WeightQuantizer):
    """A stage that another library can do in its place."""

    @model_validator(mode="after")
    def _only_what_the_backend_has(self) -> Self:
        offer = self._offer
        if offer is None:
            return self
        if without := sorted(self.model_fields_set - offer.fields):
            raise ValueError(
                f"`{'`, `'.join(without)}`: {offer.library} has nothing like it. Leave it out, or take backend: {OWN}; "
                f"{offer.library} reads {', '.join(sorted(offer.fields - {'backend'}))}"
            )
        if (calibration := getattr(self, "calibration", None)) and (why := calibration.unread_by(offer.library)):
            raise ValueError(f"calibration.{why}. Leave it out, or take backend: {OWN}")
        for name, values in offer.values.items():
            if (value := self._default(name, getattr(self, name))) not in values:
                has = either([_text(each) for each in values])
                raise ValueError(
                    f"{name}: {offer.library} has {has}, not {_text(value)}. "
                    f"Set {name} to {has}, or take backend: {OWN}"
                )
        return self

    @model_serializer(mode="wrap")
    def _what_decides_the_result(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        offer = self._offer
        if offer is None:
            dumped.pop("backend", None)
            return dumped
        return {name: self._default(name, value) for name, value in dumped.items() if name in offer.fields}

    def made_with(self) -> dict[str, Any]:
        """Return the pinned packages of the library that does the work.
        Another version makes other weights.
        """
        if self._offer is None:
            return {}
        library = LIBRARIES[self._offer.library]
        return {"packages": [*library.requirements, *library.bare]}

    @property
    def packing(self) -> str:
        """The format that is written: that of the library if it has one of its own."""
        return str(self._default("format", super().packing))

    def _default(self, name: str, value: Any) -> Any:
        """Return the value of a field, or the library's own default if the recipe says nothing."""
        offer = self._offer
        return value if offer is None or name in self.model_fields_set else offer.defaults.get(name, value)

    @property
    def _offer(self) -> Offer | None:
        return OFFERS.get((self.kind, getattr(self, "backend", OWN)))

    def layer_format(self, layer: Layer) -> PackedFormat:
        """Return the form of a layer; libraries write no codes in whole bytes."""
        return super().layer_format(replace(layer, whole_bytes=False) if self._offer else layer)

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Quantize with optkit, or with the library that `backend` names.

        Raises what the stage itself raises; StageError with a library's exception, if its
        transformers reads another model, and if what it wrote is not what was asked for;
        OptkitError if its environment cannot be built.
        """
        return (
            run_with(self, self._offer, source, target, context)
            if self._offer
            else super().run(source, target, context)
        )

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return what it leaves; a library holds the whole model in memory."""
        if self._offer and shape.task is Task.UNKNOWN:
            raise unknown_architecture(f"{self.kind}.backend", f"{self._offer.library} opens", f"Take backend: {OWN}")
        cost, left = super().predict(shape, device)
        if self._offer is None:
            return cost, left
        held = MODELS_IN_MEMORY * shape.size_bytes
        on_gpu = device.startswith("cuda")
        return cost.model_copy(update={"ram_bytes": held, "gpu_bytes": held if on_gpu else 0}), left


def run_with(stage: Backed, offer: Offer, source: Path, target: Path, context: Context) -> Report:
    """Let a library quantize, and take over what it wrote."""
    started = time.monotonic()
    checkpoint = Checkpoint(source)
    _refuse(offer, checkpoint.config, context.device, f"{stage.kind}.backend", f"Take backend: {OWN}")
    selection = stage.select_layers(layers_of(checkpoint.shape), outside_of(checkpoint.shape))
    formats = stage.layer_formats(selection)
    _refuse_shapes(offer, selection, stage.kind)
    environments = Environments()
    calibration: Calibration | None = getattr(stage, "calibration", None)
    with environments.using(offer.library, context.progress) as environment, work_directory(target) as work:
        request = _request(stage, offer, checkpoint, selection, formats, environment, work, context)
        written = Path(request["target"])
        written.mkdir()
        apart = _Agreement(Path(source), request, environment)
        library_says = run_worker(environment, request, context.progress, environments.log(offer.library), apart.check)
        take_over(written, checkpoint, target, selection.layers, offer.library, context.trust_remote_code)
    return Report(
        changed=len(selection.layers),
        skipped=dict(selection.skipped),
        details={
            **library_says,
            **recount(Checkpoint(target), checkpoint, selection, formats),
            "backend": offer.library,
            "versions": environment.told_versions,
            "logits_apart": apart.apart,
            "seconds": round(time.monotonic() - started, 2),
        },
        calibrated_on=(calibration.identity(),) if calibration else (),
    )


class _Agreement:
    """What both versions of transformers make of the float model.
    They are compared as soon as the worker has its logits.
    """

    def __init__(self, source: Path, request: Mapping[str, Any], environment: Environment) -> None:
        self.source, self.request, self.environment = source, request, environment
        self.apart = 0.0
        self.here = logits_here(source, request["probe"], request["dtype"])

    def check(self, file: Path) -> None:
        """Raise StageError if the logits in a file are those of another model."""
        from safetensors.torch import load_file

        version = self.environment.told_versions["transformers"]
        there = load_file(file)["logits"]
        self.apart = check_same_model(self.here, there, self.request["dtype"], self.environment.name, version)


def _request(
    stage: Backed,
    offer: Offer,
    checkpoint: Checkpoint,
    selection: Selection,
    formats: Mapping[str, LayerFormat],
    environment: Environment,
    work: Path,
    context: Context,
) -> dict[str, Any]:
    """Return what the worker is told; see `optkit.backends.workers.launch.Job`."""
    calibration: Calibration | None = getattr(stage, "calibration", None)
    windows = calibration.tokens(checkpoint.directory, context.data).tolist() if calibration else []
    vocabulary = int(checkpoint.config.get("vocab_size", PROBE_TOKENS))
    probe = windows[0][:PROBE_TOKENS] if windows else [index % vocabulary for index in range(PROBE_TOKENS)]
    positions = int(checkpoint.config.get("max_position_embeddings") or PROBE_TOKENS)
    return {
        "method": stage.kind,
        "source": str(hand_over(checkpoint.directory, work / "source", environment.told_versions["transformers"])),
        "target": str(work / "written"),
        "layers": {name: _scheme(form) for name, form in formats.items()},
        "kept": sorted(selection.skipped),
        "quantization": quantization_config(formats, selection.skipped),
        "blocks": len({checkpoint.shape.block(f"{name}.weight") for name in layers_of(checkpoint.shape)}),
        "fields": {name: value for name, value in stage.model_dump(mode="json").items() if name in offer.passed},
        "device": context.device,
        "dtype": checkpoint.dtype,
        "seed": context.seed,
        "windows": windows,
        "probe": probe[:positions],
    }


def _scheme(form: LayerFormat) -> dict[str, Any]:
    group_size = getattr(form, "group_size", None)
    return {
        "bits": getattr(form, "bits", 4),
        "group_size": group_size or -1,
        "symmetric": getattr(form, "symmetric", True),
    }


def _refuse(offer: Offer, config: Mapping[str, Any], device: str, where: str, remedy: str) -> None:
    if offer.needs_gpu and device == "cpu":
        raise StageError(f"{offer.library} needs a GPU for it", where=where, why=offer.needs_gpu, remedy=remedy)
    if "auto_map" in config and not is_built_in(str(config.get("model_type", ""))):
        what = f"the model needs code of its own ({', '.join(sorted(map(str, dict(config['auto_map']).values())))})"
        why = "It was written for one version of transformers, and the library has another"
        raise StageError(what, where=where, why=why, remedy=remedy)
    why = "Libraries name its layers in their own ways, which optkit cannot hold against the checkpoint's"
    refuse_multi_modal(config, where, why, remedy)


def _refuse_shapes(offer: Offer, selection: Selection, kind: str) -> None:
    odd = next((layer for layer in selection.layers.values() if layer.outputs % offer.outputs_multiple), None)
    if odd:
        raise StageError(
            f"{odd.outputs} outputs are not a multiple of {offer.outputs_multiple}",
            where=odd.name,
            why=f"{offer.library} searches the clipping of so many at once",
            remedy=f"Take {kind}.backend: {OWN}",
        )


def _text(value: Any) -> str:
    """Return a value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)
