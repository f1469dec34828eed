"""Load tasks of the harness, ask a model what they ask, and score its answers item by item."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.common.grouping import grouped
from optkit.errors import EvalError
from optkit_evals.harness.opening import opened
from optkit_evals.harness.task import HarnessTask

if TYPE_CHECKING:
    from optkit_evals.harness.language_model import LanguageModel

FEW_SHOT_SEED, NUMPY_SEED, PYTHON_SEED = 1234, 1234, 0
"""The harness' own seeds, with which it chooses examples."""
LONGEST_SHOWN = 4000
"""Letters of a question or an answer that are kept."""


@dataclass(frozen=True)
class Loaded:
    """A task with the requests of its items."""

    name: str
    wanted: HarnessTask
    """What the recipe names: the task, or a group that has it."""
    group: str
    """The group whose number its own is a part of; empty for none."""
    task: Any
    """`lm_eval.api.task.Task`."""
    whole: Any
    """`lm_eval.api.group.Group` of a group, else the task."""
    requests: Sequence[Any]
    """`lm_eval.api.instance.Instance`, in the order of the items."""
    available: int
    """Items that the task has."""
    shots: int

    def by_item(self) -> dict[int, list[Any]]:
        """Return the requests of each item, in the order of its choices."""
        return grouped(sorted(self.requests, key=lambda request: request.idx), lambda request: int(request.doc_id))

    def asked(self) -> int:
        """Return how many items are asked."""
        return len({request.doc_id for request in self.requests})

    def digest(self) -> str:
        """Return a digest of everything that is asked."""
        asked = [(request.request_type, request.args) for request in self.requests]
        return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Score:
    """A number of a task with what each item has of it."""

    metric: str
    filter: str
    """Empty for the answers as they are."""
    value: float
    higher_is_better: bool
    aggregation: Any
    by_item: Mapping[int, Any]
    """What each item has of it, in their order: a number, or what the harness aggregates. A task may
    leave items out.
    """

    @property
    def items(self) -> tuple[Any, ...]:
        """What is aggregated."""
        return tuple(self.by_item.values())


@dataclass(frozen=True)
class Asking:
    """How tasks are asked."""

    few_shot: int | None = None
    limit: int | None = None
    chat_template: bool = False

    def load(self, wanted: Sequence[HarnessTask], data: Path | None, model: LanguageModel) -> list[Loaded]:
        """Return tasks with the requests of their items, those of a group behind each other.
        Raises SourceError for a task that cannot be read, EvalError for one that runs what models
        write.
        """
        with _quiet(), _harness_seeds():
            return [loaded for each in wanted for loaded in self._load(each, data, model)]

    def _load(self, wanted: HarnessTask, data: Path | None, model: LanguageModel) -> list[Loaded]:
        definition, whole, tasks = opened(wanted, data)
        groups = {row.task: row.group for row in definition.rows()}
        return [self._asked(wanted, task, groups.get(name, ""), whole, model) for name, task in tasks.items()]

    def _asked(self, wanted: HarnessTask, task: Any, group: str, whole: Any, model: LanguageModel) -> Loaded:
        name = str(task.task_name)
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            kind = "shows pictures or sound" if getattr(task, "MULTIMODAL", False) else "runs code that models write"
            raise EvalError(f"it {kind}", where=name, remedy="Run it with the harness itself")
        own = task.get_config("num_fewshot")
        shots = own or 0 if self.few_shot is None or own == 0 else self.few_shot
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=FEW_SHOT_SEED)
        task.build_all_requests(
            limit=self.limit,
            apply_chat_template=self.chat_template,
            fewshot_as_multiturn=True,
            chat_template=model.apply_chat_template if self.chat_template else None,
            tokenizer_name=model.tokenizer_name if self.chat_template else "",
        )
        return Loaded(name, wanted, group, task, whole, task.instances, len(task.eval_docs), shots)

    def answer(self, loaded: Sequence[Loaded], model: LanguageModel) -> None:
        """Let a model answer all requests, those of one kind together."""
        requests = (request for each in loaded for request in each.requests for _ in range(request.repeats))
        kinds = grouped(requests, lambda request: str(request.request_type))
        for kind, asked in kinds.items():
            for request, answer in zip(asked, getattr(model, kind)(asked), strict=True):
                request.resps.append(answer)

    def scores(self, loaded: Loaded) -> list[Score]:
        """Return the numbers of an answered task, aggregated as the harness does."""
        task, found = loaded.task, []
        with _quiet(), _harness_seeds():
            task.apply_filters()
            by_item = loaded.by_item()
            for filtered in loaded.requests[0].filtered_resps:
                values: dict[str, dict[int, Any]] = {}
                for item, doc in task.doc_iterator(limit=self.limit):
                    answers = [request.filtered_resps[filtered] for request in by_item[item]]
                    for metric, value in task.process_results(doc, answers).items():
                        values.setdefault(metric, {})[item] = value
                found += [_score(task, metric, filtered, by_item) for metric, by_item in values.items()]
        return found

    def items(self, loaded: Loaded, scores: Sequence[Score]) -> Iterator[dict[str, Any]]:
        """Yield each item as JSON values: question, choices, answer, gold and what it scored."""
        task, by_item = loaded.task, loaded.by_item()
        for item, doc in task.doc_iterator(limit=self.limit):
            yield {
                "task": loaded.name,
                "item": item,
                "question": _shown(task.doc_to_text(doc)),
                **_answered(task, doc, by_item[item]),
                "scores": {
                    each.metric + (f",{each.filter}" if each.filter else ""): value
                    for each in scores
                    if isinstance(value := each.by_item.get(item), int | float)
                },
            }


