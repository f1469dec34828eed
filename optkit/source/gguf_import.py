"""Write a GGUF file as a float32 checkpoint, with at most one shard of it in memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.errors import SourceError
from optkit.model.gguf_file import Gguf, read_gguf
from optkit.model.writer import CheckpointWriter, write_config
from optkit.progress import Progress
from optkit.source.gguf_by_transformers import import_foreign
from optkit.source.gguf_llama import LAYOUTS, checkpoint_shape, layout_of, tensor_name
from optkit.source.gguf_tokenizer import import_tokenizer
from optkit.source.quiet import quiet_transformers

if TYPE_CHECKING:
    from numpy import ndarray


def import_gguf(path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    """Fill `target` from a GGUF file, and return what was found in it.
    That is weights, config, generation config and tokenizer.

    Raises SourceError for an architecture or a tensor type that cannot be imported.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    gguf = read_gguf(path)
    types = dict(sorted(Counter(tensor.type for tensor in gguf.tensors.values()).items()))
    found = {"format": "gguf", "architecture": gguf.architecture, "types": types}
    if gguf.architecture not in LAYOUTS:
        return {**found, **import_foreign(gguf, target, progress)}
    shape, layout = checkpoint_shape(gguf), layout_of(gguf)
    heads = {"attn_q": shape.config["num_attention_heads"], "attn_k": shape.config["num_key_value_heads"]}
    with progress.task("import", len(gguf.tensors), "tensors") as task, CheckpointWriter(target) as writer:
        for tensor in sorted(GGUFReader(path).tensors, key=lambda tensor: tensor.name):
            try:
                weights = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise SourceError(
                    f"the type {tensor.tensor_type.name} cannot be unpacked",
                    where=f"{path}: {tensor.name}",
                    why=str(error),
                ) from error
            part = tensor.name.split(".")[-2]
            if layout.permuted and part in heads:
                weights = in_halves(weights, heads[part])
            writer.add(str(tensor_name(tensor.name, layout)), torch.from_numpy(weights.astype("float32")))
            task.advance(note=tensor.name)
    write_configs(gguf, dict(shape.config), target)
    with progress.task("import the tokenizer", 1) as task:
        import_tokenizer(gguf, shape.config, target, progress)
        task.advance()
    return found


def in_halves(weights: ndarray[Any, Any], heads: int) -> ndarray[Any, Any]:
    """Reorder the rows [heads * width, in] of q or k from neighbours to two halves of a head.
    llama.cpp has pairs, transformers halves.
    """
    width = weights.shape[0] // heads
    return weights.reshape(heads, width // 2, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_configs(gguf: Gguf, config: dict[str, Any], target: Path) -> None:
    """Write config.json with every known field, and generation_config.json with special tokens."""
    with quiet_transformers():
        from transformers import AutoConfig

        full = AutoConfig.for_model(**config).to_diff_dict()
    dropped = {"_name_or_path", "transformers_version"}
    write_config(target, {name: value for name, value in sorted((full | config).items()) if name not in dropped})
    special = {name: value for name, value in config.items() if name.endswith("_token_id") and value is not None}
    (target / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
