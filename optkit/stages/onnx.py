"""Stage `onnx`: a checkpoint as an ONNX model, proven to say what its source says.
ONNX Runtime and ONNX Runtime GenAI run it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from optkit.backends.libraries import LIBRARIES
from optkit.environment import package_version
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.onnx_shape import GENAI_CONFIG
from optkit.model.output_layer import HEAD
from optkit.model.packed_names import CODES
from optkit.model.shape import ModelShape
from optkit.model.task import ENCODER_DECODERS, KNOWN_TASKS, PHRASES, Task, architecture_of, refuse_multi_modal, task_of
from optkit.model.unfound import refuse_without_blocks
from optkit.onnx.builder import Order, build, refuse_architecture
from optkit.onnx.builds import GENAI_BUILDS, installed
from optkit.onnx.export_steps import choices, compared_text, notes, write_beside
from optkit.onnx.exporters import OPSET, OPSETS, exporter_for, refuse_untraced, traced_task
from optkit.onnx.genai_config import write_genai_config
from optkit.onnx.genai_tokenizer import agree_on_tokens
from optkit.onnx.matmul_nbits_limits import DTYPES, head_group_size, refuse_scheme, why_not_matmul_nbits
from optkit.onnx.prediction import bytes_while_compared, comparing_bytes, exported_shape, float32_shape, is_tied
from optkit.stage import Context, Cost, Format, Report, Transform

LIBRARY_BYTES = 700_000_000
"""What torch, transformers and ONNX Runtime take."""
TORCH = "Take exporter: torch, or leave the exporter out"


class Onnx(Transform):
    """Export a model to ONNX, and compare its logits with those of the source.
    Decoders have fused attention and a KV cache. Encoders and encoder-decoders are exported too.

    Quantized checkpoints (compressed-tensors, GPTQ, AWQ; 4 and 8 bits) keep their very codes.
    """

    kind: ClassVar[str] = "onnx"
    example: ClassVar[str] = "- gptq: {bits: 4, group_size: 32}\n- onnx: {target: cpu, lm_head: 8, activations: int8}"
    for_tasks: ClassVar[frozenset[Task]] = KNOWN_TASKS
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})
    produces: ClassVar[Format] = Format.ONNX
    requires: ClassVar[tuple[str, ...]] = (
        "onnx>=1.18",
        "onnxruntime>=1.22 | onnxruntime-gpu>=1.22 | onnxruntime-directml>=1.22",
        "onnxruntime-genai>=0.14 | onnxruntime-genai-cuda>=0.14 | onnxruntime-genai-directml>=0.14",
        "onnxscript>=0.5",
    )

    exporter: Literal["genai", "torch", "optimum"] | None = None
    """`genai`: the model builder of ONNX Runtime GenAI, with fused attention (GroupQueryAttention),
    norms and rotary embeddings; for the decoders that it knows. `torch`: torch.onnx.export, for
    encoders (BERT and its kin), encoder-decoders and any decoder that can be traced, in float32 and
    ONNX's own operators. `optimum`: optimum-onnx in an environment of its own (`optkit env build optimum`),
    for decoders. Left out: genai for decoders that it knows, else torch."""
    target: Literal["cpu", "cuda", "dml", "webgpu"] = "cpu"
    """Execution provider that the graph is made for."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """What the graph computes in, and holds what is not quantized in. Left out: float32 for cpu,
    float16 for the others. cpu has float32 and float16, cuda float16 and bfloat16, dml float16,
    webgpu float16 and float32."""
    lm_head: Literal["keep", 4, 8] | None = None
    """Of a quantized model whose lm_head is float: the bits that it is rounded to, or `keep`. Left
    out: 8, but keep for cpu with `activations: float`."""
    embedding: Literal["keep", "shared"] | None = None
    """`shared`: an embedding that is tied to a rounded lm_head reads its codes; `keep` leaves it
    float, a matrix of its own. Left out: shared for cpu, if they are tied and lm_head has 8
    bits."""
    activations: Literal["int8", "float"] | None = None
    """Of a quantized model: what the inputs of a layer are rounded to while it computes: int8 in
    blocks, the fastest on CPUs, or not at all. Left out: int8 for cpu, float for the others. For
    cpu float has a fast kernel at 4 bits, and none at 8."""

    opset: int | None = None
    """Version of ONNX's operators that torch (18 to 23) or optimum (14 to 20) writes. Left out: 21
    by torch, optimum's choice.
    """
    kv_cache: bool | None = None
    """Of a decoder that torch or optimum exports: keys and values go in and come out, for decoding
    token by token; `false`: the graph computes whole sequences. Left out: they do."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.exporter and (idle := self._idle(self.exporter)):
            raise ValueError(f"{idle[0]}: {idle[1]}")
        name = self.exporter or "torch"
        if self.opset is not None and self.opset not in (known := OPSETS[name]):
            remedy = (
                f"put onnx_optimize with opset: {self.opset} behind it"
                if self.opset < known[0]
                else "take one of these"
            )
            raise ValueError(f"opset: the exporter {name} writes {known[0]} to {known[-1]}, not {self.opset}: {remedy}")
        if self.dtype and self.dtype not in DTYPES[self.target]:
            raise ValueError(f"{self.dtype}: a graph for {self.target} computes in {' or '.join(DTYPES[self.target])}")
        if self.embedding == "shared" and self._lm_head == "keep":
            raise ValueError("embedding: shared reads the codes of lm_head: set lm_head: 8 or 4")
        return self

    def _idle(self, exporter: str) -> tuple[str, str] | None:
        """Return the first field that means nothing to an exporter, and why. None if there is none."""
        if exporter == "genai":
            name = next((name for name in ("opset", "kv_cache") if getattr(self, name) is not None), None)
            return (
                (name, "the exporter genai has no choice there. Leave it out, or take exporter: torch")
                if name
                else None
            )
        if self.target != "cpu":
            return "target", f"a graph of the exporter {exporter} is the same for every provider. Leave it out"
        if self.dtype not in (None, "float32"):
            return (
                "dtype",
                f"the exporter {exporter} writes float32. Put onnx_optimize with {self.dtype}: true behind it",
            )
        given = {"lm_head": self.lm_head, "embedding": self.embedding, "activations": self.activations}
        name = next((name for name, value in given.items() if value), None)
        return (
            (name, f"the exporter {exporter} rounds nothing. Leave it out, and put onnx_quantize behind it")
            if name
            else None
        )

    @property
    def _float_activations(self) -> bool:
        return (self.activations or ("int8" if self.target == "cpu" else "float")) == "float"

    @property
    def _lm_head(self) -> Literal["keep", 4, 8]:
        return self.lm_head or ("keep" if self._float_activations and self.target == "cpu" else 8)

    def made_with(self) -> dict[str, Any]:
        """Return the exporter's version: another one makes another graph. If the model decides
        on the exporter, those of both.
        """
        genai = f"onnxruntime-genai=={next(iter(installed(GENAI_BUILDS).values()), 'none')}"
        torch = [f"{name}=={package_version(name)}" for name in ("torch", "transformers", "onnxscript")]
        optimum = list(LIBRARIES["optimum"].requirements)
        return {
            "packages": {"genai": [genai], "torch": torch, "optimum": optimum, None: [genai, *torch]}[self.exporter]
        }

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Export, then compare the graph with its source.

        Raises StageError for a model that the exporter does not know or whose codes ONNX Runtime
        has no operator for, and if the graph does not say what the source says; ResourceError
        if memory or disk run out.
        """
        shape = Checkpoint(source).shape
        chosen, task = self._exporter(shape), task_of(shape.config)
        decodes = chosen != "torch" or task is Task.GENERATION
        report = (self._export_decoder if decodes else self._export_by_torch)(source, target, context)
        because = f"exported by torch: the exporter genai has no {architecture_of(shape.config)}"
        notes = () if self.exporter or chosen == "genai" or task in ENCODER_DECODERS else (because,)
        return replace(report, details={"exporter": chosen, **report.details}, notes=(*notes, *report.notes))

    def _export_by_torch(self, source: Path, target: Path, context: Context) -> Report:
        from optkit.onnx.torch_encoder_decoder import export_encoder_decoder
        from optkit.onnx.torch_export import export_encoder

        shape = Checkpoint(source).shape
        self._refuse_for("torch", shape)
        export = export_encoder_decoder if task_of(shape.config) in ENCODER_DECODERS else export_encoder
        started = time.monotonic()
        with context.progress.task("onnx", 1, "model"):
            details = export(source, target, self.opset or OPSET, context.trust_remote_code)
        seconds = round(time.monotonic() - started, 1)
        return Report(
            changed=len(Format.ONNX.shape(target).tensors), details={"dtype": "float32", **details, "export_s": seconds}
        )

    def _export_decoder(self, source: Path, target: Path, context: Context) -> Report:
        """Export in a process of its own, then compare the graph with its source on a text."""
        import torch

        from optkit.backends.optimum_export import export_with_optimum
        from optkit.onnx.model_file import ModelFile, about_graphs
        from optkit.onnx.parity import PARTS, check_parity, comparable

        checkpoint = Checkpoint(source)
        order = self._order(checkpoint.shape, source, target, context)
        started = time.monotonic()
        layers = int(checkpoint.config["num_hidden_layers"]) if order.exporter == "genai" else 0
        with context.progress.task("onnx", layers + PARTS, "parts") as task:
            made = export_with_optimum(order, context.progress) if order.exporter == "optimum" else build(order, task)
            exported = time.monotonic()
            write_beside(order)
            unfit = write_genai_config(target) if order.exporter != "genai" and order.kv_cache else ""
            unfit = f"ONNX Runtime GenAI does not run it: {unfit}" if unfit else ""
            text, ids = compared_text(order)
            apart = check_parity(order, torch.tensor(ids), task) if comparable(order) else {}
        disagreement = agree_on_tokens(target, text, ids) if text and (target / GENAI_CONFIG).exists() else ""
        details = {
            **choices(order),
            **about_graphs(target),
            "export_s": round(exported - started, 1),
            "compare_s": round(time.monotonic() - exported, 1),
            **apart,
            **made,
        }
        told = notes(order, details, unfit, disagreement)
        return Report(changed=len(ModelFile(target).initializers), details=details, notes=told)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the size of the graph's weights, and the memory.
        The memory is that of the source in float32 or of the graph as ONNX Runtime holds it.
        """
        refuse_without_blocks(shape, "onnx")
        if (exporter := self._exporter(shape)) != "genai":
            self._refuse_for(exporter, shape)
            left = float32_shape(shape)
            compared = comparing_bytes(shape, left.size_bytes, left.size_bytes, rounds=False)
            return Cost(disk_bytes=left.size_bytes, ram_bytes=LIBRARY_BYTES + max(3 * left.size_bytes, compared)), left
        order = self._order(shape, Path(), Path(), Context(device=device))
        left = exported_shape(shape, order)
        rounds = order.head_bits is not None or not order.float_activations
        compared = comparing_bytes(shape, bytes_while_compared(shape), left.size_bytes, rounds)
        return Cost(disk_bytes=left.size_bytes, ram_bytes=LIBRARY_BYTES + max(2 * left.size_bytes, compared)), left

    def _refuse_for(self, exporter: str, shape: ModelShape) -> None:
        """Raise StageError for a model or a field that the exporter torch or optimum does not take."""
        if task_of(shape.config) is not Task.GENERATION:
            if exporter == "optimum":
                what = f"optimum exports decoders here, and {architecture_of(shape.config)} is none"
                raise StageError(what, where="onnx", remedy=TORCH)
            task = traced_task(shape.config)
            if self.kv_cache is not None:
                has = "always has a" if task in ENCODER_DECODERS else "has no"
                raise StageError(f"{PHRASES[task]} {has} KV cache", where="onnx.kv_cache", remedy="Leave it out")
        else:
            refuse_untraced(shape.config, self.kv_cache is not False)
        if method := shape.quant_method:
            raise StageError(
                f"the exporter {exporter} writes float weights, and the model is quantized already ({method})",
                where="onnx",
                remedy="Put `- dequantize` before it, and onnx_quantize behind it",
            )
        if idle := self._idle(exporter):
            raise StageError(idle[1], where=f"onnx.{idle[0]}", why=f"genai has no {architecture_of(shape.config)}")

    def _order(self, shape: ModelShape, source: Path, target: Path, context: Context) -> Order:
        """Return what the exporter is asked for. Raises StageError for what it cannot do with this
        model.
        """
        if (exporter := self._exporter(shape)) != "genai":
            self._refuse_for(exporter, shape)
            return Order(
                source=source,
                target=target,
                provider="cpu",
                dtype="float32",
                trust_remote_code=context.trust_remote_code,
                exporter=exporter,
                opset=self.opset,
                kv_cache=self.kv_cache is not False,
            )
        if idle := self._idle("genai"):
            raise StageError(idle[1], where=f"onnx.{idle[0]}")
        refuse_architecture(architecture_of(shape.config))
        refuse_scheme(shape)
        quantized = bool(shape.config.get("quantization_config"))
        self._refuse_idle_fields(shape, quantized)
        head_bits = self._head_bits(shape) if quantized else None
        share = self.embedding is None and head_bits == 8 and self.target == "cpu" and is_tied(shape)
        return Order(
            source=source,
            target=target,
            provider=self.target,
            dtype=self.dtype or DTYPES[self.target][0],
            head_bits=head_bits,
            shared_embedding=share or self.embedding == "shared",
            float_activations=self._float_activations or not quantized,
            trust_remote_code=context.trust_remote_code,
            device=context.device if self.target == "cuda" and context.device.startswith("cuda") else "cpu",
        )

    def _exporter(self, shape: ModelShape) -> str:
        refuse_multi_modal(
            shape.config,
            "onnx",
            "A graph is written of text alone, and would lose what the model sees or hears",
            "Leave onnx out, or export a text-generation checkpoint of the model",
        )
        return self.exporter or exporter_for(shape.config)

    def _head_bits(self, shape: ModelShape) -> int | None:
        """Return the bits that lm_head is rounded to; None if it stays or is quantized already.
        Raises StageError if it cannot be.
        """
        if self._lm_head == "keep" or _head_is_coded(shape):
            return None
        inputs = int(shape.config["hidden_size"])
        if not (reason := why_not_matmul_nbits(self._lm_head, head_group_size(inputs, self._lm_head))):
            return self._lm_head
        if self.lm_head is None:
            return None
        raise StageError(f"lm_head cannot be rounded: {reason}", where="onnx.lm_head", remedy="Set lm_head: keep")

    def _refuse_idle_fields(self, shape: ModelShape, quantized: bool) -> None:
        given = {"lm_head": self.lm_head, "embedding": self.embedding, "activations": self.activations}
        if not quantized and (idle := next((name for name, value in given.items() if value), None)):
            raise StageError(
                f"{idle} means nothing here: the model has float weights",
                where=f"onnx.{idle}",
                remedy="Leave it out, put gptq, awq or rtn before onnx, or onnx_quantize behind it",
            )
        if self.lm_head and _head_is_coded(shape):
            raise StageError(
                "lm_head is quantized already", where="onnx.lm_head", remedy="Leave it out: its codes are kept"
            )
        tied = is_tied(shape)
        if self.embedding == "shared" and (_head_is_coded(shape) or not tied):
            raise StageError(
                "the embedding and lm_head are two matrices",
                where="onnx.embedding",
                why="lm_head was quantized apart" if tied else "config.json does not tie them",
                remedy="Set embedding: keep",
            )


def _head_is_coded(shape: ModelShape) -> bool:
    return any(f"{HEAD}.{leaf}" in shape.tensors for leaf in CODES)
