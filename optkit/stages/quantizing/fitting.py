"""Whether the chosen layers fit the group size and what opens the packed format.
Every refusal comes before any computing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any

from optkit.errors import StageError
from optkit.model.linear_layers import EXPERTS, OUTSIDE, ROUTER, Layer, Selection, layers_of, stacks
from optkit.model.output_layer import HEAD
from optkit.model.shape import ModelShape
from optkit.model.state_kernels import code_of
from optkit.model.text_config import text_type
from optkit.packed_tensors.base import COMPRESSED_TENSORS, LayerFormat
from optkit.packed_tensors.gptq import GPTQ, GPTQ_MULTIPLE
from optkit.packed_tensors.integers import BytesQuantized

CASTS = r"self\.(\w+) = self\.\1\.to\(.*dtype="
"""A buffer that a model's code casts for itself while it computes (CTRL)."""


def refuse_encoder_decoder(config: Mapping[str, Any], stage: str, field: str) -> None:
    """Raise StageError if a field holds blocks to those of the unmodified model, and these cannot be."""
    if field and config.get("is_encoder_decoder"):
        raise StageError(
            "blocks of encoder-decoders are not held to those of the unmodified model",
            where=f"{stage}.{field}",
            why="A decoder's targets would be those of another encoder",
            remedy=f"Leave out {field}, or effort",
        )


def refuse_unfit(selection: Selection, formats: Mapping[str, LayerFormat], stage: str) -> None:
    """Raise StageError if group size, format or symmetry do not fit the layers.
    It names a layer and what does fit.
    """
    layers = tuple(selection.layers.values())
    methods = {form.method for form in formats.values()}
    if COMPRESSED_TENSORS in methods:
        refuse_conv1d(layers, f"{stage}.format", "Set format: gptq")
        _refuse_asymmetric_experts(layers, formats, stage)
    refuse_some_experts(selection, formats, stage)
    if GPTQ in methods:
        refuse_odd_shapes(
            layers,
            GPTQ_MULTIPLE,
            "The kernels for GPTQ's format need that",
            f"Set {stage}.format to compressed-tensors, or exclude the layers",
        )
    sizes = {name: getattr(form, "group_size", None) for name, form in formats.items()}
    for size in dict.fromkeys(sizes.values()):
        refuse_uneven_groups([layer for layer in layers if sizes[layer.name] == size], size, stage)


def unknown_architecture(where: str, who: str, remedy: str) -> StageError:
    """Return the error of who runs a model whose code transformers does not have."""
    return StageError(
        "transformers does not have the code of this model's architecture",
        where=where,
        why=f"{who} and runs the model",
        remedy=remedy,
    )


def refuse_layers(names: Sequence[str], what: str, *, where: str, why: str, remedy: str, and_so: str = "") -> None:
    """Raise StageError if there are layers of the kind that `what` says."""
    if names:
        shown = names[0] + (", ..." if len(names) > 1 else "")
        raise StageError(f"{len(names):,} layers {what} ({shown}){and_so}", where=where, why=why, remedy=remedy)


def refuse_conv1d(
    layers: Iterable[Layer],
    where: str,
    remedy: str,
    why: str = "transformers opens compressed-tensors for Linear layers only",
) -> None:
    """Raise StageError for Conv1D layers, which compressed-tensors does not have."""
    transposed = [layer.name for layer in layers if layer.transposed]
    refuse_layers(transposed, "are Conv1D", where=where, why=why, remedy=remedy)


def _refuse_asymmetric_experts(layers: Sequence[Layer], formats: Mapping[str, LayerFormat], stage: str) -> None:
    experts = [
        layer.name for layer in layers if EXPERTS in layer.name and not getattr(formats[layer.name], "symmetric", True)
    ]
    refuse_layers(
        experts,
        "belong to experts",
        and_so=" and would have zero points",
        where=f"{stage}.symmetric",
        why="transformers and vLLM open experts in compressed-tensors without zero points only",
        remedy="Set symmetric: true",
    )


def _refuse_unread_experts(selection: Selection, formats: Mapping[str, LayerFormat], stage: str) -> None:
    """Raise StageError for experts of compressed-tensors that transformers would leave random.

    It looks for packed tensors in them if any layer is packed. It reads 8-bit floats, and floats
    beside those.
    """
    whole = [name for name, form in formats.items() if getattr(form, "number", "") == "int"]
    refuse_layers(
        [name for name in whole if EXPERTS in name]
        or [name for name in selection.skipped if whole and EXPERTS in name],
        "belong to experts",
        where=stage,
        why="vLLM opens them, and transformers finds no experts beside or among layers of 8-bit integers: it leaves "
        "them random",
        remedy="Take fp8, or rtn with bits: 8",
    )
    packed = any(form.method == COMPRESSED_TENSORS and not hasattr(form, "number") for form in formats.values())
    refuse_layers(
        [name for name in selection.skipped if packed and EXPERTS in name],
        "of experts would stay as they are beside packed ones",
        where=f"{stage}.exclude",
        why="transformers looks for packed experts then, finds none, and leaves them random",
        remedy="Quantize the experts too, or take fp8, beside which they may stay",
    )


