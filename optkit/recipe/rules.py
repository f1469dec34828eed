"""What may stand beside what in a recipe, and in which order.
One set of rules serves recipes from text and from Python.

Validation knows little of the model and puts each message at its line; a plan knows the model and
raises the first one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from optkit.measure import Eval
from optkit.model.formats.base import makers
from optkit.model.shape import ModelShape
from optkit.model.task import EVERY_TASK, PHRASES, Task, architectures_of, phrase_of
from optkit.recipe.registry import EVALS, STAGES, eval_class, stage_class
from optkit.stage import Format, Setting, Stage, Transform, exclusion


class Listed(Protocol):
    """An item of `stages:` or `evals:`."""

    @property
    def kind(self) -> str:
        """Its name in the recipe."""

    @property
    def value(self) -> Any:
        """The stage or eval; its class if its fields are wrong."""


Item = TypeVar("Item", bound=Listed)
Placing: TypeAlias = Callable[[Item], str]
"""The place that a message about one item gives another, e.g. `line 4`; empty if it was not
written.
"""
Broken: TypeAlias = Iterator[tuple[Item, str]]
"""The items that break a rule, each with its message."""


@dataclass(frozen=True)
class Start:
    """What is known of the model that a recipe starts from."""

    name: str = "the model"
    format: Format | None = None
    tasks: frozenset[Task] = EVERY_TASK
    phrase: str = ""
    """What it is, if that is known, e.g. `an encoder that gives features (BertModel)`."""
    positions: int | None = None
    """The longest sequence that it was built for, in tokens."""

    @classmethod
    def of(cls, name: str, shape: ModelShape, format: Format) -> Start:
        """Return what a model's shape says; an ONNX model without config.json may be anything."""
        if shape.task is None:
            return cls(name, format, positions=shape.positions)
        phrase = f"{PHRASES[shape.task]} ({architectures_of(shape.config)})"
        return cls(name, format, frozenset({shape.task}), phrase, shape.positions)


def class_of(item: Listed) -> type[Stage | Eval]:
    """Return the class of a stage or eval."""
    return item.value if isinstance(item.value, type) else type(item.value)


def _placed(item: Item, place: Placing[Item]) -> str:
    return f"{item.kind} ({place(item)})" if place(item) else item.kind


def broken_rules(
    stages: Sequence[Item], evals: Sequence[Item], start: Start, devices: Iterable[str], place: Placing[Item]
) -> Broken[Item]:
    """Yield what breaks a rule; settings exclude each other only if they do so on all `devices`."""
    yield from _repeats(stages, evals, place)
    yield from _tasks([*stages, *evals], start, place)
    yield from _lengths(evals, start)
    yield from _order(stages, start)
    yield from _unprepared(stages, place)
    yield from _formats(stages, evals, start, place)
    yield from _exclusions(stages, devices, place)


def _repeats(stages: Sequence[Item], evals: Sequence[Item], place: Placing[Item]) -> Broken[Item]:
    """Yield the settings that are given twice, and the evals that would measure the same again."""
    first: dict[type, Item] = {}
    for item in stages:
        earlier = first.setdefault(class_of(item), item)
        if issubclass(class_of(item), Setting) and earlier is not item:
            where = f", first in {place(earlier)}" if place(earlier) else ""
            message = f"the setting {item.kind} is given twice{where}. Only one can be in force; remove the other."
            yield item, message
    for index, item in enumerate(evals):
        if isinstance(item.value, Eval) and any(item.value == other.value for other in evals[:index]):
            yield item, f"the eval {item.kind} is here twice with the same fields. Remove one of them."


def _tasks(items: Iterable[Item], start: Start, place: Placing[Item]) -> Broken[Item]:
    """Yield the stages and evals for another kind of model than the recipe's or their forerunners'."""
    narrowed = [(left := start.tasks, f"{start.name} is {start.phrase}")]
    for item in items:
        tasks = class_of(item).for_tasks
        if not left & tasks:
            why = next(why for kept, why in narrowed if not kept & tasks)
            message = f"{item.kind} is for {phrase_of(tasks)}, and {why}. Take it out, or name another model"
            yield item, f"{message}{_others(item, left)}."
        elif not left <= tasks:
            left &= tasks
            narrowed.append((left, f"{_placed(item, place)} is for {phrase_of(left)}"))


def _others(item: Listed, tasks: frozenset[Task]) -> str:
    """Return what to take instead, of the built-in transforms or evals."""
    if issubclass(class_of(item), Setting):
        return ""
    kinds = EVALS if issubclass(class_of(item), Eval) else STAGES
    known = {kind: eval_class(kind) if kinds is EVALS else stage_class(kind) for kind in kinds}
    fit = [kind for kind, each in known.items() if tasks & each.for_tasks and not issubclass(each, Setting)]
    return f"; there {'are' if len(fit) > 1 else 'is'} {', '.join(sorted(fit))}" if fit else ""


def _lengths(evals: Iterable[Item], start: Start) -> Broken[Item]:
    """Yield the evals whose sequences are longer than the model was built for."""
    for item in evals:
        longest = item.value.longest_sequence() if start.positions else 0
        if start.positions and longest > start.positions:
            most, why = f"{start.positions:,}", "Beyond its positions a model's numbers mean nothing"
            have = f"the sequences of {item.kind} have {longest:,} tokens, and {start.name} was built for {most}"
            fields = " or ".join(f"`{name}`" for name in item.value.sets_length) or "fields"
            yield item, f"{have}. {why}. Set its {fields} so that they have at most {most}."


