"""How far the tensors of two safetensors files are apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from optkit.common.frozen import Frozen
from optkit.model.safetensors_file import read_header


class TensorDifference(Frozen):
    """A tensor that is not the same in both."""

    name: str
    file: str
    elements: int
    """Elements of the artifact's tensor."""
    differing: int
    """Elements that are not equal, all of them if dtype or shape differ."""
    largest: float | None = None
    """Largest absolute difference of floats; None for integers, which are packed codes."""
    relative: float
    """The same beside the largest value of the artifact's tensor; of codes the share that differs."""


def differing_tensors(artifact: Path, remade: Path, files: Iterable[str]) -> list[TensorDifference]:
    """Return the tensors that differ in files of these names, the one furthest apart first."""
    found = [each for name in files for each in _in_file(artifact, remade, name)]
    return sorted(found, key=lambda each: (-each.relative, each.name))


def _in_file(artifact: Path, remade: Path, file: str) -> Iterator[TensorDifference]:
    import torch
    from safetensors import safe_open

    theirs, ours = read_header(artifact / file), read_header(remade / file)
    with safe_open(artifact / file, "pt") as there, safe_open(remade / file, "pt") as here:
        for name in sorted({*theirs, *ours}):
            count = theirs[name].elements if name in theirs else ours[name].elements
            if theirs.get(name) != ours.get(name):
                yield TensorDifference(name=name, file=file, elements=count, differing=count, relative=1.0)
                continue
            old, new = there.get_tensor(name), here.get_tensor(name)
            if torch.equal(old.view(torch.uint8), new.view(torch.uint8)) if old.dim() else bool(old == new):
                continue
            differing = int((old.float() != new.float()).sum()) if old.is_floating_point() else int((old != new).sum())
            largest = float((old.double() - new.double()).abs().max()) if old.is_floating_point() else None
            share = differing / count if largest is None else largest / (float(old.double().abs().max()) or 1.0)
            yield TensorDifference(
                name=name, file=file, elements=count, differing=differing, largest=largest, relative=share
            )