def refuse_some_experts(selection: Selection, formats: Mapping[str, LayerFormat], stage: str) -> None:
    """Raise StageError if experts would have different forms."""
    experts = [name for name in selection.layers if EXPERTS in name]
    if other := next((name for name in experts if formats[name] != formats[experts[0]]), None):
        raise StageError(
            f"{other} has {formats[other].label} and {experts[0]} has {formats[experts[0]].label}",
            where=f"{stage}.overrides",
            why="transformers opens all experts of a model in one form, and computes something else with others",
            remedy="Match all experts with one pattern, such as *.experts.*",
        )
    chosen = {name.partition(EXPERTS)[0] for name in experts}
    left = next((name for name in selection.skipped if EXPERTS in name and name.partition(EXPERTS)[0] in chosen), None)
    if left:
        raise StageError(
            f"{left} is left out and other experts beside it are not",
            where=f"{stage}.exclude",
            why="transformers and vLLM open the experts of a block all packed or all plain",
            remedy="Take all experts of the block, or none",
        )
    _refuse_unread_experts(selection, formats, stage)


def joined_differently(selection: Selection, formats: Mapping[str, LayerFormat]) -> list[str]:
    """Return a note if layers that vLLM joins (q, k and v; gate and up) do not all have one form."""
    split = [
        stack
        for stack in stacks((*selection.layers, *selection.skipped))
        if len({formats.get(name) for name in stack}) > 1
    ]
    if not split:
        return []
    first, *others = split[0]
    joined = ", ".join(name.rpartition(".")[2] for name in others)
    places = f", and so in {len(split) - 1:,} other places" if len(split) > 1 else ""
    return [f"vLLM joins {first} with {joined} and opens them in one form only{places}; transformers opens this model"]


def exceptions_for_vllm(selection: Selection, formats: Mapping[str, LayerFormat]) -> list[str]:
    """Return a note if the format gptq has exceptions.
    transformers opens it with optimum, which takes no layer of a block for one.
    """
    forms = {form for name, form in formats.items() if form.method == GPTQ and name != HEAD}
    left = [name for name, reason in selection.skipped.items() if reason not in (OUTSIDE, ROUTER)]
    if not forms or (len(forms) == 1 and not left):
        return []
    which = f"{left[0]} is left out" if left else "layers have several forms"
    return [
        f"{which}, which vLLM and gptqmodel read in the format gptq and transformers does not: it "
        "opens format: compressed-tensors"
    ]


def experts_for_gpus(formats: Mapping[str, LayerFormat]) -> list[str]:
    """Return a note if experts have a form that transformers does not open.
    It takes them for one tensor, and finds none.
    """
    methods = {form.method for name, form in formats.items() if EXPERTS in name} - {COMPRESSED_TENSORS}
    return [
        f"vLLM on GPUs opens experts in the format {method}; transformers and vLLM on CPUs do not "
        "(transformers leaves them random): format: compressed-tensors with symmetric: true is opened by both"
        for method in sorted(methods)
    ]


def in_whole_bytes(formats: Mapping[str, LayerFormat]) -> list[str]:
    """Return notes if codes take a byte each."""
    bits = {form.bits for form in formats.values() if isinstance(form, BytesQuantized)}
    if not bits:
        return []
    notes = [
        "codes take a byte each, because the model's own code reads the weight of every layer: transformers "
        "opens that, vLLM does not"
    ]
    fewer = [str(each) for each in sorted(bits - {8})]
    return [*notes, f"bits: 8 makes the same size as {either(fewer)} here, and a smaller error"] if fewer else notes


def refuse_odd_shapes(layers: Iterable[Layer], multiple: int, why: str, remedy: str) -> None:
    """Raise StageError if a layer's outputs or inputs are not a multiple."""
    odd = [layer for layer in layers if layer.inputs % multiple or layer.outputs % multiple]
    if odd:
        others = f", and so for {len(odd) - 1:,} other layers" if len(odd) > 1 else ""
        raise StageError(
            f"{odd[0].outputs} x {odd[0].inputs} weights: not both are multiples of {multiple}{others}",
            where=odd[0].name,
            why=why,
            remedy=remedy,
        )


def refuse_uneven_groups(layers: Sequence[Layer], group_size: int | None, stage: str) -> None:
    """Raise StageError if a group size does not divide the inputs of a layer.
    It names the sizes that divide all of them.
    """
    wrong = [layer for layer in layers if group_size and layer.inputs % group_size]
    if wrong:
        common = gcd(*(layer.inputs for layer in layers))
        fitting = [str(size) for size in (256, 128, 64, 32, 16, 8) if common % size == 0]
        others = f", nor are those of {len(wrong) - 1:,} other layers" if len(wrong) > 1 else ""
        raise StageError(
            f"{wrong[0].inputs} columns are not a multiple of group_size {group_size}{others}",
            where=wrong[0].name,
            remedy=f"Use {either(fitting)}"
            if fitting
            else f"Set {stage}.group_size to null: one scale per output channel",
        )


def either(words: Sequence[str]) -> str:
    """Return e.g. `2, 4 or 8`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def refuse_other_dtypes(shape: ModelShape, stage: str) -> None:
    """Raise StageError unless the layers of the blocks are in bfloat16."""
    dtypes = sorted(
        {shape.tensors[f"{name}.weight"].dtype for name, layer in layers_of(shape).items() if not layer.router}
        - {"BF16"}
    )
    if dtypes:
        raise StageError(
            f"the model has weights in {', '.join(dtypes)}",
            where=stage,
            why="compressed-tensors dequantizes 4-bit floats to bfloat16 alone, and transformers cannot "
            "mix it with another dtype",
            remedy="Put `- bf16` before it",
        )
    kind = text_type(shape.config)
    if buffer := re.search(CASTS, code_of(kind)):
        raise StageError(
            f"the code of {kind} casts its {buffer[1]} while it computes",
            where=stage,
            why="compressed-tensors keeps it in float32, which transformers cannot mix with bfloat16",
            remedy="Take nf4, or leave the weights in float32 and take rtn",
        )
