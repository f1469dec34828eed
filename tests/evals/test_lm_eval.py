import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from optkit.errors import EvalError, SourceError
from optkit.measure import Attachment, EvalContext, Found
from optkit.scorecard import build_scorecard, table_rows
from optkit.session import open_session
from optkit.source.text_place import TextPlace
from tests.support.bigram_session import BigramSession

pytest.importorskip("lm_eval")

from optkit_evals.harness.asking import Asking
from optkit_evals.harness.session_model import SessionModel
from optkit_evals.harness.task import HarnessTask
from optkit_evals.lm_eval import LmEval

from tests.support.crossed import crossed
from tests.support.harness_tasks import ITEMS, by_harness, write_tasks


@pytest.fixture
def tasks(tmp_path) -> dict[str, str]:
    return write_tasks(tmp_path)


@pytest.fixture(scope="module")
def session(tiny_model):
    opened = open_session(tiny_model("llama"), [], device="cpu")
    yield opened
    opened.close()


def measured(eval: LmEval, session, data: Path | None = None) -> Found:
    return Found.of(eval, session, EvalContext(data=data))


@pytest.mark.parametrize(("few_shot", "batch_size"), crossed([0, 2], [1, 4]))
def test_every_number_is_the_harness_own_to_the_last_digit(tiny_model, session, tasks, batch_size, few_shot):
    names = list(tasks.values())
    eval = LmEval(tasks=names, batch_size=batch_size, few_shot=few_shot, shared_context=False)
    found = measured(eval, session)
    theirs = by_harness(tiny_model("llama"), names, batch_size, Asking(few_shot=few_shot))
    assert len(found.metrics) == 5
    for metric in found.metrics:
        assert metric.value == theirs["results"][metric.labels["task"]][f"{metric.name},none"]


def test_contexts_computed_once_change_last_digits_alone(session, tasks):
    wanted = [HarnessTask(name=tasks["colours"])]
    answers = []
    for batch_size, shared in ((1, False), (1, True), (6, True)):
        model = SessionModel(session.tokenizer, session, batch_size=batch_size, shared_context=shared)
        calls = []
        model._behind_contexts = lambda *given, calls=calls, real=model._behind_contexts: (
            calls.append(given) or real(*given)
        )
        loaded = Asking().load(wanted, None, model)
        Asking().answer(loaded, model)
        answers.append([request.resps[0] for request in loaded[0].requests])
        assert bool(calls) == shared
    for other in answers[1:]:
        assert [greedy for _, greedy in other] == [greedy for _, greedy in answers[0]]
        assert [loss for loss, _ in other] == pytest.approx([loss for loss, _ in answers[0]], abs=1e-4)


def test_items_have_samples_in_their_order_and_a_file_with_their_texts(session, tasks):
    found = measured(LmEval(tasks=[tasks["colours"]], limit=6), session)
    acc, acc_norm = found.metrics
    assert (acc.name, acc.labels, acc.unit, acc.pairing) == ("acc", {"task": "colours"}, "fraction", "paired_mean")
    assert acc.value == sum(acc.samples) / 6
    assert acc.interval[0] <= acc.value <= acc.interval[1]
    for part in ("lm_eval 0.4", "colours 2.0", "first 6 of 20 items", "0 examples", "no chat template"):
        assert part in acc.protocol
    (file,) = found.attachments
    items = [json.loads(line) for line in file.content.decode().splitlines()]
    assert [item["item"] for item in items] == list(range(6))
    assert items[1]["question"] == "Of number 1 the colour is"
    assert items[1]["choices"] == ["green", "as white as snow", "dark blue"]
    assert [item["scores"]["acc_norm"] for item in items] == list(acc_norm.samples)
    assert all((item["answer"] == item["gold"]) == item["scores"]["acc"] for item in items)


def test_a_text_has_samples_whose_mean_is_its_perplexity(session, tasks):
    import math

    words, bits = measured(LmEval(tasks=[tasks["prose"]]), session).metrics
    assert (words.unit, words.pairing, len(words.samples)) == ("perplexity", "paired_log", ITEMS)
    assert math.exp(sum(words.samples) / ITEMS) == pytest.approx(words.value)
    assert sum(bits.samples) / ITEMS == pytest.approx(bits.value)
    assert words.interval[0] < words.value < words.interval[1]


