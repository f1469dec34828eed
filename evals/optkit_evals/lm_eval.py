"""Accuracy on tasks: EleutherAI's harness on a session, item by item.

https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from pydantic import field_validator, model_validator

from optkit.common.field_types import Amount, AtLeastOne, BatchSize, Count
from optkit.common.frozen import digest
from optkit.errors import EvalError, OptkitError
from optkit.measure import Attachment, Eval, EvalContext, Found, Metric, Session
from optkit.model.session_memory import SessionMemory
from optkit.model.text_config import text_config
from optkit.source.calibration import load_tokenizer
from optkit.source.text_place import TextPlace
from optkit_evals.harness.aggregating import Aggregated, Scored, aggregated
from optkit_evals.harness.asking import Asking, Loaded
from optkit_evals.harness.flips import COMPARED, ITEMS, contrasts
from optkit_evals.harness.names import check_harness
from optkit_evals.harness.scores import FRACTIONS, UNITS, as_metric, labels_of, metric_name, unit_of
from optkit_evals.harness.task import HarnessTask
from optkit_evals.vllm import UnderVllm, check_vllm, vllm_text, vllm_versions
from optkit_evals.windows import short_revision

USUAL_LENGTH = 256
"""Tokens of a question with its answers, to say how much memory they will need."""


class _Metrics:
    """The metrics of an eval are those of its tasks; of the class, the usual ones."""

    def __get__(self, instance: LmEval | None, owner: type[LmEval]) -> Mapping[str, str]:
        usual = {**dict.fromkeys(sorted(FRACTIONS), "fraction"), **UNITS}
        named = {name: unit_of(name) for name in instance.rows()} if instance else {}
        return {**(named or usual), **COMPARED}


class LmEval(Eval):
    """Tasks of EleutherAI's lm-evaluation-harness, each number paired by item with the baseline's.

    Beside the tasks' own metrics it says how many items turned (`right_to_wrong`,
    `wrong_to_right`, McNemar's p) and what is left of the scores (`recovery`). The items, and
    those that turned, are listed in files with their texts.
    """

    kind: ClassVar[str] = "lm_eval"
    example: ClassVar[str] = "- lm_eval: {tasks: [arc_easy, piqa], limit: 500}"
    draws: ClassVar[bool] = False
    shorthand: ClassVar[str] = "tasks"
    contrasted: ClassVar[frozenset[str]] = frozenset(COMPARED)
    metrics: ClassVar[Mapping[str, str]] = cast("Mapping[str, str]", _Metrics())
    reads_weights: ClassVar[bool] = cast("bool", UnderVllm())

    tasks: AtLeastOne[HarnessTask]
    """Names of tasks or of groups such as `mmlu`, or YAML files in the harness' format."""
    few_shot: Amount | None = None
    """Solved examples before each question; the task's own number when null. A task that says 0
    itself keeps it, as in the harness.
    """
    chat_template: bool = False
    """Write questions as a conversation, by the model's chat template."""
    limit: Count | None = None
    """Items of each task, from its start; all of them when null."""
    batch_size: BatchSize = 1
    """Requests that are computed together; more are faster on GPUs."""
    shared_context: bool = True
    """Compute the context of several answers once. The last digits of log-likelihoods then differ
    from those of the harness."""
    truncate: bool = False
    """Cut requests that are longer than the model's positions off from the left, as the harness
    does; otherwise they are refused.
    """
    engine: Literal["optkit", "vllm"] = "optkit"
    """`vllm`: both models under vLLM, in the Python that `$OPTKIT_VLLM_PYTHON` names; settings,
    `batch_size` and `shared_context` do not apply there. Its rows have the label `engine`.
    """

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        tasks = value.get("tasks")
        listed = (tasks,) if isinstance(tasks, str | Mapping) else tuple(tasks) if isinstance(tasks, list) else tasks
        return {**value, **({"tasks": listed} if "tasks" in value else {})}

    @field_validator("tasks")
    @classmethod
    def _check_names(cls, tasks: tuple[HarnessTask, ...]) -> tuple[HarnessTask, ...]:
        names = [each.name for each in tasks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"'{twice}' is here twice. Write it once.")
        return tasks

    def rows(self) -> dict[str, tuple[dict[str, int | str], ...]]:
        """Return the labels of the rows of each metric, as far as the tasks' definitions are here."""
        found: dict[str, tuple[dict[str, int | str], ...]] = {}
        for each in self.tasks:
            try:
                definition = each.known_definition()
            except OptkitError:
                return {}
            for row in definition.rows():
                name = metric_name(row.metric)
                labels = {**labels_of(row.task, row.group, row.filter), **self._engine()}
                found[name] = (*found.get(name, ()), labels)
        return found

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        rows = [row for rows in self.rows().values() for row in rows]
        return tuple(row for index, row in enumerate(rows) if row not in rows[:index])

    def rows_of(self, metric: str) -> tuple[dict[str, int | str], ...]:
        """Return the rows of a metric: the tasks that have it, or what counts as one."""
        if metric == "recovery":
            return (self._engine(),)
        if metric in COMPARED:
            return tuple(row for row in self.row_labels() if "group" not in row)
        unknown = tuple({"task": each.name, **self._engine()} for each in self.tasks)
        return self.rows().get(metric) or self.row_labels() or unknown

    def _engine(self) -> dict[str, int | str]:
        """Return the label of another engine than ours."""
        return {} if self.engine == "optkit" else {"engine": self.engine}

    def faults(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the tasks that nothing defines, and a harness that is not installed."""
        try:
            check_harness(self.kind)
        except OptkitError as error:
            yield ("tasks",), str(error)
            return
        owners: dict[str, str] = {}
        for index, each in enumerate(self.tasks):
            try:
                names = each.known_definition().tasks()
            except OptkitError as error:
                yield ("tasks", index, "name"), str(error)
                continue
            if twice := next((name for name in names if name in owners), None):
                yield ("tasks", index, "name"), f"'{twice}' is in '{owners[twice]}' already. Name it once."
            owners.update(dict.fromkeys(names, each.name))

    def check(self, device: str) -> None:
        check_harness(self.kind)
        if self.engine == "vllm":
            check_vllm(device)

    def circumstances(self, device: str) -> dict[str, Any]:
        """Return, of another engine, the Python that has it and its versions there."""
        return {} if self.engine == "optkit" else vllm_versions()

    def working_bytes(self, model: SessionMemory) -> int:
        """Return the logits of a batch of questions of usual length; nothing under another engine."""
        if self.engine == "vllm":
            return 0
        length = USUAL_LENGTH * (1 + (self.few_shot or 0))
        return model.forward(self.batch_size, length) + 2 * model.logits(self.batch_size * length)

    def check_texts(self, place: TextPlace) -> None:
        """Refuse items that are longer than the model's positions, before anything is computed."""
        if not place.transformers:
            return
        from optkit_evals.harness.language_model import LanguageModel

        try:
            config = text_config(json.loads((place.tokenizer / "config.json").read_text(encoding="utf-8")))
            positions = config["max_position_embeddings"]
        except (OSError, ValueError, KeyError):
            return
        tokenizer = load_tokenizer(place.tokenizer, place.trust_remote_code)
        model = LanguageModel(tokenizer, positions, truncate=self.truncate)
        asking = self._asking()
        asking.answer(asking.load(self.tasks, place.data, model), model)

    def run(self, session: Session, context: EvalContext) -> Iterator[Metric | Attachment]:
        """Ask; raises EvalError for an item that is too long, a tokenizer that is missing or NaN."""
        if getattr(session, "tokenizer", None) is None:
            raise EvalError("the session has no tokenizer", where=self.kind, why="The harness asks in words")
        asking, items = self._asking(), []
        loaded = self._answered(asking, session, context)
        for each in loaded:
            if self.few_shot is not None and each.shots != self.few_shot:
                context.warn(f"lm_eval: {each.name} is asked with {each.shots} examples, as its definition says")
        engine = f", {vllm_text()}" if self.engine == "vllm" else ""
        scored: list[Scored] = []
        for each in loaded:
            scores = asking.scores(each)
            protocol = self._protocol(each) + engine
            scored += [Scored(each, score, as_metric(score, each.name, each.group, protocol)) for score in scores]
            items += list(asking.items(each, scores))
        groups = [group.metric(self._protocol_of(group) + engine) for group in aggregated(scored)]
        for metric in (*groups, *(each.metric for each in scored)):
            yield metric.model_copy(update={"labels": {**metric.labels, **self._engine()}})
        yield Attachment.of_records(ITEMS, items)

    def _answered(self, asking: Asking, session: Any, context: EvalContext) -> list[Loaded]:
        """Return the tasks with the answers of the engine to their requests."""
        if self.engine == "vllm":
            from optkit_evals.harness.vllm_model import VllmModel, answer_under_vllm

            model = VllmModel(session.tokenizer, session.positions, truncate=self.truncate)
            loaded = asking.load(self.tasks, context.data, model)
            answer_under_vllm(asking, loaded, model, session, context)
            return loaded
        from optkit_evals.harness.session_model import SessionModel

        ours = SessionModel(
            session.tokenizer,
            session,
            batch_size=self.batch_size,
            shared_context=self.shared_context,
            truncate=self.truncate,
            progress=context.progress,
        )
        loaded = asking.load(self.tasks, context.data, ours)
        asking.answer(loaded, ours)
        return loaded

    def contrast(self, found: Found, baseline: Found) -> Iterable[Metric | Attachment]:
        return contrasts(found, baseline)

    def _asking(self) -> Asking:
        return Asking(few_shot=self.few_shot, limit=self.limit, chat_template=self.chat_template)

    def _protocol(self, loaded: Loaded) -> str:
        items = f"first {loaded.asked():,} of {loaded.available:,} items"
        what = f"{loaded.name} {loaded.task.VERSION}{_revision(loaded)}"
        return self._said(what, items, [loaded])

    def _protocol_of(self, group: Aggregated) -> str:
        tasks = [part.loaded for part in group.parts]
        weighted = "by items" if len({*group.sizes}) > 1 or group.sizes[0] > 1 else "alike"
        items = f"{sum(each.asked() for each in tasks):,} items of {len(tasks)} tasks weighted {weighted}"
        return self._said(f"group {group.group.name} {group.group.version}{_revision(tasks[0])}", items, tasks)

    def _said(self, what: str, items: str, tasks: Sequence[Loaded]) -> str:
        from lm_eval import __version__

        shots = sorted({each.shots for each in tasks})
        digests = "".join(each.digest() for each in tasks)
        requests = digests if len(tasks) == 1 else digest(digests)[:12]
        return (
            f"lm_eval {__version__}, {what}, {items}, {' and '.join(map(str, shots))} examples, "
            f"{'chat template' if self.chat_template else 'no chat template'}"
            f"{', cut off from the left' if self.truncate else ''}, requests {requests}"
        )


def _revision(loaded: Loaded) -> str:
    return f" (revision {short_revision(loaded.wanted.revision or '')})"
