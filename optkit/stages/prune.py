"""Stage `prune`: set the weights of linear layers to 0 that the outputs miss least.
The checkpoint keeps its form.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from optkit.algorithms.sparsity_pattern import Pattern
from optkit.common.field_types import AtLeastOne, BatchSize, Count, Damping, Distinct, Name, Share
from optkit.devices.enough import refuse_devices
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.linear_layers import Layer, Selection, layers_of, select
from optkit.model.output_layer import outside_of
from optkit.model.shape import ModelShape
from optkit.model.task import KNOWN_TASKS, Task
from optkit.model.together import together
from optkit.model.writer import copy_companions, write_blocks
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Report
from optkit.stages.pruning.fitting import LEVELS, engines_note, pruning_memory, refuse_unfit
from optkit.stages.quantizing.shared_text import SharedText
from optkit.stages.sensitivity.needed_memory import sensitivity_memory

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.prompts import Prompts

KIND = "prune"
DEFAULT_SPREAD = 0.08


class Prune(SharedText):
    """Set weights of linear layers to 0, anywhere or n of every m.
    Magnitude, Wanda (arXiv:2306.11695) or SparseGPT (arXiv:2301.00774) choose them.

    Later blocks see what pruning left of the earlier ones. At most one decoder block and the hidden
    states of the calibration text are in memory. Zeros alone make no engine faster and no file
    smaller: the scorecard says what it takes.
    """

    model_config = ConfigDict(validate_default=True)
    kind: ClassVar[str] = "prune"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- prune: {method: sparsegpt, pattern: '2:4', calibration: {dataset: c4}}"
    for_tasks: ClassVar[frozenset[Task]] = KNOWN_TASKS
    version: ClassVar[int] = 6

    method: Literal["magnitude", "wanda", "sparsegpt"] = "sparsegpt"
    """Which weights go. `magnitude`: the smallest, no text needed. `wanda`: the smallest products
    of weight and input norm, output by output. `sparsegpt`: those whose loss the other weights make
    up for best, and they do."""
    pattern: Literal["unstructured", "2:4", "4:8"] = "unstructured"
    """`unstructured`: zeros anywhere. `2:4`: 2 of every 4 neighbouring inputs stay, which the
    sparse tensor cores of NVIDIA GPUs since Ampere compute with. `4:8`: 4 of every 8."""
    sparsity: float | None = Field(default=None, gt=0)
    """The share of weights that become 0, between 0 and 1; 0.5 by default. A pattern
    n:m fixes it at (m - n) / m.
    """
    allocation: Literal["uniform", "owl", "sensitivity"] = "uniform"
    """`uniform`: every layer gets the same sparsity. `owl`: blocks with many outliers (|weight| x
    input norm) keep more (arXiv:2310.05175). `sensitivity`: layers whose zeros move the predictions
    most keep more. The model's sparsity stays the one asked for."""
    allocation_spread: Share | None = None
    """How far the sparsity of a layer may lie from `sparsity`; 0.08 if `allocation` is not
    uniform.
    """
    outlier_threshold: float | None = Field(default=None, gt=1, le=1e6)
    """How many times the mean of its block a product of weight and input norm must be to count as
    an outlier for `owl`: 5.
    """
    sensitivity_samples: Count | None = None
    """Windows of the calibration text, evenly spread, that `allocation: sensitivity` is measured
    on: 16.
    """
    include: AtLeastOne[Name] = ("*",)
    """Layers to prune, as glob patterns on full names such as `model.layers.0.mlp.up_proj`.
    Everything outside the decoder blocks (lm_head, embeddings) and routers of experts stay as they
    are."""
    exclude: Distinct[Name] = ()
    """Layers to leave out of those, as glob patterns."""
    calibration: Calibration | None = None
    """The text whose hidden states decide which weights matter: C4. `method: magnitude` with a
    uniform allocation reads none.
    """
    damping: Damping | None = None
    """`sparsegpt`: added to the diagonal of each Hessian, as a fraction of its mean; 0.01. Raised,
    and reported, if one needs more.
    """
    refinements: int | None = Field(default=None, ge=0, le=100)
    """`sparsegpt`: steps of conjugate gradients on the weights that stay, after it
    (arXiv:2406.07831); 10. 0 is the paper's SparseGPT.
    """
    equal_tokens: bool | None = None
    """`sparsegpt`: divide each layer's input by its root mean square, token by token, so that no
    token with enormous activations outweighs the rest; true."""
    batch_size: BatchSize = 8
    """Sequences that run through a block at once."""

    @field_validator("sparsity")
    @classmethod
    def _sparsity_of_the_pattern(cls, given: float | None, info: ValidationInfo) -> float | None:
        pattern = Pattern.parse(info.data.get("pattern", "unstructured"))
        return given if given is not None else pattern.sparsity if pattern else 0.5

    @field_validator(
        "allocation_spread", "outlier_threshold", "sensitivity_samples", "calibration", "damping", "refinements",
        "equal_tokens",
    )  # fmt: skip
    @classmethod
    def _default_if_read(cls, given: Any, info: ValidationInfo) -> Any:
        read, _, default = _readers(info.data.get("method"), info.data.get("allocation"))[str(info.field_name)]
        return default if read and given is None else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        pattern = self._pattern
        if pattern and self.sparsity not in (None, pattern.sparsity):
            raise ValueError(
                f"sparsity {self.sparsity:g} contradicts pattern {self.pattern}, which makes "
                f"{pattern.sparsity:g} of the weights 0: leave sparsity out, or set pattern: unstructured"
            )
        if self.sparsity is not None and self.sparsity >= 1:
            raise ValueError(
                f"sparsity {self.sparsity:g} leaves no weight: it is the share that becomes 0, such as 0.5"
            )
        for name, (read, where, _) in _readers(self.method, self.allocation).items():
            if getattr(self, name) is not None and not read:
                raise ValueError(f"{name} would not be read: take it out, or set {where}")
        if self.allocation != "uniform" and self._pattern:
            raise ValueError(
                f"pattern {self.pattern} gives every layer the same sparsity: set allocation: uniform, "
                "or pattern: unstructured"
            )
        if self.allocation == "sensitivity" and self.calibration and self.calibration.input is not None:
            raise ValueError("allocation sensitivity is for causal language models, which read no pairs: take owl")
        low, high = self._bounds
        if low < 0 or high >= 1:
            raise ValueError(
                f"layers of {low:g} to {high:g} zeros: set allocation_spread below "
                f"{min(self._share, 1 - self._share):g} for sparsity {self._share:g}"
            )
        return self

    @property
    def _pattern(self) -> Pattern | None:
        return Pattern.parse(self.pattern)

    @property
    def _share(self) -> float:
        return self.sparsity or 0.0

    @property
    def _bounds(self) -> tuple[float, float]:
        """The least and the most sparsity of a layer."""
        spread = self.allocation_spread or 0.0
        return self._share - spread, self._share + spread

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Prune block by block, straight from safetensors to safetensors.

        Raises StageError if patterns or sparsity do not fit the model, SourceError for weights
        that are NaN or Inf, ResourceError when memory or disk runs out.
        """
        from optkit.model.skeleton import Skeleton
        from optkit.model.skeleton_layers import layers_of_skeleton
        from optkit.stages.pruning.blocks import BlockPruner, PruneOptions
        from optkit.stages.quantizing.hessians import details_of_sums, read_text
        from optkit.stages.quantizing.input_ranges import few_tokens_note

        if report := self.launched(source, target, context):
            return report
        processes = together(self.devices)
        started = time.monotonic()
        skeleton = Skeleton(Checkpoint(source), trust_remote_code=context.trust_remote_code)
        selection = self._select(*layers_of_skeleton(skeleton))
        tokens = read_text(skeleton, self.calibration, context, KIND) if self.calibration else None
        size = skeleton.checkpoint.shape.size_bytes
        kept = KeptBlocks(context.workspace, context.device, context.progress, KIND, size, processes)
        sparsities = kept.measured("sparsities", lambda: self._allocate(selection.layers, source, tokens, context))
        options = PruneOptions(
            self.method,
            self._pattern,
            self.damping or 0.0,
            self.refinements or 0,
            bool(self.equal_tokens),
            self.batch_size,
        )
        pruner = BlockPruner(skeleton, sparsities, options, context, processes)
        with context.progress.task(KIND, len(skeleton.blocks), "blocks") as task:
            write_blocks(skeleton, target, kept.each(pruner.blocks(tokens, kept), task), task, processes)
        if not processes.first:
            return Report(changed=0)
        copy_companions(source, target, context.trust_remote_code, skeleton.checkpoint.config)
        counted = recounted_zeros(Checkpoint(target), selection.layers, self._pattern)
        notes = [engines_note(self._pattern, counted["sparsity"], len(selection.layers))]
        if pruner.by_magnitude:
            notes.append(few_tokens_note(pruner.by_magnitude, "pruned by magnitude", self.method, KIND))
            context.progress.warn(notes[-1])
        sums = details_of_sums(context.device, skeleton.dtype, options.equal_tokens)
        details: dict[str, Any] = {
            **counted,
            "sparsities": {}
            if self.allocation == "uniform"
            else {name: round(share, 4) for name, share in sparsities.items()},
            "losses": pruner.losses,
            "pruned_by_magnitude": pruner.by_magnitude,
            "raised_damping": pruner.raised_damping,
            "seconds": round(time.monotonic() - started, 2),
            **(sums if self.method == "sparsegpt" else {}),
        }
        return Report(
            changed=len(selection.layers),
            skipped={**selection.skipped, **skeleton.fused},
            details=details,
            notes=tuple(notes),
            calibrated_on=(self.calibration.identity(),) if self.calibration else (),
        )

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the same tensors; the memory is an estimate."""
        refuse_devices(self.devices, device, self.kind)
        selection = self._select(layers_of(shape), outside_of(shape))
        work = pruning_memory(shape, selection.layers, self.method, self.calibration, self.batch_size, self.devices)
        cost = work.cost(shape, shape, device)
        if self.calibration and self.sensitivity_samples:
            windows, length = self.calibration.size
            seen = min(self.sensitivity_samples, windows) * length
            ram, gpu = sensitivity_memory(shape, selection.layers, seen, LEVELS, device)
            more = {"ram_bytes": max(cost.ram_bytes, ram), "gpu_bytes": max(cost.gpu_bytes, gpu)}
            cost = cost.model_copy(update=more)
        return cost, shape

    def _select(self, layers: Mapping[str, Layer], outside: Mapping[str, Layer]) -> Selection:
        selection = select(layers, tuple(outside), self.include, self.exclude, KIND)
        refuse_unfit(selection.layers, self._pattern, *self._bounds, KIND)
        return selection

    def _allocate(
        self, layers: Mapping[str, Layer], source: Path, tokens: Tensor | Prompts | None, context: Context
    ) -> Mapping[str, float]:
        """Return the share of zeros of each layer."""
        if self.allocation == "uniform" or tokens is None:
            return dict.fromkeys(layers, self._share)
        from optkit.model.prompts import spread_over
        from optkit.stages.pruning.allocation import by_outliers, by_sensitivity, outlier_shares

        spread = self.allocation_spread or DEFAULT_SPREAD
        if self.allocation == "owl":
            shares = outlier_shares(
                source, layers, tokens, self.outlier_threshold or 0.0, self.batch_size, context, together(self.devices)
            )
            return by_outliers(shares, layers, self._share, spread)
        few = spread_over(tokens, self.sensitivity_samples or 1)
        return by_sensitivity(source, layers, few, self._share, spread, self.method, context)


