"""Groups of tasks, as the harness itself puts them together and adds them up."""

import json
from pathlib import Path

import pytest

from optkit.common.statistics import mean
from optkit.errors import SourceError
from optkit.measure import Attachment, EvalContext, Found
from optkit.recipe.recipe import load_recipe
from optkit.scorecard.ratios import ratio_to_baseline
from optkit.session import open_session

pytest.importorskip("lm_eval")

from optkit_evals.harness.task import HarnessTask
from optkit_evals.lm_eval import LmEval

TEMPLATE = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: gold
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
INNER = """group: dark
task: [dark_tasks]
aggregate_metric_list: [{metric: acc, weight_by_size: false}]
metadata: {version: 3}
"""
OUTER = """group: paints
task:
  - dark
  - light
  - group: others
    task: [odd]
    aggregate_metric_list: {metric: acc_norm, filter_list: none}
num_fewshot: 1
aggregate_metric_list:
  - {metric: acc, weight_by_size: true, filter_list: [none]}
  - {metric: acc_norm, weight_by_size: false}
metadata: {version: 2.0}
"""
SIZES = {"red": 12, "blue": 7, "light": 9, "odd": 12}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four tasks of several sizes, two of them under a tag, and groups within a group."""
    colours = ["red", "dark blue", "green", "rose", "as white as snow"]
    for place, (name, size) in enumerate(SIZES.items()):
        rows = [
            {
                "question": f"Of {name} {index} the colour is",
                "choices": [colours[(index * step + step + place) % 5] for step in range(1, 3 + index % 2)],
                "gold": index % 2,
            }
            for index in range(size)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tag = "tag: [dark_tasks]\n" if name in ("red", "blue") else ""
        (tmp_path / f"_{name}").write_text(tag + TEMPLATE.format(data=tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.yaml").write_text(f"include: _{name}\ntask: {name}\n")
    (tmp_path / "dark.yaml").write_text(INNER)
    (tmp_path / "paints.yaml").write_text(OUTER)
    return tmp_path


@pytest.fixture(scope="module")
def session(tiny_model):
    opened = open_session(tiny_model("llama"), [], device="cpu")
    yield opened
    opened.close()


def by_harness(directory: Path, folder: Path, name: str, limit: int | None):
    """What the harness itself finds, loads and says of the model as transformers opens it."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    peer = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(directory), batch_size=1, device="cpu")
    loaded = TaskManager(include_path=str(folder), include_defaults=False).load([name])
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(1234)
    return lm_eval.evaluate(lm=peer, task_dict=loaded, limit=limit, bootstrap_iters=0)


def measured(session, folder: Path, *names: str, **fields) -> Found:
    tasks = [str(folder / f"{name}.yaml") for name in names]
    return Found.of(LmEval(tasks=tasks, shared_context=False, **fields), session, EvalContext())


@pytest.mark.parametrize("limit", [None, 8])
def test_every_number_of_a_group_is_the_harness_own_to_the_last_digit(tiny_model, session, folder, limit):
    found = measured(session, folder, "paints", limit=limit)
    theirs = by_harness(tiny_model("llama"), folder, "paints", limit)
    ours = {(each.labels["task"], each.name): each.value for each in found.metrics}
    expected = {
        (task, key.removesuffix(",none")): value
        for task, said in {**theirs["results"], **theirs["groups"]}.items()
        for key, value in said.items()
        if key.endswith(",none") and "_stderr" not in key
    }
    assert ours == expected
    assert {task for task, _ in ours} == {"paints", "dark", "paints::others", *SIZES}
    assert len({json.loads(line)["task"] for line in found.attachments[0].content.decode().splitlines()}) == 4


def test_rows_are_known_before_a_run(session, folder):
    eval = LmEval(tasks=[str(folder / "paints.yaml")])
    found = {(each.name, *each.labels.items()) for each in measured(session, folder, "paints", limit=2).metrics}
    assert {(name, *row.items()) for name, rows in eval.rows().items() for row in rows} == found
    assert ("acc", ("task", "paints")) in found
    assert ("acc", ("task", "red"), ("group", "dark")) in found
    assert eval.rows_of("right_to_wrong") == ({"task": "paints"},)


