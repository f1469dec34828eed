"""Make an artifact again from its own record alone, and compare the two byte by byte,
and their tensors by how far they are apart.

Nothing of the first is used: the second has a store of its own, so no finished step is found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import computed_field

from optkit import pipeline
from optkit.artifact import Artifact, read_artifact, read_finished, recorded_recipe
from optkit.common.frozen import Frozen
from optkit.common.held_files import held_directory
from optkit.environment import usable_device
from optkit.errors import ArtifactError, UsageError
from optkit.model.safetensors_file import read_header
from optkit.progress import Progress, SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.scorecard.published import located
from optkit.source.lineage import models_in
from optkit.source.places import is_place
from optkit.source.texts import is_file_name
from optkit.store.store import Store, explain_os_error
from optkit.trust import allow_remaking
from optkit.verification.artifact_checks import check_digests

UNTOLD = "an earlier optkit made it, and recorded neither its machine nor its digests"
Pairs = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
"""What both records say of each step, the recorded one first."""
BESIDE_THE_POINT = frozenset({"memory_bytes", "cpu_cores"})
"""What decides no bit of a weight."""


class Circumstance(Frozen):
    """What was not the same when the artifact was made."""

    what: str
    """A package, or a property of the machine."""
    then: str
    now: str
    steps: tuple[str, ...]
    """Kinds of the steps that it is about."""


class StepAgain(Frozen):
    """One directory of weights on the way to the artifact."""

    kind: str
    identical: bool | None
    """None if the record does not say what the step left."""
    files: int
    differing: tuple[str, ...] = ()


class Reproduction(Frozen):
    """An artifact beside the one that was made again."""

    artifact: Path
    artifact_key: str
    device: str
    circumstances: tuple[Circumstance, ...]
    steps: tuple[StepAgain, ...]
    files: dict[str, str]
    """SHA-256 of every file of the artifact's model."""
    differing: dict[str, str | None]
    """SHA-256 of those that came out otherwise, None if they did not come out."""
    tensors: tuple[TensorDifference, ...] = ()
    """Those that differ, the one furthest apart first."""
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_status(self) -> int:
        """0: every file is the same, 3: not so."""
        return 3 if self.differing else 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def since(self) -> str | None:
        """Kind of the first step that left something else; None if there is none that is known."""
        return next((step.kind for step in self.steps if step.identical is False), None)