def recounted_zeros(written: Checkpoint, layers: Mapping[str, Layer], pattern: Pattern | None) -> dict[str, float]:
    """Return the share of zeros in the pruned layers and in the model, counted in the files.

    Raises StageError if a layer does not follow its pattern.
    """
    from optkit.algorithms.pruning import follows

    zeros = weights = 0
    for name, layer in layers.items():
        weight = written.read(f"{name}.weight")
        if pattern is not None and not follows(weight.T if layer.transposed else weight, pattern):
            raise StageError(
                f"the written weight is not {pattern} sparse", where=name, why="This is a defect of optkit"
            )
        zeros += weight.numel() - int(weight.count_nonzero())
        weights += weight.numel()
    everything = sum(info.elements for info in written.tensors.values())
    return {"sparsity": zeros / weights, "sparsity_of_the_model": zeros / everything}


def _readers(method: str | None, allocation: str | None) -> dict[str, tuple[bool, str, Any]]:
    """Return field -> whether it is read, what makes it so, and its default then."""
    sparsegpt = method == "sparsegpt", "method: sparsegpt"
    uneven = allocation != "uniform"
    return {
        "damping": (*sparsegpt, 0.01),
        "refinements": (*sparsegpt, 10),
        "equal_tokens": (*sparsegpt, True),
        "allocation_spread": (uneven, "allocation: owl or sensitivity", DEFAULT_SPREAD),
        "outlier_threshold": (allocation == "owl", "allocation: owl", 5.0),
        "sensitivity_samples": (allocation == "sensitivity", "allocation: sensitivity", 16),
        "calibration": (method != "magnitude" or uneven, "method: wanda or sparsegpt", Calibration(dataset="c4")),
    }