def _left(stages: Iterable[Item], start: Start) -> Iterator[tuple[Item, Format | None]]:
    """Yield the transforms, each with the format that it leaves.
    It is None if that depends on a model of which nothing is known.
    """
    given = start.format
    for item in stages:
        model = class_of(item)
        if issubclass(model, Transform):
            left = {model.leaves(each) for each in ({given} if given in model.accepts else model.accepts)}
            given = left.pop() if len(left) == 1 else None
            yield item, given


def _order(stages: Iterable[Item], start: Start) -> Broken[Item]:
    """Yield the transforms that cannot read what the one before leaves, or the model."""
    before, found = None, start.format
    for item, left in _left(stages, start):
        accepts = class_of(item).accepts  # type: ignore[union-attr]
        if found and found not in accepts:
            reads = " or ".join(each.phrase for each in sorted(accepts))
            given = f"{before.kind} leaves" if before else f"{start.name} is"
            remedy = (
                _remedy_of_order(item.kind, accepts, left, before.kind, found) if before else _restart(accepts, found)
            )
            yield item, f"{item.kind} reads {reads} and {given} {found.phrase}. {remedy}"
        before, found = item, left


def _remedy_of_order(kind: str, accepts: frozenset[Format], left: Format | None, before: str, found: Format) -> str:
    if stages := makers(accepts):
        return f"Put {stages} between them: it exports what {before} leaves."
    if found is Format.ADAPTED and kind != before:
        return (
            f"Take one of them out, or put {before} before the stage that packs the weights: "
            "there its adapter is merged."
        )
    return "Keep one of them." if left is found or kind == before else f"Put {kind} before {before}."


def _restart(accepts: frozenset[Format], found: Format) -> str:
    """Return what to do if the model that the recipe starts from does not fit."""
    stages = makers(accepts)
    if found is Format.CHECKPOINT and not stages:
        return "Take it out."
    return f"Put {stages} before it." if stages else f"Start from {found.origin}."


def _unprepared(stages: Iterable[Item], place: Placing[Item]) -> Broken[Item]:
    """Yield the transforms that prepare weights for another grid than the next that rounds them has."""
    transforms = [item for item in stages if isinstance(item.value, Transform)]
    for index, item in enumerate(transforms):
        behind = next((each for each in transforms[index + 1 :] if each.value.grid), None)
        given, found = item.value.prepares, behind.value.grid if behind else {}
        if behind and (other := [name for name in given if found.get(name, given[name]) != given[name]]):
            own, theirs = (", ".join(f"{name}: {_yaml(of[name])}" for name in other) for of in (given, found))
            what = f"{item.kind} prepares weights for {own}, and {_placed(behind, place)} has {theirs}"
            yield item, f"{what}. Each grid needs other scales. Let both say the same, or take {item.kind} out."


def _yaml(value: object) -> str:
    return json.dumps(value).strip('"')


def _formats(stages: Sequence[Item], evals: Sequence[Item], start: Start, place: Placing[Item]) -> Broken[Item]:
    """Yield the settings and evals that have no place in the format that the stages leave."""
    made: list[tuple[Item | None, Format | None]] = [(None, start.format), *_left(stages, start)]
    last, left = made[-1]
    if left is None:
        return
    leaves = f"and {_placed(last, place)} leaves" if last else f"and {start.name} is"
    for item in stages:
        if message := _setting_of(class_of(item), left, f"{leaves} {left.opened}", last.kind if last else "", start):
            yield item, f"the setting {item.kind} {message}"
    for item in evals:
        if message := _eval_of(item.value, left, f"{leaves} {left.opened}", last.kind if last else ""):
            yield item, f"{item.kind} {message}"


def _setting_of(model: type, left: Format, leaves: str, last: str, start: Start) -> str:
    """Return what to say of a setting that is not for a format that the stage `last` leaves."""
    if not issubclass(model, Setting) or left in model.accepts:
        return ""
    if left is Format.ADAPTED and Format.QUANTIZED in model.accepts:
        told = "knows no adapter beside packed weights, and"
        return (
            f"{told} {last} leaves one. Take one of them out." if last else f"{told} {start.name} has one. Take it out."
        )
    wanted = " or ".join(sorted({each.opened for each in model.accepts}))
    remedy = "Take it out."
    if left.is_checkpoint and (makes_it := makers(model.accepts)):
        remedy = f"Put {makes_it} {f'after {last}' if last else 'into the recipe'}, or take it out."
    return f"is applied to {wanted} when it is opened, {leaves}. {remedy}"


def _eval_of(model: Any, left: Format, leaves: str, last: str) -> str:
    """Return what to say of an eval, or a class of them, that cannot measure a format that the stage
    `last` leaves.
    """
    before = "Take it out, or put it in a recipe that ends before"
    if not left.is_checkpoint and model.reads_weights:
        remedy = f"{before} the export." if last else "Take it out."
        return f"reads the weights of a checkpoint, {leaves}. {remedy}"
    if left is Format.ADAPTED and model.layers_alone:
        whose, remedy = (f"of {last} ", f"{before} {last}.") if last else ("", "Take it out.")
        return f"says what each layer does alone, and the adapter {whose}makes up for all of them together. {remedy}"
    return ""


def _exclusions(stages: Iterable[Item], devices: Iterable[str], place: Placing[Item]) -> Broken[Item]:
    """Yield the second of two settings that exclude each other, whatever their order."""
    items = [item for item in stages if isinstance(item.value, Setting)]
    settings = [item.value for item in items]
    found = [exclusion(settings, device, lambda first: _placed(items[first], place)) for device in devices]
    if found and found[0] and all(found):
        later, error = found[0]
        yield items[later], f"{error.what}. {error.why}. {error.remedy}."
