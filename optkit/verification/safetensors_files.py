"""What can be said of a checkpoint without torch.
Files are whole, layers, blocks and ties are as config.json says, and an adapter fits.
"""

from __future__ import annotations

from pathlib import Path

from optkit.common.grouping import some
from optkit.errors import OptkitError
from optkit.model.adapter import read_adapter
from optkit.model.checkpoint import Checkpoint
from optkit.model.expected_tensors import FLOATS
from optkit.model.schemes import activation_bits
from optkit.model.shape import TensorInfo, place_in_list
from optkit.model.task import Task, task_of
from optkit.model.ties import HEADS, broken_tie, output_and_embedding
from optkit.verification.layers import linear_layers, problems_of_layers
from optkit.verification.model_files import Check, ModelFiles, Weights, check_of


class SafetensorsFiles(ModelFiles):
    """A checkpoint."""

    def checks(self) -> tuple[Check, ...]:
        return _check(self.directory)

    def weights(self) -> Weights:
        """Return what config.json says of packed weights, with the adapter beside them."""
        config = Checkpoint(self.directory).config
        quantization = config.get("quantization_config") or {}
        method = str(quantization.get("quant_method", ""))
        adapter = read_adapter(self.directory) if method else None
        task = task_of(config) or Task.GENERATION
        return Weights(self.format, config, task, method, activation_bits(quantization), adapter)


def _check(directory: Path) -> tuple[Check, ...]:
    try:
        checkpoint = Checkpoint(directory)
        count = checkpoint.shape.block_count
    except OptkitError as error:
        return (check_of("weights", [str(error)], ""),)
    files = len(set(checkpoint.files.values()))
    weights = check_of("weights", [], f"{len(checkpoint.tensors):,} tensors in {files} whole safetensors files")
    try:
        found = problems_of_layers(checkpoint)
        layers = check_of("layers", found, _describe(checkpoint))
    except ValueError as error:
        layers = check_of("layers", [], f"not checked: optkit does not know how the layers of {error} lie on disk")
    return (
        weights,
        layers,
        check_of("blocks", _problems_of_blocks(checkpoint, count), f"{count} decoder blocks, each with its tensors"),
        check_of("ties", _problems_of_ties(checkpoint), "tie_word_embeddings and the tensors agree"),
        *_adapter(checkpoint),
    )


def _adapter(checkpoint: Checkpoint) -> tuple[Check, ...]:
    """Check the adapter beside packed weights; nothing if there is none."""
    try:
        adapter = read_adapter(checkpoint.directory) if checkpoint.quantization else None
    except OptkitError as error:
        return (check_of("adapter", [str(error)], ""),)
    if adapter is None:
        return ()
    known = tuple(f".{name}" for name in linear_layers(checkpoint))
    strange = [name for name in adapter.layers if not f".{name}".endswith(known)]
    detail = f"LoRA of rank {adapter.ranks[-1]} at most beside {len(adapter.layers):,} layers"
    return (check_of("adapter", [f"{name} is no layer of the checkpoint" for name in strange], detail),)


def _problems_of_blocks(checkpoint: Checkpoint, count: int | None) -> list[str]:
    """A tensor that one block alone lacks was lost if that block has nothing that the others lack.
    Hybrid blocks differ more.
    """
    blocks: dict[str, dict[int, set[str]]] = {}
    for name in (f"{layer}.weight" for layer in linear_layers(checkpoint)):
        _add_to_block(blocks, checkpoint, name)
    for name, info in checkpoint.tensors.items():
        if len(info.shape) == 1 and name.endswith((".weight", ".bias")):
            _add_to_block(blocks, checkpoint, name)
    problems = []
    main = {place[1] for name in checkpoint.tensors if (place := checkpoint.shape.block(name))}
    if count is not None and main < set(range(count)):
        absent = [str(index) for index in range(count) if index not in main]
        problems.append(f"config.json says {count} decoder blocks, and there are no weights of {some(absent)}")
    for group, members in blocks.items():
        for index, names in members.items():
            others = [each for other, each in members.items() if other != index]
            if len(others) < 2:
                continue
            shared, everywhere = set[str].intersection(*others), set[str].union(*others)
            if names <= everywhere and (lost := sorted(shared - names)):
                problems += [f"there is no {group}.{index}.{name}" for name in lost]
    return problems


def _add_to_block(blocks: dict[str, dict[int, set[str]]], checkpoint: Checkpoint, name: str) -> None:
    if place := place_in_list(name):
        group, index = place
        blocks.setdefault(group, {}).setdefault(index, set()).add(name.removeprefix(f"{group}.").partition(".")[2])


def _problems_of_ties(checkpoint: Checkpoint) -> list[str]:
    tied, (head, embedding) = checkpoint.config.get("tie_word_embeddings"), output_and_embedding(checkpoint)
    if embedding is None:
        return ["there are no token embeddings"]
    packed_head = any(".lm_head." in f".{name}" for name in checkpoint.tensors)
    if tied is False and head is None and not packed_head:
        return [f"tie_word_embeddings is false, and there is no {HEADS[0]}"]
    if tied and head and checkpoint.tensors[head] != checkpoint.tensors[embedding]:
        return [f"tie_word_embeddings is true, and {head} has another shape or dtype than {embedding}"]
    return [wrong] if (wrong := broken_tie(checkpoint)) else []


def _describe(checkpoint: Checkpoint) -> str:
    layers = linear_layers(checkpoint).values()
    packed = sum(bool(stored.keys() - {"weight", "bias"}) or _is_code(stored.get("weight")) for stored in layers)
    return f"{packed} packed layers and {len(layers) - packed} plain ones, as config.json says"


def _is_code(weight: TensorInfo | None) -> bool:
    return weight is not None and weight.dtype not in FLOATS
