"""Have transformers read the weights of a model, and see that they are its own."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from optkit.common.out_of_resources import is_out_of_memory
from optkit.errors import MissingPackageError, OptkitError, SourceError, first_line
from optkit.model.attention_choice import attention_options
from optkit.model.checkpoint import Checkpoint
from optkit.model.names import is_ignorable
from optkit.model.packed_floats import refuse_unopened
from optkit.model.task import Task, loader_of, task_of
from optkit.source.quiet import only_errors_of
from optkit.stage import Loading, Opening

PACKAGES = {
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel",
}
"""What transformers needs to open the quantization methods that optkit does not read itself."""
BITSANDBYTES_TILE = 32, 64
"""Outputs and inputs that bitsandbytes' kernel for CPUs with AVX512-BF16 takes together."""


def load_by_transformers(
    opening: Opening, checkpoint: Checkpoint, dtype: torch.dtype, spread: Loading | None
) -> tuple[PreTrainedModel, list[str]]:
    """Open a directory with transformers; return the model with notes.
    Its weights go straight onto the device, or as a setting spreads them.

    Raises SourceError for weights that do not fit the model, MissingPackageError.
    """
    where = str(checkpoint.directory)
    method = str(checkpoint.quantization.get("quant_method")) if checkpoint.quantization else None
    if method == "bitsandbytes":
        only_errors_of("bitsandbytes")
    options = attention_options(checkpoint.config, opening.load_kwargs)
    if spread:
        options = {**options, **spread.kwargs}
    elif method or opening.device != "cpu":
        options = {**options, "device_map": {"": opening.device}}
    try:
        model, report = getattr(transformers, loader_of(checkpoint.config)).from_pretrained(
            where,
            dtype=dtype,
            trust_remote_code=opening.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            **options,
        )
    except Exception as error:  # whatever transformers makes of numbers that it does not expect
        if isinstance(error, ImportError) and method in PACKAGES:
            raise MissingPackageError(PACKAGES[method], where=f"{where} ({method})") from error
        if is_out_of_memory(error) or isinstance(error, OptkitError):
            raise
        raise SourceError("transformers cannot open it", where=where, why=first_line(error)) from error
    # the pooler of an encoder whose features are asked for decides nothing
    unused = "pooler." if task_of(checkpoint.config) is Task.FEATURES else ()
    report["missing_keys"] = [name for name in report["missing_keys"] if not str(name).startswith(unused)]
    report["unexpected_keys"] = [name for name in report["unexpected_keys"] if not is_ignorable(name, model)]
    problems = [
        f"{len(report[kind])} {kind.removesuffix('_keys')} ({_some(report[kind])})" for kind in report if report[kind]
    ]
    if problems:
        refuse_unopened(checkpoint.shape, where)
        raise SourceError(
            f"the weights are not those of {type(model).__name__}: {', '.join(problems)}",
            where=where,
            why="A parameter without weights would be random numbers",
            remedy="See that config.json and the weights belong together",
        )
    notes = [f"{method}: {_kernels_of(model)}"] if method else []
    if method == "bitsandbytes" and opening.device == "cpu":
        notes += _compute_unpackable_plainly_(model)
    return model.eval().requires_grad_(False), [*notes, *(spread.finish(model) if spread else ())]


def _kernels_of(model: PreTrainedModel) -> str:
    """Return what computes with the packed weights of a model that transformers opened."""
    if all(each.is_floating_point() and each.element_size() > 1 for each in model.parameters()):
        return "dequantized by transformers, which has no kernel for it here"
    return "opened by transformers, with the kernels that it has for it"


def _compute_unpackable_plainly_(model: PreTrainedModel) -> list[str]:
    """Let bitsandbytes multiply by 4-bit layers as on other CPUs if its kernel for this one cannot take them.
    Return a sentence for the notes; nothing if there is none.
    """
    rows, columns = BITSANDBYTES_TILE
    found = []
    for name, module in model.named_modules():
        takes = getattr(module, "support_avx512bf16_for_cpu", False)
        if takes and (module.out_features % rows or module.in_features % columns):
            module.support_avx512bf16_for_cpu = False
            found.append(name)
    what = (
        f"bitsandbytes: {_some(found)} are no tiles of {rows} x {columns} weights, and are computed without its kernel"
    )
    return [f"{what} for CPUs with AVX512-BF16; plain transformers fails there"] if found else []


def _some(names: Any) -> str:
    shown = sorted(name if isinstance(name, str) else str(name[0]) for name in names)
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