def test_two_models_are_told_apart_by_what_turned(session, tasks, monkeypatch):
    eval = LmEval(tasks=[tasks["colours"], tasks["writing"]], shared_context=False)
    ours = measured(eval, session)
    upside_down = lambda tokens: -type(session).logits(session, tokens)  # noqa: E731
    monkeypatch.setattr(session, "logits", upside_down)
    theirs = measured(eval, session)
    found = list(eval.contrast(ours, theirs))
    values = {(each.name, each.labels.get("task")): each for each in found if not isinstance(each, Attachment)}
    mine, before = (next(each for each in some.metrics if each.name == "acc_norm").samples for some in (ours, theirs))
    lost = [index for index in range(ITEMS) if mine[index] < before[index]]
    won = [index for index in range(ITEMS) if mine[index] > before[index]]
    assert lost or won
    assert values["right_to_wrong", "colours"].value == len(lost)
    assert values["wrong_to_right", "colours"].value == len(won)
    assert 0 < values["mcnemar_p", "colours"].value <= 1
    (file,) = (each for each in found if isinstance(each, Attachment))
    listed = [json.loads(line) for line in file.content.decode().splitlines()]
    colours = [each for each in listed if each["task"] == "colours"]
    assert sorted(each["item"] for each in colours) == sorted(lost + won)
    for each in colours:
        assert each["unmodified"] != each["artifact"]
        assert each["gold"] == each["unmodified" if each["item"] in lost else "artifact"]


def test_a_task_may_leave_items_out_of_a_number_and_name_one_without_aggregation(tiny_model, session, tasks, tmp_path):
    (tmp_path / "left_out.py").write_text(
        "def results(doc, results):\n    loss = results[0][0] - results[1][0]\n"
        "    return {'first': loss} | ({'acc': float(loss > 0)} if doc['gold'] else {})\n"
    )
    path = Path(tasks["colours"])
    path.write_text(path.read_text() + "process_results: !function left_out.results\n")
    eval = LmEval(tasks=[str(path)], shared_context=False)
    found = measured(eval, session)
    theirs = by_harness(tiny_model("llama"), [str(path)], 1, Asking())["results"]["colours"]
    assert {each.name: each.value for each in found.metrics} == {
        name: theirs[f"{name},none"] for name in ("first", "acc")
    }
    acc = next(each for each in found.metrics if each.name == "acc")
    turned = Found((acc.model_copy(update={"samples": tuple(1 - each for each in acc.samples)}),), found.attachments)
    listed = [json.loads(line) for line in list(eval.contrast(found, turned))[-1].content.decode().splitlines()]
    assert [each["item"] for each in listed] == list(range(1, ITEMS, 2))


def test_a_model_beside_itself_turned_nothing_and_lost_nothing(session, tasks):
    eval = LmEval(tasks=[tasks["colours"]])
    ours = measured(eval, session)
    *metrics, file = eval.contrast(ours, measured(eval, session))
    assert file.content == b""
    values = {each.name: each for each in metrics}
    assert values["right_to_wrong"].value == values["wrong_to_right"].value == 0
    assert values["mcnemar_p"].value == 1.0
    if "recovery" in values:
        assert values["recovery"].value == 100
        low, high = values["recovery"].interval
        assert low < 100 < high


