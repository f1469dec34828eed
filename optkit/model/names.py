"""Which tensor of the checkpoint holds which parameter of the model.
Every one on both sides is accounted for, or it is an error.

The names differ by the renamings of transformers (Mixtral's `block_sparse_moe` is `mlp` in the
model), and by the prefix of the base model (old GPT-2 files have no `transformer.`). Tied weights
differ too (no `lm_head` in the file). transformers would fill a parameter that it does not find
with random numbers; here that is a SourceError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.experts import Experts
from optkit.model.inventory import OLD_BUFFERS
from optkit.model.shape import PROPOSING_BLOCKS, place_in_list
from optkit.model.unfound import rewritten


def renamed_tensors(model: PreTrainedModel, tensors: Iterable[str]) -> dict[str, str]:
    """Return tensor of the checkpoint -> the name that transformers gives it.
    That is before it joins experts and adjusts the prefix. A name that the model has stays if no
    renaming makes another one of the model of it (DeepSeek-V4's `model.norm`).
    """
    renamings = [item for item in get_model_conversion_mapping(model) if isinstance(item, WeightRenaming)]
    known = set(model.state_dict(keep_vars=True))
    renamed = {}
    for name in tensors:
        new = name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        stays = name in known and with_base_prefix(new, model.base_model_prefix, known) not in known
        renamed[name] = name if stays else new
    return renamed


def with_base_prefix(name: str, prefix: str, known: Mapping[str, object] | set[str]) -> str:
    """Return the name as `known` has it, with or without the prefix of the base model."""
    if name in known or not prefix:
        return name
    candidates = (f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((candidate for candidate in candidates if candidate in known), name)


def match_tensors(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """Return parameter or persistent buffer -> tensor of the checkpoint.
    The model's experts are unfused.

    Raises SourceError if a side has names that the other lacks, or shapes differ; up to three of
    each are named.
    """
    slots = {name: tuple(slot.shape) for name, slot in model.state_dict(keep_vars=True).items()}
    found: dict[str, str] = {}
    left: dict[str, str] = {}
    for tensor, renamed in renamed_tensors(model, checkpoint.tensors).items():
        name = with_base_prefix(renamed, model.base_model_prefix, slots)
        if name in slots and name not in found:
            found[name] = tensor
        elif not is_ignorable(renamed, model):
            left[tensor] = renamed
    _refuse_rewritten(model, found, checkpoint)
    _tie(found, model)
    optional = model._keys_to_ignore_on_load_missing or ()
    missing = [each for each in slots if each not in found and not any(re.search(other, each) for other in optional)]
    if left or missing:
        _refuse_rewritten(model, {renamed: tensor for tensor, renamed in left.items()}, checkpoint)
        raise SourceError(
            f"the weights are not those of {type(model).__name__}: parameters that the files lack: {_some(missing)}; "
            f"tensors that the model has no place for: {_some([*left])}",
            where=str(checkpoint.directory),
            why="A parameter without weights would be random numbers",
            remedy="See that config.json and the weights belong together",
        )
    _refuse_other_shapes(found, slots, checkpoint)
    return found


def compute_missing_(model: PreTrainedModel, found: Mapping[str, str]) -> None:
    """Put the parameters that files need not hold, as the model's code computes them, on the CPU.
    E.g. Marian's sines of positions.
    """
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None and f"{prefix}.{leaf}" not in found:
                module._parameters[leaf] = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
                model._init_weights(module)


def _refuse_rewritten(model: PreTrainedModel, found: Mapping[str, str], checkpoint: Checkpoint) -> None:
    """Raise SourceError if transformers would change a tensor while loading it.
    A transposition counts only if the shape asks for it.
    """
    converters = [item for item in get_model_conversion_mapping(model) if isinstance(item, WeightConverter)]
    rewriting = [
        item for item in converters if not all(getattr(operation, "check_dims", False) for operation in item.operations)
    ]
    unfused = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Experts))
    for name, tensor in found.items():
        if not name.startswith(unfused) and any(converter.rename_source_key(name)[1] for converter in rewriting):
            raise rewritten(checkpoint.config, tensor, str(checkpoint.directory))


def _refuse_other_shapes(
    found: Mapping[str, str], slots: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint
) -> None:
    wrong = {tensor: name for name, tensor in found.items() if checkpoint.tensors[tensor].shape != slots[name]}
    if wrong:
        different = [
            f"{tensor} is {list(checkpoint.tensors[tensor].shape)}, not {list(slots[name])}"
            for tensor, name in wrong.items()
        ]
        raise SourceError(
            f"{len(wrong):,} of {len(checkpoint.tensors):,} tensors have another shape than config.json "
            f"says: {'; '.join(different[:3])}",
            where=str(checkpoint.directory),
            remedy="See that config.json and the weights belong together",
        )


def _tie(found: dict[str, str], model: PreTrainedModel) -> None:
    """Give a tied parameter that is not in the file the tensor of a partner that is."""
    ties: Mapping[str, str] = model.all_tied_weights_keys
    for target, source in ties.items():
        group = [
            name
            for name in (source, target, *(other for other, same in ties.items() if same == source))
            if name in found
        ]
        for name in (target, source):
            if group and name not in found:
                found[name] = found[group[0]]


def is_ignorable(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor holds no weight of this model.
    It may be a buffer that the code computes now, or a part that it never reads: blocks behind
    those of the decoder propose tokens.
    """
    text = model.config.get_text_config(decoder=True)
    first, place = getattr(text, "num_hidden_layers", None), place_in_list(name)
    if place and first is not None and 0 <= place[1] - first < (getattr(text, PROPOSING_BLOCKS, None) or 0):
        return True
    return any(
        re.search(pattern, name) for pattern in (*OLD_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ()))
    )


def _some(names: list[str]) -> str:
    return f"{len(names):,}" + (f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "")


def stored_parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> set[str]:
    """Return the parameters that the checkpoint holds as they are, among them joined experts.
    The model's experts are fused.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    renamed = renamed_tensors(model, checkpoint.tensors).values()
    return {with_base_prefix(name, model.base_model_prefix, known) for name in renamed} & known


def planned_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the parameters that transformers keeps in another dtype (`_keep_in_fp32_modules`)."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {
        name: kept for pattern, kept in plan.items() for name in names if re.search(pattern.replace("*", ".*"), name)
    }