def test_a_group_has_the_items_of_its_tasks_and_a_stratified_interval(session, folder):
    found = {(each.labels["task"], each.name): each for each in measured(session, folder, "paints").metrics}
    whole, parts = found["paints", "acc"], [found[name, "acc"] for name in ("red", "blue", "light", "odd")]
    assert sorted(whole.samples) == sorted(item for part in parts for item in part.samples)
    assert (whole.pairing, set(whole.samples)) == ("paired_mean", {0.0, 1.0})
    for part in ("group paints 2.0", "40 items of 4 tasks weighted by items", "1 examples"):
        assert part in whole.protocol
    alike = found["paints", "acc_norm"]
    assert "weighted alike" in alike.protocol
    assert alike.value == pytest.approx(mean([found[name, "acc_norm"].value for name in SIZES]))
    for each in (whole, alike):
        assert mean(each.samples) == pytest.approx(each.value, rel=1e-12)
        low, high = each.interval
        assert 0 <= low < each.value < high <= 1
    narrowest = min(part.interval[1] - part.interval[0] for part in parts)
    assert whole.interval[1] - whole.interval[0] < narrowest


def test_two_models_are_paired_on_all_items_of_a_group(session, folder, monkeypatch):
    eval = LmEval(tasks=[str(folder / "paints.yaml")], shared_context=False)
    ours = measured(session, folder, "paints")
    monkeypatch.setattr(session, "logits", lambda tokens: -type(session).logits(session, tokens))
    theirs = measured(session, folder, "paints")
    for one, other in zip(ours.metrics, theirs.metrics, strict=True):
        if one.labels["task"] == "paints":
            low, high = ratio_to_baseline(one, other).interval
            assert low < one.value / other.value < high
    *both, file = eval.contrast(ours, theirs)
    assert isinstance(file, Attachment)
    assert {tuple(each.labels.items()) for each in both} == {(), (("task", "paints"),)}
    turned = {each.name: each.value for each in both}
    listed = [json.loads(line) for line in file.content.decode().splitlines()]
    assert turned["right_to_wrong"] + turned["wrong_to_right"] == len(listed) > 0
    assert {each["task"] for each in listed} <= set(SIZES)
    (whole, before) = (next(m for m in some.metrics if m.name == "acc_norm") for some in (ours, theirs))
    assert turned["recovery"] == pytest.approx(100 * whole.value / before.value)


def test_a_group_is_pinned_with_all_of_its_data(folder):
    named = HarnessTask(name=str(folder / "paints.yaml"))
    pinned = named.pinned(None)
    assert pinned.revision.startswith("sha256:")
    assert pinned.pinned(None) == pinned
    with (folder / "odd.jsonl").open("a") as file:
        file.write('{"question": "?", "choices": ["a", "b"], "gold": 0}\n')
    with pytest.raises(SourceError, match="the task with its data is sha256:.* and not "):
        pinned.pinned(None)
    again = named.pinned(None)
    (folder / "paints.yaml").write_text(OUTER.replace("weight_by_size: true", "weight_by_size: false"))
    assert named.pinned(None).revision not in (again.revision, pinned.revision)


def test_groups_and_tags_of_the_harness_are_those_that_it_builds():
    """MMLU has 57 subjects (https://arxiv.org/abs/2009.03300), in four groups."""
    mmlu, arc = (HarnessTask(name=name).known_definition() for name in ("mmlu", "ai2_arc"))
    assert len(mmlu.tasks()) == 57
    rows = list(mmlu.rows())
    assert rows[0] == ("mmlu", "", "acc", "")
    assert ("mmlu_stem", "mmlu", "acc", "") in rows
    assert ("mmlu_anatomy", "mmlu_stem", "acc", "") in rows
    assert sorted(arc.tasks()) == ["arc_challenge", "arc_easy"]
    assert {row.group for row in arc.rows()} == {""}


def test_gates_name_groups_and_their_tasks(folder):
    wanted = {"lm_eval.paints.acc": ">= 0.99x", "acc[task=red]": ">= 0.9x", "acc[group=dark]": ">= 0.9x"}
    wanted["right_to_wrong[task=paints]"] = "<= 3"
    recipe = {"model": "smollm2-135m", "evals": [{"lm_eval": {"tasks": [str(folder / "paints.yaml")]}}]}
    assert len(load_recipe({**recipe, "gates": wanted}).gates) == 4
    with pytest.raises(Exception, match="no row of 'right_to_wrong' has task=red"):
        load_recipe({**recipe, "gates": {"right_to_wrong[task=red]": "<= 3"}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("group: empty\n", "the group 'empty' lists no tasks. List them under `task:`"),
        ("group: again\ntask: [again]\n", "again: the group includes itself"),
        ("group: bad\ntask: [3]\n", "'3' is no task of a group. Name it by `task:` or `group:`"),
        ("group: bad\ntask: [reed]\n", "no task is named 'reed'"),
    ],
)
def test_a_group_that_is_none_is_refused(folder, text, told):
    (folder / "again.yaml").write_text(text)
    with pytest.raises(SourceError) as caught:
        HarnessTask(name=str(folder / "again.yaml")).known_definition()
    assert told in str(caught.value)
