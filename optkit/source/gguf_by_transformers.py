"""GGUF files of the architectures that optkit has no layout for, as transformers reads them.

Its reader needs torch and the whole model in memory, so that a process of its own has them.
Of the metadata it reads what it has a word for; the rest is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from optkit.common.files import reading
from optkit.errors import SourceError, first_line
from optkit.model.config_defaults import keys_of
from optkit.model.gguf_file import Gguf
from optkit.model.shape import ModelShape, TensorInfo
from optkit.processes.child import Child
from optkit.processes.child_program import Parent, importing
from optkit.processes.commands import python_environment
from optkit.progress import Progress, SilentProgress

WORKER = "optkit.source.gguf_by_transformers"
SPELLED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
"""Architectures of GGUF that transformers' table of metadata spells in another way."""
KNOWN = "GGUF_CONFIG_MAPPING", "integrations/ggml.py"
"""transformers' table of the architectures that it reads. Others need no process to say so."""
OF_NO_MATTER = frozenset({"vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length"})
"""Keys that say once more what tensors' shapes say."""
OF_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
UNREAD = {
    "minimax_m2": {"expert_feed_forward_length": "intermediate_size"},
    "qwen2_moe": {**OF_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    "qwen3_moe": OF_EXPERTS,
}
"""Architecture -> keys that transformers leaves at its config's default, and the field that each is."""


def foreign_shape(gguf: Gguf, known: Mapping[str, Any]) -> ModelShape:
    """Return config and tensors of the float32 checkpoint that transformers makes of a file.
    `known` are the architectures that optkit reads itself.

    Raises SourceError for an architecture that transformers does not read either.
    """
    stat, read = gguf.path.stat(), keys_of(*KNOWN)
    if read and not {gguf.architecture, SPELLED.get(gguf.architecture)} & read:
        told: dict[str, Any] = {"refused": f"GGUF model with architecture {gguf.architecture} is not supported yet."}
    else:
        told = _asked(str(gguf.path.absolute()), stat.st_mtime_ns, stat.st_size)
    if why := told.get("refused"):
        raise SourceError(
            f"unsupported GGUF architecture '{gguf.architecture}'",
            where=str(gguf.path),
            why=f"optkit imports {', '.join(sorted(known))}, and transformers says: {why}",
            remedy="Take the safetensors form of the model",
        )
    tensors = {name: TensorInfo("F32", tuple(shape)) for name, shape in told["tensors"].items()}
    return ModelShape(config=told["config"], tensors=tensors)


def import_foreign(gguf: Gguf, target: Path, progress: Progress) -> dict[str, Any]:
    """Fill `target` with what transformers reads: weights, config and tokenizer.
    Returns what was left out of the metadata.

    Raises SourceError for a file that transformers cannot read, and for weights that it does not find.
    """
    told = _ask({"path": str(gguf.path.absolute()), "target": str(target.absolute())}, progress)
    if why := told.get("refused"):
        raise SourceError(
            f"transformers cannot read this {gguf.architecture}",
            where=str(gguf.path),
            why=why,
            remedy="Take the safetensors form of the model",
        )
    left = [name for name in told["left_out"] if name not in OF_NO_MATTER]
    said = f"; it does not look at {', '.join(left)} of the metadata" if left else ""
    progress.warn(
        f"{gguf.path}: {gguf.architecture} is read by transformers{said}. Compare the model with its safetensors "
        "form if there is one."
    )
    return {"reader": "transformers", "left_out": left}


@cache
def _asked(path: str, changed: int, size: int) -> dict[str, Any]:
    return _ask({"path": path}, SilentProgress())


def _ask(order: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    environment = python_environment(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    with Child(WORKER, name="the process that read the GGUF file", env=environment) as child:
        child.send(order)
        told: dict[str, Any] = child.result(progress)
    return told


def work(parent: Parent) -> dict[str, Any]:
    """Return what an order asks for: the shape of the checkpoint, or what its import left out."""
    order = parent.order()
    with importing():
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        from optkit.source.quiet import quiet_transformers
    for kind, words in UNREAD.items():
        GGUF_CONFIG_MAPPING.get(kind, {}).update(words)
    with quiet_transformers():
        return _imported(order, parent) if "target" in order else _described(order)


def _described(order: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    path = Path(order["path"])
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        return {"refused": first_line(error)}
    stored = revert_weight_conversion(model, {name: model.state_dict()[name] for name in _kept(model)})
    described = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    return {
        "config": json.loads(json.dumps(described, default=str)),
        "tensors": {name: list(tensor.shape) for name, tensor in stored.items()},
    }


def _kept(model: Any) -> list[str]:
    return [name for name in model.state_dict() if name not in model.all_tied_weights_keys]


def _imported(order: Mapping[str, Any], parent: Parent) -> dict[str, Any]:
    import gguf as files
    import torch
    import transformers.modeling_gguf_pytorch_utils as reader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    from optkit.model.gguf_file import read_gguf
    from optkit.source.gguf_tokenizer import describe_, found_by_hash

    def watched(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        with parent.task("import by transformers", len(tensors), "tensors") as task:
            for tensor in tensors:
                yield tensor
                task.advance(note=tensor.name)

    reader.tqdm = watched  # its only bar, in a process that does nothing else
    files.GGUFReader = cache(files.GGUFReader)  # config, weights, tokenizer: each would read all of it, for seconds
    path, gguf = Path(order["path"]), read_gguf(Path(order["path"]))
    place = {"gguf_file": path.name, "local_files_only": True}
    with reading(path, "transformers cannot read it"), found_by_hash():
        model, report = AutoModelForCausalLM.from_pretrained(
            path.parent,
            **place,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)
    if missing := sorted(report["missing_keys"]):
        return {"refused": f"It finds no weights for {len(missing)} parameters ({', '.join(missing[:3])})"}
    model._weight_conversions = None  # those of the file; without them it is saved as it is published
    wanted = _described(order)["tensors"]
    stored = revert_weight_conversion(model, {name: model.state_dict()[name] for name in _kept(model)})
    if wrong := [name for name, tensor in stored.items() if list(tensor.shape) != wanted.get(name)]:
        found = f"{wrong[0]} has {list(stored[wrong[0]].shape)}, and its config says {wanted.get(wrong[0])}"
        return {"refused": f"It does not read all sizes: {found}"}
    model.save_pretrained(order["target"], max_shard_size="4GB")
    tokenizer.save_pretrained(order["target"])
    # the class of an architecture would cut text in its own way, whatever is in tokenizer.json
    describe_(Path(order["target"]), {type(tokenizer).__name__: "PreTrainedTokenizerFast"})
    words = GGUF_CONFIG_MAPPING.get(SPELLED.get(gguf.architecture, gguf.architecture), {})
    prefix = f"{gguf.architecture}."
    asked = [name.removeprefix(prefix) for name in gguf.metadata if name.startswith(prefix)]
    return {"left_out": [name for name in asked if words and name not in words]}
