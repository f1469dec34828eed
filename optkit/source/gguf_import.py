"""Write a GGUF file as a float32 checkpoint, tensor by tensor, so that at most one of them is in memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.errors import SourceError
from optkit.model.writer import CheckpointWriter, write_config
from optkit.progress import Progress
from optkit.source.gguf import Gguf, read_gguf
from optkit.source.gguf_llama import checkpoint_shape, layout_of, tensor_name
from optkit.source.quiet import quiet_transformers

if TYPE_CHECKING:
    from numpy import ndarray

LOADING_KEYS = ("is_local", "local_files_only", "backend", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "model_type")
"""What transformers writes into tokenizer_config.json of how the tokenizer was loaded, and not of what it is."""
PORTABLE_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""The name that transformers 4 knows as well."""


def import_gguf(path: Path, target: Path, progress: Progress) -> dict[str, Any]:
    """Fill `target` with weights, config, generation config and tokenizer of a GGUF file, and return what was found in it.

    Raises SourceError for an architecture or a tensor type that cannot be imported.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    gguf = read_gguf(path)
    shape, layout = checkpoint_shape(gguf), layout_of(gguf)
    heads = {"attn_q": shape.config["num_attention_heads"], "attn_k": shape.config["num_key_value_heads"]}
    with progress.task("import", len(gguf.tensors) + 1, "tensors") as task, CheckpointWriter(target) as writer:
        for tensor in sorted(GGUFReader(path).tensors, key=lambda tensor: tensor.name):
            try:
                weights = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise SourceError(
                    f"the type {tensor.tensor_type.name} cannot be unpacked", where=f"{path}: {tensor.name}", why=str(error)
                ) from error
            part = tensor.name.split(".")[-2]
            if layout.permuted and part in heads:
                weights = in_halves(weights, heads[part])
            writer.add(str(tensor_name(tensor.name, layout)), torch.from_numpy(weights.astype("float32")))
            task.advance(note=tensor.name)
        write_configs(gguf, dict(shape.config), target)
        import_tokenizer(gguf, shape.config, target)
        task.advance(note="tokenizer")
    types = Counter(tensor.type for tensor in gguf.tensors.values())
    return {"format": "gguf", "architecture": gguf.architecture, "types": dict(sorted(types.items()))}


def in_halves(weights: ndarray[Any, Any], heads: int) -> ndarray[Any, Any]:
    """Reorder the rows [heads * width, in] of q or k from pairs of neighbours (llama.cpp) to two halves of a head (transformers)."""
    width = weights.shape[0] // heads
    return weights.reshape(heads, width // 2, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_configs(gguf: Gguf, config: dict[str, Any], target: Path) -> None:
    """Write config.json with every field that transformers knows, and generation_config.json with the special tokens."""
    with quiet_transformers():
        from transformers import AutoConfig

        full = AutoConfig.for_model(**config).to_diff_dict()
    dropped = {"_name_or_path", "transformers_version"}
    write_config(target, {name: value for name, value in sorted((full | config).items()) if name not in dropped})
    special = {name: value for name, value in config.items() if name.endswith("_token_id") and value is not None}
    (target / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def import_tokenizer(gguf: Gguf, config: Any, target: Path) -> None:
    """Write the tokenizer of a GGUF file, with the special tokens that its metadata names and its chat template."""
    with quiet_transformers():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.path.parent), gguf_file=gguf.path.name, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError("the tokenizer in the file cannot be read", where=str(gguf.path), why=str(error).split("\n")[0]) from error
        tokenizer.clean_up_tokenization_spaces = False
        for name in ("bos_token", "eos_token", "pad_token"):
            number = config[f"{name}_id"]
            setattr(tokenizer, name, None if number is None else tokenizer.convert_ids_to_tokens(number))
        tokenizer.save_pretrained(target)
    file = target / "tokenizer_config.json"
    described = {name: value for name, value in json.loads(file.read_text(encoding="utf-8")).items() if name not in LOADING_KEYS}
    described["tokenizer_class"] = PORTABLE_CLASS.get(described["tokenizer_class"], described["tokenizer_class"])
    file.write_text(json.dumps(described, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
