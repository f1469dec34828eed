"""Stage `onnx_quantize`: an ONNX model with weights in 4 or 8 bits, or all in int8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.field_types import Distinct, Name
from optkit.errors import StageError
from optkit.model.onnx_file import graph_names
from optkit.model.shape import ModelShape
from optkit.model.task import ENCODER_DECODERS, KNOWN_TASKS, PHRASES, Task, task_of
from optkit.onnx.changed_shape import Blocks, int8_shape, rounded_shape, rounding_bytes, whole_bytes
from optkit.onnx.node_selection import choose, listed, refuse_nothing
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Format, Report, Transform

if TYPE_CHECKING:
    from optkit.onnx.matrices import Matrices
    from optkit.onnx.model_file import ModelFile
    from optkit.onnx.weight_only import BlockForm

FIELDS_OF = {
    "weights": ("bits", "block_size", "symmetric", "algorithm", "lm_head", "embedding", "activations"),
    "dynamic": ("op_types", "per_channel", "reduce_range"),
    "static": ("op_types", "per_channel", "reduce_range", "calibration", "ranges", "percentile"),
}
"""Fields that do not mean something for every method."""
Kind = Literal["MatMul", "Gemm", "Conv", "ConvTranspose", "Gather", "Attention", "LSTM", "EmbedLayerNormalization"]
KINDS_OF: Mapping[str, tuple[Kind, ...]] = {
    "dynamic": ("MatMul", "Conv", "Gather", "Attention", "LSTM", "EmbedLayerNormalization"),
    "static": ("MatMul", "Gemm", "Conv", "ConvTranspose", "Gather"),
}
"""Operators that onnxruntime's quantizer has a form for."""
Done = tuple[dict[str, str], dict[str, str], tuple[str, ...]]
"""Names of the quantized nodes with what they became, the others with the reason, and notes."""
ASYMMETRIC = ("k_quant", "hqq")
INT8_COPIES = 4.0
"""How often ONNX Runtime's tool holds the model."""


