"""Questions written as a conversation, beside the harness with `apply_chat_template=True`."""

import shutil
from pathlib import Path

import pytest

from optkit.errors import EvalError
from optkit.measure import EvalContext, Found
from optkit.session import open_session

pytest.importorskip("lm_eval")

from optkit_evals.harness.asking import Asking
from optkit_evals.harness.session_model import SessionModel
from optkit_evals.harness.task import HarnessTask
from optkit_evals.lm_eval import LmEval

from tests.support.crossed import crossed
from tests.support.harness_tasks import by_harness, write_tasks

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, str]:
    """Tasks with a description, which becomes the system's words, and one that begins the answer."""
    names = write_tasks(tmp_path)
    for name, added in (("colours", ""), ("writing", 'gen_prefix: "It is"\n')):
        path = Path(names[name])
        path.write_text(path.read_text() + 'description: "Name colours."\n' + added)
    return names


def talking(model: Path, folder: Path, template: str) -> Path:
    """Return a copy of a model whose tokenizer has a chat template and a token that begins texts."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("few_shot", "template"), crossed([2, 0], {"plain": PLAIN, "no system": NO_SYSTEM}))
def test_every_number_is_the_harness_own_to_the_last_digit(tiny_model, tmp_path, tasks, template, few_shot):
    directory = talking(tiny_model("llama"), tmp_path / "model", template)
    names = [tasks["colours"], tasks["prose"], tasks["writing"]]
    session = open_session(directory, [], device="cpu")
    eval = LmEval(tasks=names, few_shot=few_shot, chat_template=True, shared_context=False)
    found = Found.of(eval, session, EvalContext())
    session.close()
    theirs = by_harness(directory, names, 1, Asking(few_shot=few_shot, chat_template=True))
    assert len(found.metrics) == 5
    for metric in found.metrics:
        assert metric.value == theirs["results"][metric.labels["task"]][f"{metric.name},none"]
        assert ", chat template, " in metric.protocol
        samples = sorted(theirs["samples"][metric.labels["task"]], key=lambda sample: sample["doc_id"])
        asked = samples[0]["arguments"][0][0]
        if metric.labels["task"] != "prose":
            assert asked.count("<user>") == few_shot + 1
            assert ("Name colours." in asked) == (template is PLAIN)


def test_a_tokenizer_without_a_template_is_refused(tiny_model, tasks):
    session = open_session(tiny_model("llama"), [], device="cpu")
    model = SessionModel(session.tokenizer, session)
    with pytest.raises(EvalError, match=r"lm_eval: the tokenizer has no chat template\. .*Leave chat_template out"):
        Asking(chat_template=True).load([HarnessTask(name=tasks["colours"])], None, model)
    session.close()
