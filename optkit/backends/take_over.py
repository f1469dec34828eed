"""What a library left: taken over as an artifact of ours, and checked tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.packed_names import CODED
from optkit.model.shape import FLOAT_NAMES
from optkit.model.writer import copy_companions, write_config


def take_over(
    written: Path, source: Checkpoint, target: Path, chosen: Collection[str], name: str, trusted: bool = False
) -> None:
    """Move the tensors that a library wrote into `target`.
    The source's own config, tokenizer and other files lie beside them.

    Of the library's config.json the `quantization_config` alone is kept: what the model is, the
    source says. Raises StageError if chosen layers are as they were, others are not, or a tensor
    of the source is lost.
    """
    left = Checkpoint(written)
    config = left.quantization
    if not config:
        raise StageError(
            "it wrote no quantization_config", where=f"backend {name}", why="Nobody could open the packed weights"
        )
    check_layers(source, left, chosen, name)
    copy_companions(source.directory, target, trusted)
    for path in sorted({*left.files.values(), *written.glob("*.safetensors.index.json")}):
        path.rename(target / path.name)
    write_config(target, {**source.config, **_dtype(left, chosen), "quantization_config": dict(config)})
    if config.get("quant_method") == "gptq":
        (target / "quantize_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_layers(source: Checkpoint, left: Checkpoint, chosen: Collection[str], name: str) -> None:
    """Raise StageError unless exactly the chosen layers changed their form.
    Nothing of the model may be lost.
    """
    coded = {name for name in _layers(source) if any(f"{name}.{leaf}" in left.tensors for leaf in CODED)}
    changed = {name for name in coded if f"{name}.weight" not in left.tensors}
    where = f"backend {name}"
    if unchanged := sorted(set(chosen) - changed):
        raise StageError(f"{len(unchanged):,} of {len(chosen):,} layers are as they were ({unchanged[0]})", where=where)
    if beyond := sorted(changed - set(chosen)):
        raise StageError(
            f"{len(beyond):,} layers are quantized that should stay as they are ({beyond[0]})", where=where
        )
    tied = bool(source.config.get("tie_word_embeddings"))
    there = {*left.tensors, *(f"{layer}.weight" for layer in changed), *(("lm_head.weight",) if tied else ())}
    if lost := sorted(set(source.tensors) - there):
        what, why = f"{len(lost):,} tensors of the model are lost ({lost[0]})", "It would open with random numbers"
        raise StageError(what, where=where, why=why)


def _layers(checkpoint: Checkpoint) -> list[str]:
    return [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight")]


def _dtype(left: Checkpoint, chosen: Collection[str]) -> Mapping[str, Any]:
    """Return the dtype that the library left the other weights in, as config.json says it."""
    others = (info for name, info in left.tensors.items() if name.rpartition(".")[0] not in chosen)
    floats = (info for info in others if info.dtype in FLOAT_NAMES)
    largest = max(floats, key=lambda info: info.elements, default=None)
    return {} if largest is None else {"dtype": FLOAT_NAMES[largest.dtype]}