def reproduce(
    artifact: Path | str,
    *,
    out: Path | None = None,
    model: str | None = None,
    device: str | None = None,
    data: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Reproduction:
    """Return how an artifact compares with one that is made of its record again.

    `out` keeps the second one; `model` is the place of the model that it was made from, if it is
    not found. Without `device` it is made on the recorded one, if that is here. Raises
    UsageError if `out` exists, ArtifactError if the directory is no artifact or its files changed,
    SourceError if a model or text of its record is not found, or code of others runs without
    `trust_remote_code`.
    """
    progress = progress or SilentProgress()
    if out and out.exists():
        raise UsageError(f"{out} is there already", where="--out", remedy="Name a directory that is not")
    first = read_finished(Path(artifact))
    if not (digests := check_digests(first)).ok:
        why = "What is to be compared is not what the recipe made"
        raise ArtifactError(digests.detail, where=str(artifact), why=why, remedy="Run its recipe again")
    recipe = recorded_recipe(first)
    allow_remaking(first, recipe, trust_remote_code, progress)
    recipe = located(recipe, first.directory.absolute().parent, model, remake=True)
    recipe = recipe.model_copy(update={"evals": (), "gates": {}})
    chosen = usable_device(device) if device else _recorded_device(first)
    with _workplace(out or first.directory.absolute(), first.record.name) as place, _threads(first, chosen):
        # Of this directory alone: what other machines share holds the first artifact's own steps.
        store = Store(place / "store", elsewhere="make it on another disk with --out")
        pipeline.run(recipe, out=out or place / "artifact", store=store, device=chosen, data=data, progress=progress)
        return _compared(first, read_artifact(out or place / "artifact"), chosen)


def _compared(first: Artifact, second: Artifact, device: str) -> Reproduction:
    files, again = (
        {name: str(facts["sha256"]) for name, facts in each.record.files.items()} for each in (first, second)
    )
    differing = {name: again.get(name) for name in sorted({*files, *again}) if files.get(name) != again.get(name)}
    both = [name for name in differing if name.endswith(".safetensors") and name in files and name in again]
    pairs = list(zip(first.record.steps, second.record.steps, strict=True))
    if first.record.imported and second.record.imported:
        pairs.insert(0, (first.record.imported, second.record.imported))
    return Reproduction(
        artifact=first.directory,
        artifact_key=first.record.key,
        device=device,
        circumstances=tuple(_circumstances(pairs)),
        steps=tuple(_step_again(*pair) for pair in pairs),
        files=files,
        differing=differing,
        tensors=tuple(differing_tensors(first.directory, second.directory, both)),
        notes=tuple(_notes(first, pairs)),
    )


def _notes(first: Artifact, pairs: Pairs) -> Iterator[str]:
    yield from (f"{now['kind']}: {UNTOLD}" for then, now in pairs if not then.get("environment"))
    recipe = load_recipe(first.record.recipe)
    placed = [model for entry in recipe.transforms for model in models_in(entry.value) if is_place(model)]
    texts = [text for text in first.record.calibrated_on if is_file_name(text["dataset"])]
    other = next((now["kind"] for then, now in pairs if then["key"] != now["key"]), None)
    if other and not (placed or texts):  # whose places are part of keys
        yield f"{other}: its key is not the recorded one, so its version or what optkit.json says of it was changed"


def _step_again(then: Mapping[str, Any], now: Mapping[str, Any]) -> StepAgain:
    old, new = then.get("sha256"), now["sha256"]
    if not old:
        return StepAgain(kind=now["kind"], identical=None, files=len(new))
    differing = tuple(name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
    return StepAgain(kind=now["kind"], identical=not differing, files=len(old), differing=differing)


def _circumstances(pairs: Pairs) -> Iterator[Circumstance]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for then, now in pairs:
        old, new = then.get("environment") or {}, now["environment"]
        for what in sorted({*old, *new} - BESIDE_THE_POINT) if old else ():
            if old.get(what) != new.get(what):
                found.setdefault((what, str(old.get(what)), str(new.get(what))), []).append(now["kind"])
    for (what, before, after), kinds in found.items():
        yield Circumstance(what=what, then=before, now=after, steps=tuple(kinds))


def _recorded(artifact: Artifact, what: str) -> Any:
    made = (*artifact.record.steps, artifact.record.imported or {})
    return next((its.get(what) for step in made if (its := step.get("environment"))), None)


def _recorded_device(artifact: Artifact) -> str:
    """Return the device that the artifact was made on, the best one here if it is not."""
    with contextlib.suppress(UsageError):
        return usable_device(_recorded(artifact, "device"))
    return usable_device(None)


@contextlib.contextmanager
def _threads(artifact: Artifact, device: str) -> Iterator[None]:
    """Let torch compute on as many threads as when the artifact was made.
    Sums of floats are split among them, and come out otherwise.
    """
    import torch

    before, threads = torch.get_num_threads(), _recorded(artifact, "cpu_threads")
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _workplace(beside: Path, name: str) -> Iterator[Path]:
    """Give a directory on the disk of `beside`, which is deleted at the end, as are those that
    killed processes left.
    """
    with contextlib.ExitStack() as held:
        try:
            place = held.enter_context(held_directory(beside.parent, f".{name}.reproduce-"))
        except OSError as error:
            raise explain_os_error(error, "the artifact that is made again", beside.parent) from error
        yield place


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
