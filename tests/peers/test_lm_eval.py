"""A thousand items of three tasks: the harness on a session beside the harness on plain transformers."""

import pytest

from optkit.measure import EvalContext, Found
from optkit.session import open_session

pytest.importorskip("lm_eval")

from optkit_evals.harness.asking import Asking
from optkit_evals.lm_eval import LmEval

from tests.support.harness_tasks import by_harness

TASKS = ["arc_easy", "piqa", "lambada_openai"]
ITEMS = 334


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.timeout(7200)
def test_a_thousand_items_have_the_numbers_of_plain_transformers(smol, shared_data):
    theirs = by_harness(smol, TASKS, 1, Asking(limit=ITEMS), shared_data)
    session = open_session(smol, [], device="cpu")
    ours = Found.of(LmEval(tasks=TASKS, limit=ITEMS), session, EvalContext(data=shared_data))
    session.close()
    for metric in ours.metrics:
        task, name = metric.labels["task"], metric.name.removeprefix("task_")
        assert metric.value == theirs["results"][task][f"{name},none"]
        if metric.pairing == "paired_mean":
            samples = sorted(theirs["samples"][task], key=lambda sample: sample["doc_id"])
            assert metric.samples == tuple(sample[name] for sample in samples)
    assert sum(len(metric.samples) for metric in ours.metrics if metric.name == "acc") == 3 * ITEMS
