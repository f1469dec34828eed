import json
from dataclasses import replace

import pytest
from optkit_evals.generation import Generation, repeated

from optkit.common.grouping import common_prefix
from optkit.errors import EvalError, RecipeError, SourceError
from optkit.measure import Attachment, EvalContext, Found
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.source.text_place import TextPlace

PROMPTS = ["The first of them", "Once more", "It is said that numbers"]


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def sessions(tiny_model):
    opened = [open_session(tiny_model(kind), [], device="cpu") for kind in ("llama", "qwen2")]
    yield opened
    for each in opened:
        each.close()


def measured(eval: Generation, session) -> Found:
    return Found.of(eval.pinned(None), session, EvalContext())


def lines(file: Attachment) -> list[dict]:
    return [json.loads(line) for line in file.content.decode().splitlines()]


def test_answers_are_greedy_and_kept_with_their_prompts(prompts, sessions):
    eval = Generation(prompts=prompts, new_tokens=12)
    found = measured(eval, sessions[0])
    (file,) = found.attachments
    answers = lines(file)
    assert [each["prompt"] for each in answers] == PROMPTS
    for each in answers:
        whole = sessions[0].generate(sessions[0].encode(each["prompt"])[None], 12)[0, -12:].tolist()
        assert each["tokens"] == whole[: len(each["tokens"])]
        assert each["answer"] == sessions[0].tokenizer.decode(each["tokens"], skip_special_tokens=True)
    (metric,) = found.metrics
    assert (metric.name, metric.pairing, metric.higher_is_better) == ("repetition", "paired_mean", False)
    assert metric.samples == tuple(repeated(each["tokens"]) for each in answers)
    for part in ("3 prompts of prompts.txt (sha256 ", "at most 12 tokens", "no chat template"):
        assert part in metric.protocol


def test_two_models_are_laid_side_by_side(prompts, sessions):
    eval = Generation(prompts=prompts, new_tokens=12)
    ours, theirs = (measured(eval, session) for session in sessions)
    prefix, same, file = eval.pinned(None).contrast(ours, theirs)
    assert (prefix.name, same.name) == ("common_prefix", "same_answers")
    beside = lines(file)
    assert [each["prompt"] for each in beside] == PROMPTS
    assert [each["common_prefix"] for each in beside] == list(prefix.samples)
    assert [each["artifact"] for each in beside] == [each["answer"] for each in lines(ours.attachments[0])]
    assert [each["unmodified"] for each in beside] == [each["answer"] for each in lines(theirs.attachments[0])]
    assert same.value == sum(each["same"] for each in beside) / 3


def test_a_model_beside_itself_says_the_same(prompts, sessions):
    eval = Generation(prompts=prompts, new_tokens=8)
    found = measured(eval, sessions[0])
    prefix, same, _ = eval.contrast(found, found)
    assert same.value == 1.0
    assert prefix.value == sum(len(each["tokens"]) for each in lines(found.attachments[0])) / 3


def test_prefixes_and_repetitions_by_hand():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated([7] * 13) == pytest.approx(0.9)
    assert repeated([1, 2, 3]) == 0.0


def test_records_and_the_chat_template(tmp_path, sessions, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "Why?"}\n{"question": "How?"}\n')
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(sessions[0].tokenizer, "chat_template", template)
    eval = Generation(prompts=str(path), field="question", limit=1, new_tokens=4, chat_template=True)
    (file,) = measured(eval, sessions[0]).attachments
    tokens = sessions[0].encode("<user>Why?")[None]
    assert lines(file)[0]["tokens"] == sessions[0].generate(tokens, 4)[0, -4:].tolist()
    assert len(lines(file)) == 1


def test_a_prompt_that_leaves_no_room_is_refused(prompts, sessions):
    with pytest.raises(EvalError, match=r"prompt 1 has \d+ tokens, and with 600 new ones they are more than"):
        measured(Generation(prompts=prompts, new_tokens=600), sessions[0])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"new_tokens": 600}, r"prompt 1 has \d+ tokens, and with 600 new ones they are more than the model's 512"),
        ({"chat_template": True}, "the tokenizer has no chat template. It is the tokenizer of a model that was not"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_computed(prompts, tiny_model, tmp_path, fields, said):
    eval = Generation(prompts=prompts, **fields)
    eval.check_texts(place := TextPlace(tiny_model("llama"), None, tmp_path))
    with pytest.raises(EvalError, match=said):
        eval.check_texts(replace(place, transformers=True))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("no.txt", None, "there is no file"),
        ("prompts.csv", "a", "is no file of prompts. Name a .txt or .jsonl file"),
        ("empty.txt", " \n\n", "there are no prompts. Write one on each line"),
        ("other.jsonl", '{"text": "a"}\n', "there is no field 'prompt'"),
    ],
)
def test_files_that_are_none_are_refused_at_their_line(tmp_path, name, text, told):
    if text is not None:
        (tmp_path / name).write_text(text)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: smollm2-135m\nevals:\n  - generation: {{prompts: {tmp_path / name}}}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}:3:")
    assert told in str(caught.value)


def test_prompts_that_were_changed_are_refused(prompts):
    pinned = Generation(prompts=prompts).pinned(None)
    assert pinned.pinned(None) == pinned
    with open(prompts, "a") as file:  # noqa: PTH123
        file.write("One more\n")
    with pytest.raises(SourceError, match=r"the file of prompts is sha256:.* and not sha256:.*It was changed"):
        pinned.pinned(None)