def test_a_task_whose_data_are_nowhere_is_refused_when_it_is_pinned(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("OPTKIT_DATA", raising=False)
    with pytest.raises(SourceError, match=r"neither here nor to be downloaded.*arc/arc_easy_test\.jsonl.*--data"):
        HarnessTask(name="arc_easy").pinned(None)
    with pytest.raises(SourceError, match="neither here nor to be downloaded"):
        HarnessTask(name="hellaswag").pinned(tmp_path)


def test_a_definition_is_pinned_with_its_data(tasks, tmp_path):
    pinned = HarnessTask(name=tasks["colours"]).pinned(None)
    assert pinned.revision.startswith("sha256:")
    assert pinned.pinned(None) == pinned
    (tmp_path / "colours.jsonl").write_text('{"question": "?", "choices": ["a", "b"], "gold": 0}\n')
    with pytest.raises(SourceError, match=r"the task with its data is sha256:.* and not .*Restore it"):
        pinned.pinned(None)
    (tmp_path / "colours.jsonl").unlink()
    with pytest.raises(SourceError, match=r"colours: its file colours\.jsonl is not there"):
        pinned.pinned(None)


def test_a_task_of_the_harness_is_read_with_what_it_includes():
    rows = HarnessTask(name="mmlu_anatomy").known_definition().rows()
    assert "acc" in {row.metric for row in rows}


def test_an_item_that_is_too_long_is_refused_before_anything_is_computed(session, tasks, tmp_path, tiny_model):
    row = {"question": "very " * 2000, "choices": ["a", "b"], "gold": 0}
    with (tmp_path / "colours.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    eval = LmEval(tasks=[tasks["colours"]])
    told = rf"colours: item {ITEMS} has [\d,]+ tokens, and the model has [\d,]+ positions.*truncate: true"
    with pytest.raises(EvalError, match=told):
        measured(eval, session)
    place = TextPlace(tiny_model("llama"), None, tmp_path / "counts", transformers=True)
    with pytest.raises(EvalError, match=told):
        eval.check_texts(place)
    with pytest.raises(EvalError, match=f"writing: item {ITEMS} has .* tokens and an answer of 12"):
        measured(LmEval(tasks=[tasks["writing"]]), session)
    assert len(measured(LmEval(tasks=[tasks["colours"]], truncate=True), session).metrics[0].samples) == ITEMS + 1
    LmEval(tasks=[tasks["colours"]], limit=ITEMS).check_texts(place)


def test_answers_that_are_drawn_are_refused(session, tasks):
    path = Path(tasks["writing"])
    path.write_text(path.read_text().replace("do_sample: false", "do_sample: true, temperature: 0.7"))
    with pytest.raises(EvalError, match=r"writing: it draws its answers \(do_sample\)"):
        measured(LmEval(tasks=[str(path)]), session)


def test_a_definition_that_the_harness_cannot_load_is_said_with_its_reason(session, tasks):
    path = Path(tasks["colours"])
    path.write_text(path.read_text().replace("test_split: test", "test_split: nothing"))
    with pytest.raises(SourceError, match=r"colours: the harness cannot load the task\. .*Check its definition"):
        measured(LmEval(tasks=[str(path)]), session)


def test_logits_that_are_nan_are_refused(session, tasks, monkeypatch):
    monkeypatch.setattr(type(session), "logits", lambda self, tokens: float("nan") * _logits(self, tokens))
    with pytest.raises(EvalError, match="the log-likelihood of an answer is nan"):
        measured(LmEval(tasks=[tasks["colours"]], shared_context=False), session)


def _logits(session, tokens):
    import torch

    return torch.zeros(*tokens.shape, session.vocabulary)


def test_a_session_without_a_tokenizer_is_refused(tasks):
    with pytest.raises(EvalError, match="the session has no tokenizer"):
        measured(LmEval(tasks=[tasks["colours"]]), BigramSession())


def test_tasks_of_the_data_directory_are_the_harness_numbers(shared_data, session, tiny_model):
    names = ["arc_easy", "arc_challenge", "piqa", "lambada_openai"]
    found = measured(LmEval(tasks=names, limit=2), session, shared_data)
    theirs = by_harness(tiny_model("llama"), names, 1, Asking(limit=2), shared_data)
    for metric in found.metrics:
        name = metric.name.removeprefix("task_")
        assert metric.value == theirs["results"][metric.labels["task"]][f"{name},none"]
    assert SimpleNamespace(**{each.name: each for each in found.metrics}).task_perplexity.pairing == "paired_log"


def test_the_same_model_computed_otherwise_shows_no_difference(session, tasks):
    """An A/A comparison: five runs in other batches, with contexts computed once and without."""
    eval = LmEval(tasks=[tasks["colours"], tasks["prose"]])
    theirs = measured(eval, session)
    for batch_size, shared in ((2, False), (3, True), (4, False), (7, True), (16, False)):
        again = LmEval(**{**eval.model_dump(), "batch_size": batch_size, "shared_context": shared})
        ours = measured(again, session)
        both = [each for each in again.contrast(ours, theirs) if not isinstance(each, Attachment)]
        card = build_scorecard(
            name="a-a", artifact_key="0", recipe={}, metrics=[*ours.metrics, *both], baseline=theirs.metrics
        )
        assert [row.change for row in table_rows(card)] == [""] * len(card.rows)
        assert all(each.value == 1.0 for each in both if each.name == "mcnemar_p")