def _score(task: Any, metric: str, filtered: str, by_item: Mapping[int, Any]) -> Score:
    """Return a number of a task; one that no definition aggregates is a mean, as in the harness."""
    from lm_eval.api.metrics import mean

    aggregation = task.aggregation().get(metric, mean)
    return Score(
        metric=metric,
        filter="" if filtered == "none" else filtered,
        value=float(aggregation(list(by_item.values()))),
        higher_is_better=bool(task.higher_is_better().get(metric, True)),
        aggregation=aggregation,
        by_item=by_item,
    )


def _answered(task: Any, doc: Any, requests: Sequence[Any]) -> Mapping[str, Any]:
    """Return what was asked and answered, as far as the kind of the task tells."""
    gold = task.doc_to_target(doc)
    if task.OUTPUT_TYPE == "multiple_choice" and task.multiple_input == 0:
        choices = [_shown(each) for each in task.doc_to_choice(doc)]
        losses = [request.resps[0][0] for request in requests[: len(choices)]]
        normed = [loss / len(choice) for loss, choice in zip(losses, choices, strict=True)]
        index = gold if isinstance(gold, int) else choices.index(gold) if gold in choices else None
        return {
            "choices": choices,
            "answer": choices[losses.index(max(losses))],
            "answer_normed": choices[normed.index(max(normed))],
            "gold": _shown(gold) if index is None else choices[index],
        }
    if task.OUTPUT_TYPE == "loglikelihood":
        loss, greedy = requests[0].resps[0]
        return {"answer": {"log_likelihood": loss, "greedy": greedy}, "gold": _shown(gold)}
    return {"answer": _shown(requests[0].resps[0]), "gold": _shown(gold)}


def _shown(value: Any) -> str:
    return str(value)[:LONGEST_SHOWN]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness from drawing bars and from logging what is no problem."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _harness_seeds() -> Iterator[None]:
    """Draw as the harness does, and leave the generators as they were."""
    import numpy

    python, numpys = random.getstate(), numpy.random.get_state()
    random.seed(PYTHON_SEED)
    numpy.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpys)
