"""GGUF files of the architectures that optkit has no layout for, as transformers reads them.

Its reader needs torch and the whole model in memory, so that a process of its own has them.
Of the metadata it reads what it has a word for. What it leaves at defaults or reads wrong is corrected
here, and a file with more is refused. tests/gguf/test_readers.py compares with llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from optkit.common.files import reading
from optkit.environment import offline_on
from optkit.errors import SourceError, first_line
from optkit.model.config_defaults import keys_of
from optkit.model.gguf_file import Gguf, read_gguf
from optkit.model.shape import ModelShape, TensorInfo
from optkit.processes.child import Child
from optkit.processes.child_program import Parent, importing
from optkit.processes.commands import python_environment
from optkit.progress import Progress, SilentProgress
from optkit.source.gguf_tokenizer import describe_, found_by_hash
from optkit.source.quiet import quiet_transformers

WORKER = "optkit.source.gguf_by_transformers"
SPELLED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
"""Architectures of GGUF that transformers' table of metadata spells in another way."""
KNOWN = "GGUF_CONFIG_MAPPING", "integrations/ggml.py"
"""transformers' table of the architectures that it reads. Others need no process to say so."""
TOKENIZERS = "GGUF_TO_FAST_CONVERTERS", KNOWN[1]
"""Its table of those whose tokenizer it reads."""
PROVEN = frozenset({"falcon", "gemma2", "gemma3", "nemotron", "phi3", "qwen2moe", "qwen3moe", "stablelm", "starcoder2"})
"""Architectures whose logits were compared with llama.cpp's: tests/gguf/test_readers.py."""
OF_NO_MATTER = frozenset({"vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length"})
"""Keys that say once more what tensors' shapes say."""
OF_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
SOFT_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
THETA = {"rope.freq_base": "rope_theta"}
UNREAD = {
    "falcon": {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    "gemma2": SOFT_CAPS,
    "gemma3": SOFT_CAPS,
    "qwen2_moe": {**OF_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    "qwen3_moe": OF_EXPERTS,
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
    "stablelm": THETA,
    "starcoder2": THETA,
}
"""Architecture -> keys that transformers leaves at its config's default, and the field that each is."""
CORRECTED = {
    "gemma2": {"rope.scaling.type", "rope.scaling.factor"},
    "gemma3": {"rope.scaling.type", "rope.scaling.factor"},
    "phi3": {"attention.sliding_window"},
    "stablelm": {"use_parallel_residual"},
}
"""Architecture -> keys that `corrections` reads, or that the tensors tell too."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Architecture -> blocks of the model of 27B, whose attention is scaled by the width of all heads (llama.cpp)."""
PARTIAL = frozenset({"nemotron", "phi3", "stablelm"})
"""Architectures that may rotate a part of each head."""


def corrections(gguf: Gguf) -> dict[str, Any]:
    """Return fields of the config that transformers leaves at defaults or reads wrong, as llama.cpp has them."""
    kind, found = gguf.architecture, dict[str, Any]()
    share = gguf.get("embedding_length", 0) // (gguf.get("attention.head_count") or 1)
    size = gguf.get("attention.key_length", share)
    if kind in LARGEST:
        found["query_pre_attn_scalar"] = share if gguf.get("block_count") == LARGEST[kind] else size
    if kind in PARTIAL and size and (rotated := gguf.get("rope.dimension_count")):
        found["partial_rotary_factor"] = rotated / size
    if kind == "phi3":
        found |= {"sliding_window": gguf.get("attention.sliding_window") or None}
        found |= {"pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id")}
    if (scaling := gguf.get("rope.scaling.type")) == "linear":
        found["rope_scaling"] = {"rope_type": scaling, "factor": gguf.get("rope.scaling.factor")}
    return found


def foreign_shape(gguf: Gguf, known: Mapping[str, Any]) -> ModelShape:
    """Return config and tensors of the float32 checkpoint that transformers makes of a file.
    `known` are the architectures that optkit reads itself.

    Raises SourceError for an architecture that transformers does not read either.
    """
    stat, kind = gguf.path.stat(), gguf.architecture
    names = {kind, SPELLED.get(kind), f"{kind}_text"}
    if not names & keys_of(*KNOWN):
        why = "Neither optkit nor transformers reads it"
    elif not names & keys_of(*TOKENIZERS):
        why = "transformers reads its weights, and no tokenizer of it"
    elif kind not in PROVEN:
        why = "transformers reads it, and nobody has compared what it reads with llama.cpp"
    else:
        told = _asked(str(gguf.path.absolute()), stat.st_mtime_ns, stat.st_size)
        why = told.get("refused", "")
    if why:
        raise SourceError(
            f"unsupported GGUF architecture '{kind}'"
            if kind not in PROVEN
            else f"transformers cannot read this {kind}",
            where=str(gguf.path),
            why=f"{why}. optkit imports {', '.join(sorted({*known, *PROVEN}))}",
            remedy="Take the safetensors form of the model",
        )
    tensors = {name: TensorInfo("F32", tuple(shape)) for name, shape in told["tensors"].items()}
    return ModelShape(config=told["config"], tensors=tensors)


def import_foreign(gguf: Gguf, target: Path, progress: Progress) -> dict[str, Any]:
    """Fill `target` with what transformers reads: weights, config and tokenizer.

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
    return {"reader": "transformers"}


@cache
def _asked(path: str, changed: int, size: int) -> dict[str, Any]:
    return _ask({"path": path}, SilentProgress())


def _ask(order: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    env = python_environment(**offline_on("cpu"))
    with Child(WORKER, name="the process that read the GGUF file", env=env) as child:
        child.send(order)
        told: dict[str, Any] = child.result(progress)
    return told


def work(parent: Parent) -> dict[str, Any]:
    """Return what an order asks for: the shape of the checkpoint, or what its import left out."""
    order = parent.order()
    with importing():
        from transformers import configuration_utils
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    for kind, words in UNREAD.items():
        GGUF_CONFIG_MAPPING.get(kind, {}).update(words)
    gguf, read = read_gguf(Path(order["path"])), configuration_utils.load_gguf_checkpoint

    def corrected(*arguments: Any, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = read(*arguments, **options)
        found["config"] |= corrections(gguf)
        return found

    configuration_utils.load_gguf_checkpoint = corrected
    with quiet_transformers():
        return _imported(order, parent) if "target" in order else _described(order)


def _described(order: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    path, left = Path(order["path"]), _left_out(read_gguf(Path(order["path"])))
    if left:
        return {"refused": f"It does not look at {', '.join(left)}"}
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (AssertionError, ValueError, KeyError, TypeError, NotImplementedError) as error:
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

    def watched(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        with parent.task("import by transformers", len(tensors), "tensors") as task:
            for tensor in tensors:
                yield tensor
                task.advance(note=tensor.name)

    reader.tqdm = watched  # its only bar, in a process that does nothing else
    files.GGUFReader = cache(files.GGUFReader)  # config, weights, tokenizer: each would read all of it, for seconds
    path = Path(order["path"])
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
    return {}


def _left_out(gguf: Gguf) -> list[str]:
    """Return the metadata and tensors that nobody looks at, as far as they matter."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    words = {*GGUF_CONFIG_MAPPING.get(SPELLED.get(gguf.architecture, gguf.architecture), ())}
    words |= OF_NO_MATTER | CORRECTED.get(gguf.architecture, set())
    words -= {"rope.scaling.type"} if gguf.get("rope.scaling.type") not in ("none", "linear") else set()
    prefix = f"{gguf.architecture}."
    asked = [name.removeprefix(prefix) for name in gguf.metadata if name.startswith(prefix)]
    return [name for name in asked if name not in words] + [name for name in gguf.tensors if name.startswith("rope_")]
