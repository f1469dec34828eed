"""A checkpoint as one GGUF file: packed layers with their very codes, everything else as floats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from optkit.errors import StageError
from optkit.gguf.architecture import EXPERT, gguf_architecture, gguf_name, hyperparameters
from optkit.gguf.blocks import block_type, blocks_of
from optkit.gguf.llama_cpp import quantized_rows
from optkit.gguf.vocabulary import vocabulary
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.checkpoint import Checkpoint
from optkit.progress import Task
from optkit.source.calibration import load_tokenizer
from optkit.source.quiet import quiet_transformers

FLOATS = ("F32", "F16", "BF16")
PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Layers whose rows llama.cpp has in another order -> their heads in config.json."""
OUTSIDE = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Stored:
    """A tensor of the file."""

    type: str
    shape: tuple[int, ...]
    content: Callable[[], NDArray[Any]]
    """Its bytes: uint8, or floats."""


def write_gguf(
    source: Path, file: Path, matrices: str | None, outside: str | None, trust_remote_code: bool, task: Task
) -> None:
    """Write the file. Float matrices are stored as the type `matrices`, embedding and lm_head as
    `outside`; None: as they are. Vectors are float32, as llama.cpp has them.

    Raises StageError for a model, a layer or a tokenizer that llama.cpp has not.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    from gguf.quants import quant_shape_to_byte_shape

    with quiet_transformers():
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    checkpoint = Checkpoint(source)
    architecture = gguf_architecture(checkpoint.config)
    tensors = _tensors(checkpoint, config, matrices, outside)
    rows = tensors["token_embd.weight"].shape[0]
    sizes: Counter[str] = Counter()
    for stored in tensors.values():
        sizes[stored.type] += int(np.prod(stored.shape)) if len(stored.shape) > 1 else 0
    most = sizes.most_common(1)[0][0]
    writer = GGUFWriter(file, architecture.name)
    try:
        keys = hyperparameters(config, architecture)
        _add(writer, {f"{architecture.name}.{key}": value for key, value in keys.items()})
        _add(writer, vocabulary(load_tokenizer(source, trust_remote_code), rows))
        writer.add_file_type(LlamaFileType[f"{'ALL' if most == 'F32' else 'MOSTLY'}_{most}"])
        writer.add_quantization_version(2)
        for name, stored in tensors.items():
            kind = GGMLQuantizationType[stored.type]
            width = {"F32": 4, "F16": 2}.get(stored.type)
            size = (
                int(np.prod(stored.shape)) * width
                if width
                else int(np.prod(quant_shape_to_byte_shape(stored.shape, kind)))
            )
            writer.add_tensor_info(name, stored.shape, np.dtype(np.float32), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, stored in tensors.items():
            writer.write_tensor_data(stored.content())
            task.advance(note=name)
    finally:
        writer.close()


def _tensors(checkpoint: Checkpoint, config: Any, matrices: str | None, outside: str | None) -> dict[str, Stored]:
    """Return name of GGUF -> tensor, none of them read."""
    layers = quantized_layers(checkpoint) or {}
    if checkpoint.quantization and not layers:
        raise StageError(
            f"no type of GGUF has the weights of {checkpoint.quantization.get('quant_method')}",
            where="gguf",
            remedy="Put gptq, awq or rtn before it, or give it the float checkpoint and a type",
        )
    architecture = gguf_architecture(checkpoint.config)
    found: dict[str, Stored] = {}
    experts: dict[str, dict[int, Stored]] = {}

    def add(name: str, kind: str, shape: tuple[int, ...], content: Callable[[], NDArray[Any]]) -> None:
        if architecture.permuted and (heads := PERMUTED.get(name.split(".")[-2])):
            if shape[0] % (2 * (count := getattr(config, heads))):
                what, remedy = f"its {shape[0]} rows are not {count} heads", "Take the checkpoint from its source again"
                raise StageError(what, where=name, why=f"In config.json {heads} is {count}", remedy=remedy)
            content = partial(_in_pairs, content, count)
        if architecture.norms_less_one and name.endswith("norm.weight"):
            content = partial(lambda less_one: less_one() + 1, content)
        ours, stored = gguf_name(name, architecture), Stored(kind, shape, content)
        if expert := EXPERT.search(name):
            experts.setdefault(ours, {})[int(expert[0])] = stored
        else:
            found[ours] = stored

    for name, layer in layers.items():

        def content(name: str = name, layer: Any = layer) -> NDArray[Any]:
            return blocks_of(name, layer.integers("cpu")).numpy()

        add(f"{name}.weight", block_type(name, layer.integers("cpu")), layer.shape, content)
    coded = {tensor for layer in layers.values() for tensor in layer.tensors}
    for name, info in checkpoint.tensors.items():
        if name in coded or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        kind = "F32" if len(info.shape) < 2 else (outside if name in OUTSIDE else matrices) or info.dtype
        block = 1 if kind in FLOATS else 256 if kind == "Q6_K" else 32
        if info.shape[-1] % block:
            raise StageError(
                f"rows of {info.shape[-1]} numbers are no multiple of the {block} that {kind} packs",
                where=name,
                remedy=f"Set embedding: {'F16' if block == 32 else 'Q8_0'}",
            )
        add(name, kind, info.shape, partial(_floats, checkpoint, name, kind))
    found |= {name: _stacked(name, [each[index] for index in sorted(each)]) for name, each in experts.items()}
    if factors := _rope_factors(config):
        found["rope_freqs.weight"] = factors
    return found


def _floats(checkpoint: Checkpoint, name: str, kind: str) -> NDArray[Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    values = checkpoint.read_finite(name).float().numpy()
    if kind == "Q6_K":
        return quantized_rows(values, kind)
    with np.errstate(over="ignore"):
        stored = quantize(values, GGMLQuantizationType[kind])
    if kind == "F16" and not np.isfinite(stored).all():
        raise StageError("some weights lie outside of float16", where=name, remedy="Take BF16")
    return np.ascontiguousarray(stored)


def _stacked(name: str, experts: Sequence[Stored]) -> Stored:
    """Return the matrices of all experts as the one tensor that llama.cpp has of them."""
    if len(kinds := sorted({f"{each.type} {list(each.shape)}" for each in experts})) > 1:
        what = f"its experts are {' and '.join(kinds)}"
        raise StageError(what, where=name, why="llama.cpp has them in one tensor", remedy="Give them the same bits")
    shape = (len(experts), *experts[0].shape)
    return Stored(experts[0].type, shape, lambda: np.stack([each.content() for each in experts]))


def _in_pairs(content: Callable[[], NDArray[Any]], heads: int) -> NDArray[Any]:
    """Reorder rows from two halves of a head to neighbours: `optkit.source.gguf_import.in_halves`
    undoes it.
    """
    found = content()
    halves = found.reshape(heads, 2, len(found) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(found.shape)


def _rope_factors(config: Any) -> Stored | None:
    """Return what Llama 3 divides the frequencies of rotary embeddings by; None for other models."""
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
    factors = (plain / scaled).float().numpy()
    return Stored("F32", factors.shape, lambda: factors)


def _add(writer: Any, metadata: Mapping[str, Any]) -> None:
    """Write values by their Python type."""
    from gguf import GGUFValueType

    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    kinds |= {str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}
    for key, value in metadata.items():
        writer.add_key_value(key, value, kinds[type(value)])
