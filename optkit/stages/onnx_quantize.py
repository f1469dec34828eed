"""Stage `onnx_quantize`: an ONNX model with weights in 4 or 8 bits, or with weights and activations in int8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from optkit.errors import StageError
from optkit.stage import Context, Format, Report, Transform
from optkit.stages.node_selection import choose, listed, refuse_nothing

if TYPE_CHECKING:
    from optkit.onnx.matrices import Matrices
    from optkit.onnx.model_file import ModelFile
    from optkit.onnx.weight_only import BlockForm

FIELDS_OF = {
    "weights": ("bits", "block_size", "symmetric", "algorithm", "lm_head", "embedding", "activations"),
}
"""Fields that mean something for one method alone."""
ASYMMETRIC = ("k_quant", "hqq")


class OnnxQuantize(Transform):
    """Quantize an ONNX model: its weights to 4 or 8 bits a block at a time, or weights and activations to int8.

    GPTQ and AWQ belong before the export: the stages `gptq` and `awq` choose better codes than any method here, and `onnx` passes them on.
    """

    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})
    produces: ClassVar[Format] = Format.ONNX
    requires: ClassVar[tuple[str, ...]] = ("onnx>=1.18", "onnxruntime>=1.22 | onnxruntime-gpu>=1.22", "onnxscript>=0.5")

    method: Literal["weights"] = "weights"
    """`weights`: codes of 4 or 8 bits in blocks, multiplied as they are (MatMulNBits), for language models."""
    bits: Literal[4, 8] = 4
    """weights: bits of a weight."""
    block_size: Literal[16, 32, 64, 128, 256] = 32
    """weights: inputs that share a scale."""
    symmetric: bool = True
    """weights: without zero points. false: one zero point per block, a little better and a little larger."""
    algorithm: Literal["rtn", "mse", "k_quant", "hqq"] = "mse"
    """weights: `rtn`: round to the scale that reaches every weight. `mse`: search the scale with the least squared error (optkit's own).
    `k_quant`: llama.cpp's search. `hqq`: search zero points between the integers, which ONNX Runtime's CPU has no fast kernel for (one
    token took 400 times as long) and which exist at 4 bits alone (an lm_head of 8 is rounded). The last two need `symmetric: false`."""
    lm_head: Literal["keep", 4, 8] = 8
    """weights: bits of lm_head, which costs more than any other layer in small models; `keep` leaves it float."""
    embedding: Literal["keep", "shared"] = "keep"
    """weights: `shared`: an embedding that is tied to lm_head reads its codes; `keep` leaves it float, a matrix of its own if need be."""
    activations: Literal["int8", "float"] = "int8"
    """weights: what the inputs of a layer are rounded to while it computes: int8 in blocks, the fastest on CPUs, or not at all."""
    include: tuple[str, ...] = ("*",)
    """Glob patterns on the names of nodes or of their weights: what to quantize."""
    exclude: tuple[str, ...] = ()
    """Glob patterns: what to leave as it is."""

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        for method, fields in FIELDS_OF.items():
            odd = [name for name in fields if name in self.model_fields_set]
            if odd and method != self.method:
                raise ValueError(f"{', '.join(odd)} mean nothing for method: {self.method}, only for method: {method}")
        if self.symmetric and self.algorithm in ASYMMETRIC:
            raise ValueError(f"{self.algorithm} finds zero points: set symmetric: false, or algorithm: mse")
        if self.embedding == "shared" and self.lm_head == "keep":
            raise ValueError("embedding: shared reads the codes of lm_head: set lm_head: 8 or 4")
        if self.algorithm == "hqq" and self.bits == 8:
            raise ValueError("ONNX Runtime computes with the zero points of hqq at 4 bits alone: set bits: 4, or another algorithm")
        if self.embedding == "shared" and self.algorithm == "hqq" and self.lm_head == 4:
            raise ValueError("an embedding cannot read the zero points of hqq: set embedding: keep, or another algorithm")
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Quantize matrix by matrix; memory holds the largest one a few times over.

        Raises StageError where nothing is left to quantize and for patterns that match nothing, SourceError for a damaged model,
        ResourceError when the disk is full.
        """
        from optkit.onnx.model_file import ModelFile, copy_files_beside
        from optkit.onnx.proof import prove_it_runs

        model = ModelFile(source)
        before, size_before = model.node_kinds(), model.size_bytes
        copy_files_beside(source, target)
        quantized, skipped, notes = self._quantize_weights(model, target, context)
        written = ModelFile(target)
        prove_it_runs(target, "onnx_quantize")
        opset = next(entry.version for entry in written.proto.opset_import if entry.domain in ("", "ai.onnx"))
        details: dict[str, Any] = {
            "quantized": listed(quantized),
            "kept": listed(skipped),
            "nodes_before": before,
            "nodes_after": written.node_kinds(),
            "size_bytes_before": size_before,
            "size_bytes_after": written.size_bytes,
            "opset": opset,
            "ir_version": written.proto.ir_version,
        }
        return Report(changed=len(quantized), skipped=skipped, details=details, notes=notes)

    def _quantize_weights(self, model: ModelFile, target: Path, context: Context) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
        """Return the names of the quantized nodes with what they became, the others with the reason, and notes."""
        from optkit.onnx.matrices import find_matrices, fold_transposes_, replace_matrices_, share_codes_
        from optkit.onnx.model_file import ModelWriter

        matrices = find_matrices(model)
        forms, skipped = self._forms(matrices)
        self._refuse_unshareable(matrices, forms)
        quantized = {name: f"MatMulNBits, {form.bits} bits" for name, form in forms.items()}
        writer = ModelWriter(model, target)
        with context.progress.task("onnx_quantize", len(forms), "matrices") as task:
            replace_matrices_(model, writer, matrices.found, forms, task)
        if self.embedding == "shared" and matrices.head:
            shared = share_codes_(model, matrices.found[matrices.head], forms[matrices.head])
            quantized[shared] = f"GatherBlockQuantized, {forms[matrices.head].bits} bits"
        fold_transposes_(model, writer)
        writer.finish()
        slow = self.algorithm == "hqq"
        note = "ONNX Runtime has no fast CPU kernel for the zero points of HQQ: each step dequantizes every weight"
        return quantized, skipped, (note,) if slow else ()

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
            forms[name] = BlockForm(bits, self.block_size, self.symmetric, algorithm, 4 if self.activations == "int8" else 0)
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
