"""Stage `gguf`: a checkpoint as a GGUF file, for llama.cpp and what stands on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from optkit.environment import unmet
from optkit.errors import StageError
from optkit.gguf.architecture import EXPERT, gguf_architecture, gguf_name, hyperparameters
from optkit.model.calibration_memory import calibration_bytes
from optkit.model.checkpoint import Checkpoint
from optkit.model.formats.gguf import MODEL
from optkit.model.gguf_file import read_gguf
from optkit.model.layer_sizes import bits_per_weight
from optkit.model.linear_layers import layers_of
from optkit.model.packed_floats import forget_packing
from optkit.model.packed_names import BESIDE, CODES
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.text_config import text_config
from optkit.model.writer import copy_companions
from optkit.onnx.prediction import exported_config
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Format, Report, Transform

Type = Literal[
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0",
    "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K",
]  # fmt: skip
FLOATS = ("F32", "F16", "BF16")
LLAMA_CPP = "llama-cpp-python>=0.3.36"
OUTSIDE = ("model.embed_tokens.weight", "lm_head.weight")
BLOCKS_OF_32 = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")
"""Types that pack 32 inputs at a time; the others pack 256."""
LIBRARY_BYTES = 700_000_000
"""What torch, transformers and llama.cpp take."""
TOKENS, LOGITS, BATCH = 256, 5, 8
"""Of the text on which file and source are compared, and the tensors of their logits; sequences of
`imatrix` that run at once."""
FLOAT_FILE = "float.gguf"
BITS = {"Q8": 8.5, "Q6": 6.5625, "Q5": 5.5, "Q4": 4.5, "IQ": 4.5, "Q3": 3.4375, "Q2": 2.625}
"""Bits of a weight of the types that begin so."""


class Gguf(Transform):
    """Write a model as GGUF. Codes of 4 bits, and symmetric ones of 8, in groups of 32 inputs or
    multiples stay the very codes; llama.cpp's own quantizer makes every other type of float weights.
    """

    kind: ClassVar[str] = "gguf"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- gptq: {bits: 4, group_size: 32, calibration: {dataset: c4}}\n- gguf"
    shorthand: ClassVar[str] = "type"
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})
    produces: ClassVar[Format] = Format.GGUF
    requires: ClassVar[tuple[str, ...]] = ("gguf>=0.17",)

    type: Type | None = None
    """Of float weights: what the matrices are stored as. Left out: as they are. Of a quantized
    model its codes decide."""
    embedding: Literal["F32", "F16", "BF16", "Q8_0", "Q6_K"] | None = None
    """Of a quantized model: what a float embedding and lm_head are stored as. Left out: Q8_0. Q6_K is
    what llama.cpp itself takes, and packs rows of a multiple of 256."""
    imatrix: Calibration | None = None
    """Of a type that llama.cpp quantizes to: the text whose activations weigh its rounding errors.
    Left out: all inputs weigh the same."""
    allow_fallback: bool = False
    """llama.cpp stores a matrix whose rows are no multiple of 256 as another type with more bits.
    `true`: it may, and the report says which; else such a model is refused."""

    def needs(self) -> tuple[str, ...]:
        """Return the packages that these fields need: llama.cpp alone makes most types."""
        return (*self.requires, LLAMA_CPP) if self._by_llama_cpp or self.embedding == "Q6_K" else self.requires

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Write the file, and count its bits from its own header.

        Raises StageError for a model, a layer or a tokenizer that llama.cpp has not;
        MissingPackageError if the type needs llama.cpp and it is not installed.
        """
        from optkit.gguf.llama_cpp import quantize
        from optkit.gguf.writing import write_gguf

        shape = Checkpoint(source).shape
        coded = self._refuse(shape)
        importance = self._importance(source, shape, context)
        file = target / (FLOAT_FILE if self._by_llama_cpp else MODEL)
        matrices = None if self._by_llama_cpp else self.type
        outside = (self.embedding or "Q8_0") if coded else matrices
        with context.progress.task("gguf", len(shape.tensors), "tensors") as task:
            write_gguf(source, file, matrices, outside, context.trust_remote_code, task)
            if self._by_llama_cpp:
                task.advance(0, note=f"llama.cpp makes {self.type}")
                quantize(file, target / MODEL, str(self.type), importance)
                file.unlink()
        copy_companions(source, target, context.trust_remote_code, exported_config(shape.config, "float32"))
        forget_packing(target)
        return self._report(target, *self._proof(source, target / MODEL, context))

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the size by the bits of the type, and the memory of two matrices; of a mix of types
        those of the usual one.
        """
        coded = self._refuse(shape)
        left: dict[str, TensorInfo] = {}
        for name, info in shape.tensors.items():
            leaf = name.rpartition(".")[2]
            if leaf in CODES:
                left[name] = _bytes(info.size_bytes * (20 if _has_zeros(name, shape) else 18) / 16)
            elif leaf not in BESIDE:
                outside = (self.embedding or "Q8_0") if coded and name in OUTSIDE else self.type
                kind = (outside or info.dtype) if len(info.shape) > 1 else "F32"
                left[name] = (
                    _bytes(info.elements * BITS[kind[:2]] / 8) if kind not in FLOATS else replace(info, dtype=kind)
                )
        size = sum(info.size_bytes for info in left.values())
        largest = max(4 * info.elements for info in shape.tensors.values())
        beside = shape.size_bytes if self._by_llama_cpp else 0
        logits = 4 * TOKENS * int(shape.config.get("vocab_size") or 0)
        ram = max(3 * largest, shape.size_bytes + int(size) + LOGITS * logits)
        if self.imatrix:
            hidden, batch = calibration_bytes(shape, layers_of(shape), self.imatrix, BATCH)
            ram = max(ram, hidden + batch + max(shape.block_bytes, shape.outside_bytes))
        cost = Cost(disk_bytes=size + beside, ram_bytes=LIBRARY_BYTES + ram)
        return cost, ModelShape(exported_config(shape.config, "float32"), left)

    def _importance(self, source: Path, shape: ModelShape, context: Context) -> dict[str, Any]:
        """Return tensor of the file -> mean square of each input; nothing without a text."""
        if not self.imatrix:
            return {}
        from optkit.stages.quantizing.input_squares import input_squares

        architecture = gguf_architecture(shape.config)
        found = input_squares(source, self.imatrix, context, "gguf.imatrix")
        return {gguf_name(f"{name}.weight", architecture): squares.numpy() for name, squares in found.items()}

    def _proof(self, source: Path, file: Path, context: Context) -> tuple[dict[str, Any], tuple[str, ...]]:
        if unmet([LLAMA_CPP]):
            return {}, ("the file was not compared with its source: llama-cpp-python is not installed",)
        from optkit.gguf.proof import compare

        return compare(source, file, self._by_llama_cpp, context.trust_remote_code)

    def _report(self, target: Path, proof: Mapping[str, Any], said: tuple[str, ...]) -> Report:
        tensors = read_gguf(target / MODEL).tensors
        types = Counter(each.type for each in tensors.values() if len(each.shape) > 1)
        details = {
            "types": dict(types.most_common()),
            "bits_per_weight": round(bits_per_weight(Format.GGUF.layer_sizes(target)), 4),
            "size_bytes": (target / MODEL).stat().st_size,
            **proof,
        }
        others = Counter(
            each.type for each in tensors.values() if len(each.shape) > 1 and each.shape[-1] % 256 and self._packs_256
        )
        notes = said
        if others:
            made = " and ".join(f"{count} as {kind}" for kind, count in others.most_common())
            notes = (
                *said,
                f"llama.cpp stored {sum(others.values())} of {sum(types.values())} matrices otherwise than as "
                f"{self.type}, whose rows are no multiple of 256: {made}; the file has "
                f"{details['bits_per_weight']:.2f} bits a weight",
            )
        text = (self.imatrix.identity(),) if self.imatrix else ()
        return Report(changed=len(tensors), details=details, notes=notes, calibrated_on=text)

    @property
    def _by_llama_cpp(self) -> bool:
        return self.type not in (None, *FLOATS)

    @property
    def _packs_256(self) -> bool:
        return self._by_llama_cpp and self.type not in BLOCKS_OF_32

    def _refuse(self, shape: ModelShape) -> bool:
        """Return whether the model holds codes. Raises StageError for what the fields do not fit."""
        architecture = gguf_architecture(shape.config)
        with suppress(AttributeError, KeyError, TypeError):  # what only transformers derives is asked when it runs
            hyperparameters(SimpleNamespace(**text_config(shape.config)), architecture)
        coded = bool(shape.config.get("quantization_config"))
        if coded and self.type:
            raise StageError(
                "type means nothing here: the codes of the model decide",
                where="gguf.type",
                remedy="Leave it out, or take the quantizing stage out",
            )
        if not coded and self.embedding:
            raise StageError(
                "embedding means nothing here: the model has float weights",
                where="gguf.embedding",
                remedy="Leave it out",
            )
        if self.imatrix and not self._by_llama_cpp:
            raise StageError(
                "imatrix means nothing here: nothing is rounded by llama.cpp",
                where="gguf.imatrix",
                remedy="Leave it out, or take a type such as Q4_K_M",
            )
        if self.imatrix and any(EXPERT.search(name) for name in shape.tensors):
            raise StageError(
                "imatrix cannot weigh experts",
                where="gguf.imatrix",
                why="A text reaches each of them by another part of its tokens",
                remedy="Leave it out",
            )
        if coded:
            return True
        for name, info in shape.tensors.items():
            gguf_name(name, architecture)
            block = 256 if self._packs_256 and not self.allow_fallback else 32
            if self._by_llama_cpp and len(info.shape) > 1 and info.shape[-1] % block:
                raise StageError(
                    f"rows of {info.shape[-1]:,} numbers are no multiple of the {block} that {self.type} packs",
                    where=name,
                    why="llama.cpp would store it as another type with more bits" if block == 256 else "",
                    remedy="Take Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0, or set allow_fallback: true"
                    if block == 256
                    else "Take F16",
                )
        return False


def _has_zeros(name: str, shape: ModelShape) -> bool:
    layer, quantization = name.rpartition(".")[0], shape.config["quantization_config"]
    return f"{layer}.weight_zero_point" in shape.tensors or not quantization.get("sym", "weight_packed" in name)


def _bytes(count: float) -> TensorInfo:
    return TensorInfo("U8", (int(count),))
