"""Stage `lora_recover`: adapters beside the layers of a pruned or quantized model.
They are trained to recover what it lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from optkit.common.field_types import AtLeastOne, Count, Distinct, Factor, LearningRate, Name, Part
from optkit.errors import StageError
from optkit.model.adapter import ADAPTER, DOWN, FEW_BITS, LEARNABLE, PREFIX, UP
from optkit.model.checkpoint import INDEX, Checkpoint
from optkit.model.linear_layers import CONV1D_MODELS, Layer, Selection, layers_of, refuse_unmatched, select
from optkit.model.packed_floats import float_shape
from optkit.model.read_weights import Read, reads_of
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.writer import copy_companions, link_or_copy
from optkit.stage import Context, Cost, Format, Report
from optkit.stages.teaching.layers import linear_modules
from optkit.stages.teaching.stage import CHECKPOINTS, TrainingStage
from optkit.stages.teaching.training_refusals import check_devices, check_positions

if TYPE_CHECKING:
    from optkit.training.adapted_student import AdaptedStudent
    from optkit.training.student import Student

EIGHT_BITS = frozenset({"float-quantized", "int-quantized", "naive-quantized"})
"""Formats of compressed-tensors whose layers round their inputs, or hold floats."""
EXPERT = "an expert: transformers holds them in one tensor, and adapters are for layers"
NUMBERS = 4
"""In a checkpoint for each number of an adapter: itself, the best so far, two of AdamW."""


class LoraRecover(TrainingStage):
    """Recover accuracy by an adapter beside the layers, which the unmodified model teaches.
    It is a LoRA (arXiv:2106.09685) or a DoRA.

    It is merged into float weights, such as pruned ones. Packed weights stay as they are, and the
    adapter lies beside them in `adapter/`: optkit applies it, peft loads it over transformers, vLLM
    serves it as a LoRA.
    """

    kind: ClassVar[str] = "lora_recover"
    example: ClassVar[str] = "- nf4\n- lora_recover: {texts: [{dataset: c4}], tokens: 1_000_000, rank: 16}"
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})
    requires: ClassVar[tuple[str, ...]] = ("peft>=0.18",)
    version: ClassVar[int] = 4

    learning_rate: LearningRate = 5e-4
    """Highest learning rate."""
    rank: Count = 16
    """Rank of the matrices."""
    alpha: Factor = 32.0
    """The product of the two counts alpha / rank, beside layers of another rank too."""
    ranks: dict[Name, Count] = {}
    """Glob pattern on full names -> another rank for the layers that it matches; the longest
    pattern that matches a layer decides.
    """
    dropout: Part = 0.0
    """Share of the inputs that the adapters do not see in a step."""
    method: Literal["lora", "dora"] = "lora"
    """`dora` (arXiv:2402.09353) trains the length of each output's weights too; for float weights
    alone.
    """
    include: AtLeastOne[Name] = ("*",)
    """Layers that get an adapter, as glob patterns on full names such as
    `model.layers.0.mlp.up_proj`; lm_head, embeddings and routers of experts get none."""
    exclude: Distinct[Name] = ()
    """Layers to leave out of those, as glob patterns."""
    initialization: Literal["zero", "loftq"] = "zero"
    """`zero`: the adapters begin without effect. `loftq` (arXiv:2310.08659, one round): as the best
    product of their rank for what the weights lost of those that the recipe starts from."""
    keep_zeros: bool | None = None
    """Let pruned weights stay zeros; left out, in the layers of which at least a quarter is zero."""

    @classmethod
    def leaves(cls, given: Format) -> Format:
        return Format.ADAPTED if given is Format.QUANTIZED else given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.method == "dora" and self.initialization == "loftq":
            raise ValueError(
                "DoRA starts from the lengths of the base's weights. Set initialization: zero, or method: lora."
            )
        if self.keep_zeros and self.initialization == "loftq":
            raise ValueError(
                "loftq fills zeros again that keep_zeros keeps. Set initialization: zero, or keep_zeros: false."
            )
        if self.parallel == "fsdp":
            raise ValueError(
                "adapters are too small to be divided, and what they stand beside gets no "
                "gradient. Use `parallel: ddp`."
            )
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Train adapters as `TrainingStage.run` does; raises also what `predict` does."""
        report = super().run(source, target, context)
        if "skipped" not in report.details:  # another process than the first
            return report
        details = dict(report.details)
        skipped: Mapping[str, str] = details.pop("skipped")
        notes: tuple[str, ...] = ()
        if (target / ADAPTER).is_dir():
            largest = max(int(rank) for rank in details["ranks"])
            notes = (
                "the adapter lies in adapter/ beside the packed weights: optkit applies it; transformers needs peft"
                " (`PeftModel.from_pretrained(model, DIRECTORY/adapter)`, a model of compressed-tensors "
                "opened with `quantization_config=CompressedTensorsConfig(dequantize=True)`);"
                f" vLLM serves it as a LoRA (`--enable-lora --max-lora-rank {largest} --lora-modules "
                "NAME=DIRECTORY/adapter`)",
            )
        return replace(report, skipped=skipped, details=details, notes=(*report.notes, *notes))

    def predict_beside(self, shape: ModelShape, device: str, origin: ModelShape) -> tuple[Cost, ModelShape]:
        """Return the weights and the adapter that it leaves, and its memory.
        The memory is that of a float32 model, teacher, adapters and activations.

        Raises StageError for patterns that match nothing, a rank larger than a layer, what packed
        weights do not allow, and what `TrainingStage.predict_beside` does.
        """
        check_positions(self, shape)
        check_devices(self, shape, device)
        packed = bool(shape.config.get("quantization_config"))
        self._refuse_unfit(packed)
        if packed and (what := _without_gradients(shape.config["quantization_config"])):
            raise StageError(
                f"there are no gradients through {what}", where="lora_recover", why=FEW_BITS, remedy=LEARNABLE
            )
        floats = float_shape(shape, "float32") if packed else shape
        selection = self._select(layers_of(floats), shape.config, packed)
        ranks = self._ranks(selection)
        adapter = {
            f"{ADAPTER}/{PREFIX}{name}{half}": info
            for name, layer in selection.layers.items()
            for half, info in (
                (DOWN, TensorInfo("F32", (ranks[name], layer.inputs))),
                (UP, TensorInfo("F32", (layer.outputs, ranks[name]))),
            )
        }
        added = sum(info.elements for info in adapter.values())
        self._check_teacher(shape, origin)
        start = None if origin.config.get("quantization_config") else origin
        kinds = self._memory(floats, device, added, start)
        left = ModelShape(config=shape.config, tensors={**shape.tensors, **adapter}) if packed else shape
        disk = left.size_bytes + CHECKPOINTS * 4 * NUMBERS * added
        if device == "cpu":
            return Cost(disk_bytes=disk, ram_bytes=self.devices * kinds.total, by_kind=kinds.by_kind()), left
        return Cost(disk_bytes=disk, ram_bytes=shape.size_bytes, gpu_bytes=kinds.total, by_kind=kinds.by_kind()), left

    def _refuse_unfit(self, packed: bool) -> None:
        if packed and self.method == "dora":
            raise StageError(
                "DoRA cannot be beside packed weights",
                where="lora_recover.method",
                why="It scales the whole weight of each output: packed layers would have to be unpacked "
                "for it, and vLLM knows no DoRA",
                remedy="Set method: lora, or put the stage before the one that quantizes",
            )
        if packed and self.keep_zeros:
            raise StageError(
                "there are no zeros to keep in packed weights",
                where="lora_recover.keep_zeros",
                why="They stay as they are, and the adapter stays beside them",
                remedy="Leave keep_zeros out",
            )

    def _select(self, layers: Mapping[str, Layer], config: Mapping[str, Any], packed: bool) -> Selection:
        """Return the layers that get an adapter, by their names in the checkpoint."""
        selection = select(layers, (), self.include, self.exclude, "lora_recover")
        refuse_unmatched("lora_recover.ranks", self.ranks, selection.layers)
        reads = reads_of(config)
        left = {name: str(Read.COMPUTES) for name in selection.layers if Read.COMPUTES in reads(name)}
        left |= {name: EXPERT for name in selection.layers if packed and ".experts." in name}
        return selection.without(left, "lora_recover")

    def _ranks(self, selection: Selection) -> dict[str, int]:
        """Return the rank beside each layer. Raises StageError for one that is larger than the
        layer.
        """
        found = {}
        for name, layer in selection.layers.items():
            matching = [pattern for pattern in self.ranks if fnmatchcase(name, pattern)]
            rank = self.ranks[max(matching, key=len)] if matching else self.rank
            if layer.outputs and rank > min(layer.outputs, layer.inputs):
                raise StageError(
                    f"rank {rank} is larger than the layer, which is {layer.outputs} x {layer.inputs}",
                    where=f"lora_recover.{'ranks' if matching else 'rank'}: {name}",
                    why="A product of that rank would be the whole weight",
                    remedy=f"Use at most {min(layer.outputs, layer.inputs)}, or give the layer a "
                    "rank of its own in `ranks`",
                )
            found[name] = rank
        return found

    def _student(self, source: Path, context: Context) -> AdaptedStudent:
        from optkit.training.adapted_student import adapt
        from optkit.training.adapters import AdapterForm, Origin
        from optkit.training.packed_student import open_packed_student
        from optkit.training.student import SPARSE, open_student

        packed = bool(Checkpoint(source).quantization)
        self._refuse_unfit(packed)
        trust = context.trust_remote_code
        if packed:
            student = open_packed_student(source, context.device, context.progress, trust)
        else:
            student = open_student(source, context.device, trust)
        modules = linear_modules(student)
        selection = self._select({layer.name: layer for layer in modules.values()}, student.checkpoint.config, packed)
        ranks = self._ranks(selection)
        by_module = {name: ranks[layer.name] for name, layer in modules.items() if layer.name in ranks}
        form = AdapterForm(by_module, self.alpha / self.rank, self.method == "dora", self.dropout)
        zeros = None if packed or self.keep_zeros is False else 0.0 if self.keep_zeros else SPARSE
        origin = None
        if self.initialization == "loftq":
            if context.origin is None:
                raise StageError(
                    "there is no model to begin from",
                    where="lora_recover.initialization",
                    remedy="Set initialization: zero",
                )
            first = Checkpoint(context.origin)
            origin = Origin(first, first.config.get("model_type") in CONV1D_MODELS, student.tensor_names)
        return adapt(student, form, zeros, origin, selection.skipped)

    def _details(self, student: Student) -> dict[str, Any]:
        return student.details()  # type: ignore[attr-defined, no-any-return]

    def _write(self, student: Student, target: Path, context: Context) -> int:
        from optkit.model.empty_model import stored_dtype
        from optkit.training.adapters import merge_, write_adapter
        from optkit.training.student import write_student

        checkpoint = student.checkpoint
        if not checkpoint.quantization:
            merge_(student.model)
            return write_student(student, target, context.trust_remote_code)
        for file in sorted({*checkpoint.files.values(), checkpoint.directory / INDEX}):
            if file.is_file():
                link_or_copy(file, target / file.name, link=context.may_link)
        copy_companions(checkpoint.directory, target, context.trust_remote_code)
        shutil.copyfile(checkpoint.directory / "config.json", target / "config.json")
        return write_adapter(student.model, student.config, target / ADAPTER, stored_dtype(checkpoint))  # type: ignore[attr-defined]


def _without_gradients(config: Mapping[str, Any]) -> str:
    """Return which weights a `quantization_config` has, if nothing can be learned beside them."""
    if config.get("load_in_8bit"):
        return "8-bit weights of bitsandbytes"
    groups = (config.get("config_groups") or {}).values()
    formats = {config.get("format"), *(group.get("format") for group in groups)} & EIGHT_BITS
    formats |= {group.get("format") for group in groups if group.get("input_activations")}
    return " and ".join(f"{each} weights" for each in sorted(formats))
