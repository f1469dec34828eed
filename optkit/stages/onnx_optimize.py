"""Stage `onnx_optimize`: the same ONNX model with fewer nodes, in float16, or in another opset."""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.field_types import Distinct, Name
from optkit.errors import SourceError, StageError
from optkit.model.onnx_file import MODEL
from optkit.model.shape import ModelShape
from optkit.model.task import OF_TEXT, Task
from optkit.model.writer import write_config
from optkit.onnx.changed_shape import optimized_shape, whole_bytes
from optkit.onnx.node_selection import refuse_unmatched
from optkit.stage import Context, Cost, Format, Report, Transform

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optkit.onnx.model_file import ModelFile

HERE = "The graph was optimized for this machine's CPU (level: all): on another one it may be slower or not open"
ONLY_RUNTIME = "The graph has fused operators of ONNX Runtime, which other engines do not know"
LIMITS = {False: 1e-3, True: 5e-2}
"""Largest difference to the source's first output, as a share of its largest value: of float32
graphs, and of those that round.
"""
FUSION_COPIES, FLOAT16_COPIES = 1.5, 4.5
"""How often ONNX Runtime holds the model while it is fused, and its tool while that is converted."""
ROUNDING = ("MatMulNBits", "MatMulInteger", "QuantizeLinear", "DynamicQuantizeLinear", "GatherBlockQuantized")


