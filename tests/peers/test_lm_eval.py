"""A thousand items of three tasks: the harness on a session beside the harness on plain transformers."""

import pytest

from optkit.measure import EvalContext, Found
from optkit.session import open_session

pytest.importorskip("lm_eval")

from optkit_evals.harness.asking import Asking
from optkit_evals.harness.task import HarnessTask
from optkit_evals.lm_eval import LmEval

TASKS = ["arc_easy", "piqa", "lambada_openai"]
ITEMS = 334


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.timeout(7200)
def test_a_thousand_items_have_the_numbers_of_plain_transformers(smol, shared_data):
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    peer = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(smol), batch_size=1, device="cpu")
    loaded = Asking(limit=ITEMS).load([HarnessTask(name=name) for name in TASKS], shared_data, peer)
    asked = {each.name: each.task for each in loaded}
    theirs = lm_eval.evaluate(lm=peer, task_dict={"tasks": asked}, limit=ITEMS, bootstrap_iters=0)
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