class OnnxQuantize(Transform):
    """Quantize an ONNX model: its weights a block at a time, or weights and activations.
    Weights take 4 or 8 bits; with activations both are int8.

    GPTQ and AWQ belong before the export: the stages `gptq` and `awq` choose better codes than any
    method here, and `onnx` passes them on.
    """

    kind: ClassVar[str] = "onnx_quantize"
    example: ClassVar[str] = "- onnx: {target: cpu}\n- onnx_quantize: {bits: 4, block_size: 32}"
    for_tasks: ClassVar[frozenset[Task]] = KNOWN_TASKS
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})
    produces: ClassVar[Format] = Format.ONNX
    version: ClassVar[int] = 2
    requires: ClassVar[tuple[str, ...]] = ("onnx>=1.18", "onnxruntime>=1.22 | onnxruntime-gpu>=1.22", "onnxscript>=0.5")

    method: Literal["weights", "dynamic", "static"] = "weights"
    """`weights`: codes of 4 or 8 bits in blocks, multiplied as they are (MatMulNBits), for language
    models. `dynamic`: int8 weights, and activations whose scale is found at each call, for encoders
    on CPUs. `static`: int8 weights, and activations whose scales a text gave (QDQ), for
    accelerators that need them; language models have outliers that such scales do not fit."""
    bits: Literal[4, 8] = 4
    """weights: bits of a weight."""
    block_size: Literal[16, 32, 64, 128, 256] = 32
    """weights: inputs that share a scale."""
    symmetric: bool = False
    """weights: without zero points. false: one zero point per block, as fast, a little larger and
    clearly better.
    """
    algorithm: Literal["rtn", "mse", "k_quant", "hqq"] = "mse"
    """weights: `mse`: search the scale and zero point with the least squared error (optkit's own).
    `rtn`: round to the scale that reaches every weight, which was the better one with `symmetric:
    true`. `k_quant`: llama.cpp's search. `hqq`: search zero points between the integers, which ONNX
    Runtime's CPU has no fast kernel for (one token took 400 times as long). They exist at 4 bits
    alone (an lm_head of 8 is rounded). The last two need `symmetric: false`.
    """
    lm_head: Literal["keep", 4, 8] = 8
    """weights: bits of lm_head, which costs more than any other layer in small models; `keep`
    leaves it float.
    """
    embedding: Literal["keep", "shared"] = "keep"
    """weights: `shared`: an embedding that is tied to lm_head reads its codes; `keep` leaves it
    float, a matrix of its own if need be.
    """
    activations: Literal["int8", "float"] = "int8"
    """weights: what the inputs of a layer are rounded to while it computes: int8 in blocks, the
    fastest on CPUs, or not at all.
    """
    op_types: Distinct[Kind] = ("MatMul",)
    """dynamic, static: the operators to quantize. Gather is an embedding. dynamic has no Gemm and
    ConvTranspose, static no Attention, LSTM and EmbedLayerNormalization."""
    per_channel: bool = True
    """dynamic, static: one scale per output channel of a weight; false: one for the whole weight."""
    reduce_range: bool = False
    """dynamic, static: weights in 7 bits, for CPUs without VNNI, on which sums of 8 bit products
    overflow.
    """
    calibration: Calibration | None = None
    """static: the text whose activations are measured; no other method reads one."""
    ranges: Literal["min-max", "entropy", "percentile"] = "min-max"
    """static: what an activation's scale reaches: all values seen, the range that loses the least
    entropy, or a share of the values.
    """
    percentile: float = Field(default=99.999, gt=50, le=100)
    """static: the share, in percent, if `ranges` is `percentile`."""
    include: Distinct[Name] = ("*",)
    """Glob patterns on the names of nodes or of their weights: what to quantize."""
    exclude: Distinct[Name] = ()
    """Glob patterns: what to leave as it is."""

    @property
    def grid(self) -> Mapping[str, Any]:
        given = {"bits": self.bits, "group_size": self.block_size, "symmetric": self.symmetric}
        return {"type": "int", **given, "rounding": "nearest"} if self.method == "weights" else {}

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        changed = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        for name in sorted(changed):
            methods = [method for method, fields in FIELDS_OF.items() if name in fields]
            if methods and self.method not in methods:
                raise ValueError(
                    f"{name} means nothing for method: {self.method}, only for method: {' or '.join(methods)}"
                )
        if self.method == "static" and self.calibration is None:
            raise ValueError(
                "method: static needs a text: add calibration: {dataset: c4, samples: 32}, or set method: dynamic"
            )
        if "percentile" in changed and self.ranges != "percentile":
            raise ValueError(f"percentile means nothing for ranges: {self.ranges}: set ranges: percentile")
        odd = [kind for kind in self.op_types if self.method in KINDS_OF and kind not in KINDS_OF[self.method]]
        if odd:
            raise ValueError(
                f"method: {self.method} cannot quantize {', '.join(odd)}. It has {', '.join(KINDS_OF[self.method])}"
            )
        if self.symmetric and self.algorithm in ASYMMETRIC:
            raise ValueError(f"{self.algorithm} finds zero points: set symmetric: false, or algorithm: mse")
        if self.embedding == "shared" and self.lm_head == "keep":
            raise ValueError("embedding: shared reads the codes of lm_head: set lm_head: 8 or 4")
        if self.algorithm == "hqq" and self.bits == 8:
            raise ValueError(
                "ONNX Runtime computes with the zero points of hqq at 4 bits alone: set bits: 4, or another algorithm"
            )
        if self.embedding == "shared" and self.algorithm == "hqq" and self.lm_head == 4:
            raise ValueError(
                "an embedding cannot read the zero points of hqq: set embedding: keep, or another algorithm"
            )
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Quantize matrix by matrix; memory holds the largest one a few times over.

        Raises StageError if nothing is left to quantize and for patterns that match nothing,
        SourceError for a damaged model, ResourceError when the disk is full.
        """
        from optkit.onnx.model_file import ModelFile, about_graphs, copy_files_beside
        from optkit.onnx.proof import run_it

        names = graph_names(source)
        before = about_graphs(source)
        copy_files_beside(source, target, context.trust_remote_code)
        quantize = self._quantize_weights if self.method == "weights" else self._quantize_int8
        quantized, skipped, notes = dict[str, str](), dict[str, str](), tuple[str, ...]()
        shared: dict[bytes, int] | None = {} if len(names) > 1 else None
        for name in names:
            found, left, notes = quantize(ModelFile(source, name), target, context, shared)
            graph = f"{name}: " if len(names) > 1 else ""  # nodes of two graphs may have one name
            quantized |= {graph + node: form for node, form in found.items()}
            skipped |= {graph + node: reason for node, reason in left.items()}
        run_it(target, "onnx_quantize")
        after = about_graphs(target)
        details: dict[str, Any] = {
            "quantized": listed(quantized),
            "kept": listed(skipped),
            "nodes_before": before["nodes"],
            "nodes_after": after["nodes"],
            "size_bytes_before": before["size_bytes"],
            "size_bytes_after": after["size_bytes"],
            "opset": after["opset"],
            "ir_version": after["ir_version"],
        }
        texts = (self.calibration.identity(),) if self.calibration else ()
        return Report(changed=len(quantized), skipped=skipped, details=details, notes=notes, calibrated_on=texts)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the size of the codes and of what stays, and the memory.
        The memory is that of rounding a matrix or, for int8, of ONNX Runtime's own tool.

        Patterns on names of nodes are not known here: what they would choose counts as kept.
        """
        self._refuse_for_parts(shape)
        if self.method != "weights":
            left = int8_shape(shape, self.per_channel, "Gather" in self.op_types, self.include, self.exclude)
            return Cost(disk_bytes=left.size_bytes, ram_bytes=whole_bytes(shape, INT8_COPIES)), left
        zeros = "none" if self.symmetric else "float" if self.algorithm == "hqq" else "packed"
        head = (
            None
            if self.lm_head == "keep"
            else Blocks(self.lm_head, self.block_size, "none" if self.symmetric else "packed")
        )
        form = Blocks(self.bits, self.block_size, zeros)
        left = rounded_shape(shape, form, head, self.embedding == "shared", self.include, self.exclude)
        return Cost(disk_bytes=left.size_bytes, ram_bytes=rounding_bytes(shape, left, self.algorithm)), left

    def _refuse_for_parts(self, shape: ModelShape) -> None:
        """Raise StageError for what is asked of one graph, if the model has several."""
        if (task := task_of(shape.config)) not in ENCODER_DECODERS:
            return
        asked = {
            "method: static": self.method == "static",
            "embedding: shared": self.embedding == "shared",
            "include": self.include != ("*",),
            "exclude": bool(self.exclude),
        }
        if said := next((said for said, given in asked.items() if given), None):
            name = said.partition(":")[0]
            raise StageError(
                f"{said} is for models of one graph, and this is {PHRASES[task]}",
                where=f"onnx_quantize.{name}",
                why="Its three graphs are quantized alike, so that they go on sharing their weights",
                remedy="Leave it out" + (", or take method: dynamic" if name == "method" else ""),
            )

    def _quantize_weights(
        self, model: ModelFile, target: Path, context: Context, shared: dict[bytes, int] | None
    ) -> Done:
        from optkit.onnx.matrices import find_matrices, fold_transposes_, replace_matrices_, share_codes_
        from optkit.onnx.model_file import ModelWriter

        matrices = find_matrices(model)
        forms, skipped = self._forms(matrices)
        self._refuse_unshareable(matrices, forms)
        quantized = {name: f"MatMulNBits, {form.bits} bits" for name, form in forms.items()}
        writer = ModelWriter(model, target, shared)
        with context.progress.task("onnx_quantize", len(forms), "matrices") as task:
            replace_matrices_(model, writer, matrices.found, forms, task)
        if self.embedding == "shared" and matrices.head:
            node = share_codes_(model, matrices.found[matrices.head], forms[matrices.head])
            quantized[node] = f"GatherBlockQuantized, {forms[matrices.head].bits} bits"
        fold_transposes_(model, writer)
        writer.finish()
        slow = self.algorithm == "hqq"
        note = "ONNX Runtime has no fast CPU kernel for the zero points of HQQ: each step dequantizes every weight"
        return quantized, skipped, (note,) if slow else ()

    def _quantize_int8(self, model: ModelFile, target: Path, context: Context, shared: dict[bytes, int] | None) -> Done:
        from optkit.onnx.int8 import Int8Form, int8_candidates, quantize_dynamic, quantize_static, settle_weights
        from optkit.onnx.model_file import ModelFile, ModelWriter

        source = model.directory
        with TemporaryDirectory(prefix=".int8-", dir=target) as work:
            settled = settle_weights(model, Path(work) / "read")
            aliases, skipped = int8_candidates(settled, self.op_types)
            left_out = choose(aliases, self.include, self.exclude, "onnx_quantize", skipped)
            skipped |= {name: reason for name, reason in left_out.items() if reason}
            chosen = [name for name, reason in left_out.items() if not reason]
            refuse_nothing(chosen, skipped, "onnx_quantize")
            made = Path(work) / "made"
            made.mkdir()
            form = Int8Form(self.op_types, chosen, self.per_channel, self.reduce_range)
            if self.calibration is None:
                quantize_dynamic(settled, made, form)
            else:
                tokens = self.calibration.tokens(source, context.data, context.trust_remote_code).numpy()
                with context.progress.task("onnx_quantize", len(tokens), "samples") as task:
                    quantize_static(settled, made, form, tokens, self.ranges, self.percentile, task)
            written = ModelFile(made, model.name)
            left = set(int8_candidates(written, self.op_types)[0])
            ModelWriter(written, target, shared).finish()
        kinds = {node.name: node.op_type for node in settled.proto.graph.node}
        quantized = {name: f"{kinds[name]}, int8, {self.method}" for name in chosen if name not in left}
        skipped |= {name: "left by ONNX Runtime's quantizer" for name in chosen if name in left}
        refuse_nothing(quantized, skipped, "onnx_quantize")
        return quantized, skipped, ()

    def _forms(self, matrices: Matrices) -> tuple[dict[str, BlockForm], dict[str, str]]:
        """Return how each matrix will be stored, and why the others stay as they are."""
        from optkit.onnx.weight_only import BlockForm

        aliases = {name: (name, matrix.weight) for name, matrix in matrices.found.items()}
        skipped = dict(matrices.refused)
        forms = {}
        for name, reason in choose(aliases, self.include, self.exclude, "onnx_quantize", skipped).items():
            is_head = name == matrices.head
            if reason or (is_head and self.lm_head == "keep"):
                skipped[name] = reason or "lm_head: keep"
                continue
            bits = self.lm_head if is_head and self.lm_head != "keep" else self.bits
            algorithm = "rtn" if self.algorithm == "hqq" and bits == 8 else self.algorithm
            forms[name] = BlockForm(
                bits, self.block_size, self.symmetric, algorithm, 4 if self.activations == "int8" else 0
            )
        refuse_nothing(forms, skipped, "onnx_quantize")
        return forms, skipped

    def _refuse_unshareable(self, matrices: Matrices, forms: Mapping[str, BlockForm]) -> None:
        if self.embedding == "keep":
            return
        if matrices.head is None or matrices.head not in forms:
            raise StageError(
                "lm_head is not quantized",
                where="onnx_quantize.embedding",
                why="A shared embedding reads its codes",
                remedy="Set embedding: keep, or include lm_head",
            )
        inputs = matrices.found[matrices.head].shape[0]
        if inputs % self.block_size:
            raise StageError(
                f"its {inputs:,} columns are not a multiple of block_size {self.block_size}",
                where="onnx_quantize.embedding",
                why="GatherBlockQuantized takes whole blocks alone",
                remedy="Set embedding: keep, or a smaller block_size",
            )