class OnnxOptimize(Transform):
    """Fold constants and fuse nodes ahead of time, convert to float16, or write another opset.
    The model computes the same.

    ONNX Runtime fuses the same nodes whenever it opens a model: done here, a model opens faster and
    its graph can be looked at.
    """

    kind: ClassVar[str] = "onnx_optimize"
    example: ClassVar[str] = "- onnx: {exporter: torch}\n- onnx_optimize: {level: basic}"
    for_tasks: ClassVar[frozenset[Task]] = OF_TEXT
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.ONNX})
    produces: ClassVar[Format] = Format.ONNX
    requires: ClassVar[tuple[str, ...]] = ("onnx>=1.18", "onnxruntime>=1.22 | onnxruntime-gpu>=1.22")

    level: Literal["none", "basic", "extended", "all"] = "basic"
    """`none`: no fusion. `basic`: constants folded, nodes without effect removed, in ONNX's own
    operators. `extended`: nodes fused into operators of ONNX Runtime. `all`: layouts for the CPU of
    this machine as well."""
    float16: bool = False
    """Weights, activations and KV cache in float16, for GPUs: half the bytes. Comes after the
    fusions.
    """
    keep_float32: Distinct[Name] = ()
    """float16: kinds of operators, or glob patterns on the names of nodes, that go on computing in
    float32, between casts.
    """
    keep_inputs: bool = False
    """float16: inputs and outputs of the graph stay float32, for programs that give and expect
    those.
    """
    opset: int | None = Field(default=None, ge=13, le=1000)
    """Version of ONNX's operators to write, for a runtime that asks for it; null keeps the present
    one.
    """

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        if (odd := self.set_among("keep_float32", "keep_inputs")) and not self.float16:
            raise ValueError(f"{odd[0]} means nothing without float16: true")
        if self.level == "none" and not self.float16 and self.opset is None:
            raise ValueError("nothing would change: name a level, float16 or an opset")
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Change the opset, then the graph, then the dtype.
        The result is compared with the source on a few tokens.

        Raises StageError if the result says something else or float16 does not hold a weight,
        SourceError for a damaged model or one that ONNX Runtime does not open, ResourceError
        without memory or disk.
        """
        from optkit.onnx.model_file import ModelFile, ModelWriter, about_graphs, copy_files_beside
        from optkit.onnx.proof import run_it

        model, before = ModelFile(source), about_graphs(source)
        wanted = run_it(source, "onnx_optimize")
        rounds = self.float16 or any(kind in before["nodes"] for kind in ROUNDING)
        copy_files_beside(source, target, context.trust_remote_code)
        with TemporaryDirectory(prefix=".optimized-", dir=target) as work:
            model, converted = self._change(model, before["opset"], Path(work))
            ModelWriter(model, target).finish()
        if self.float16:
            _say_float16(target)
        written = ModelFile(target)
        notes, difference = self._compare(target, wanted, LIMITS[rounds])
        after = about_graphs(target)
        had, has = Counter(before["nodes"]), Counter(after["nodes"])
        details = {
            "nodes_before": before["nodes"],
            "nodes_after": after["nodes"],
            "size_bytes_before": before["size_bytes"],
            "size_bytes_after": after["size_bytes"],
            "opset_before": before["opset"],
            "opset": after["opset"],
            "ir_version": after["ir_version"],
            "float16_tensors": converted,
            "difference": difference,
        }
        changed = ((had - has) + (has - had)).total() + converted + (before["opset"] != after["opset"])
        return Report(changed=changed, details=details, notes=(*self._notes(written), *notes))

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the size of what is left, written twice on the way, and the memory.
        The memory is that of the fusions and of the conversion to float16.
        """
        left = optimized_shape(shape, self.level != "none", self.float16)
        wide = optimized_shape(shape, self.level != "none", float16=False)
        ram = whole_bytes(shape, FLOAT16_COPIES if self.float16 else FUSION_COPIES)
        return Cost(disk_bytes=left.size_bytes + wide.size_bytes, ram_bytes=ram), left

    def _change(self, model: ModelFile, opset: int, work: Path) -> tuple[ModelFile, int]:
        """Return the changed model and how many tensors are float16 now."""
        from optkit.onnx.model_file import ModelFile, ModelWriter
        from optkit.onnx.optimization import convert_opset_, optimize_graph, to_float16_

        if self.opset is not None and self.opset != opset:
            convert_opset_(model, self.opset)
            (work / "opset").mkdir()
            ModelWriter(model, work / "opset").finish()
            model = ModelFile(work / "opset")
        if self.level != "none":
            model = optimize_graph(model.directory / MODEL, work / "optimized", self.level)
        if not self.float16:
            return model, 0
        return model, to_float16_(model, *self._kept(model), self.keep_inputs)

    def _kept(self, model: ModelFile) -> tuple[list[str], list[str]]:
        """Return the kinds and the nodes that stay float32. Raises StageError for an entry that is
        no kind and matches no node.
        """
        nodes = {node.name: node.op_type for node in model.proto.graph.node}
        patterns = [each for each in self.keep_float32 if each not in nodes.values()]
        refuse_unmatched("onnx_optimize.keep_float32", patterns, [*nodes, *sorted(set(nodes.values()))], len(nodes))
        kinds = [each for each in self.keep_float32 if each in nodes.values()]
        return kinds, [name for name in nodes if any(fnmatchcase(name, pattern) for pattern in patterns)]

    def _compare(self, target: Path, wanted: NDArray[Any] | None, limit: float) -> tuple[tuple[str, ...], float | None]:
        """Return notes, and how far the result is from the source as a share of the largest value.
        The share is None if neither could be run.
        """
        from optkit.onnx.proof import run_it

        try:
            found = run_it(target, "onnx_optimize")
        except SourceError as error:
            if not self.float16:
                raise
            return (
                f"The float16 graph did not run on the CPU of the machine that made it: {error.why or error.what}",
            ), None
        if found is None or wanted is None:
            return (), None
        wanted = wanted.astype("float32")
        difference = float(abs(found.astype("float32") - wanted).max() / max(abs(wanted).max(), 1e-30))
        if difference > limit:
            raise StageError(
                f"the result differs from its source by {difference:.2g} of the largest value, "
                f"and {limit:.2g} is the limit",
                where="onnx_optimize",
                why="Some numbers do not fit float16" if self.float16 else "A fusion computes something else",
                remedy="Name kinds of operators in keep_float32" if self.float16 else "Take a lower level",
            )
        return (), difference

    def _notes(self, written: ModelFile) -> tuple[str, ...]:
        fused = self.level in ("extended", "all") and any(node.domain for node in written.proto.graph.node)
        return (*((HERE,) if self.level == "all" else ()), *((ONLY_RUNTIME,) if fused else ()))


def _say_float16(directory: Path) -> None:
    """Correct the dtype in config.json, if it says one."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "dtype" in config:
        write_config(directory, config | {"dtype": "float16"})
