"""Perplexity and divergence of answers about images."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from optkit_evals.divergence import Divergence
from optkit_evals.perplexity import Perplexity
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from optkit.errors import EvalError, SourceError
from optkit.measure import EvalContext, SeeingSession
from optkit.session import open_session
from optkit.source.text_place import TextPlace
from optkit.stage import Context
from optkit.stages.rtn import Rtn
from tests.support.processors import save_pairs, save_processor
from tests.support.tiny_models import save_tiny_model
from tests.support.vision_models import save_vision_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = save_vision_model("llava", tmp_path_factory.mktemp("llava"))
    save_processor("llava", place)
    return place


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return save_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def session(directory):
    return open_session(directory)


def fields(file, **more):
    return {"dataset": str(file), "images": "image", "window": 128, **more}


def test_the_loss_is_that_of_the_answers(directory, file, session):
    (found,) = Perplexity(**fields(file)).run(session, EvalContext())
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(directory)
    losses = []
    for index in range(4):
        answer = " ".join(f"number {place} of the list" for place in range(index + 2)) + "\n"
        image = Image.open(file.parent / f"{index}.png")
        given = processor(text=f"user: <image>\nassistant: {answer}", images=[image], return_tensors="pt")
        labels = given["input_ids"].clone()
        labels[:, : -len(processor.tokenizer(answer, add_special_tokens=False).input_ids)] = -100
        with torch.no_grad():
            losses.append(float(model(**given, labels=labels).loss))
    assert found.samples == pytest.approx(losses, abs=1e-5)
    assert found.value == pytest.approx(math.exp(sum(losses) / 4), rel=1e-5)
    assert found.labels == {"prompts": "images"}
    assert (
        "first 4 prompts with 4 images by the model's chat template, pixels by CLIPImageProcessorPil" in found.protocol
    )


def test_a_question_is_seen_whole_and_its_answer_is_measured(file, tmp_path):
    place = save_vision_model("paligemma", tmp_path / "model")
    save_processor("paligemma", place)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    asked = file.parent / "asked.jsonl"
    roles = [
        [{"role": "user", "content": "what is there"}, {"role": "assistant", "content": each["text"]}]
        for each in records
    ]
    lines = [json.dumps({**each, "text": said}) for each, said in zip(records, roles, strict=True)]
    asked.write_text("\n".join(lines))
    (found,) = Perplexity(**fields(asked)).run(open_session(place), EvalContext())
    model = AutoModelForImageTextToText.from_pretrained(place, dtype=torch.float32).eval()
    processor, losses = AutoProcessor.from_pretrained(place), []
    for record in records:
        image = Image.open(file.parent / record["image"])
        told = {"text": "<image>what is there", "suffix": record["text"], "images": image}
        given = processor(**told, return_tensors="pt")
        with torch.no_grad():
            losses.append(float(model(**given).loss))
    assert found.samples == pytest.approx(losses, abs=1e-5)
    roles[0].append({"role": "user", "content": "and"})
    asked.write_text("\n".join(json.dumps({**each, "text": said}) for each, said in zip(records, roles, strict=True)))
    with pytest.raises(SourceError, match="its messages are those of user, assistant, user. A prompt of this model is"):
        Perplexity(**fields(asked)).run(open_session(place), EvalContext())


def test_the_image_decides(directory, file, session, tmp_path):
    other = save_pairs(tmp_path)
    for index in range(4):
        (tmp_path / f"{index}.png").write_bytes((file.parent / f"{(index + 1) % 4}.png").read_bytes())
    (one,), (two,) = (Perplexity(**fields(each)).run(session, EvalContext()) for each in (file, other))
    assert one.samples != two.samples
    assert isinstance(session, SeeingSession)


def test_bfloat16_slices_its_logits(directory, file, session, monkeypatch):
    from optkit.session import cast_logits

    monkeypatch.setattr(cast_logits, "LOGITS_BYTES", 10 * 512 * 2)
    (whole,) = Perplexity(**fields(file, windows=2)).run(session, EvalContext())
    (found,) = Perplexity(**fields(file, windows=2)).run(open_session(directory, dtype="bfloat16"), EvalContext())
    assert found.value == pytest.approx(whole.value, rel=0.2)


def test_the_divergence_is_0_from_itself_and_more_of_2_bits(directory, file, session, tmp_path):
    pytest.importorskip("compressed_tensors")
    Rtn(bits=2, group_size=32).run(directory, tmp_path, Context())
    context = EvalContext(baseline=session)
    same = Divergence(**fields(file)).run(session, context)
    other = Divergence(**fields(file)).run(open_session(tmp_path), context)
    assert [metric.value for metric in same] == [0.0, 0.0, 1.0]
    assert other[0].value > 0.01
    assert {str(metric.labels) for metric in (*same, *other)} == {"{'prompts': 'images'}"}


def test_rows_of_images_and_of_text_are_told_apart(file):
    text = {"dataset": "python-reference"}
    assert Perplexity(**fields(file, also=[text])).row_labels() == (
        {"text": "pairs.jsonl", "prompts": "images"},
        {"text": "python-reference"},
    )
    assert (
        Perplexity(**fields(file)).row_labels() == Divergence(**fields(file)).row_labels() == ({"prompts": "images"},)
    )
    assert Perplexity(**text).row_labels() == Divergence(**text).row_labels() == ({},)


class TestRefusals:
    def test_a_model_of_text(self, file, tmp_path):
        with pytest.raises(EvalError, match="the opened model takes no images. Leave out `images`, which reads text"):
            Perplexity(**fields(file)).run(open_session(save_tiny_model("llama", tmp_path)), EvalContext())

    def test_one_record(self, file, session, tmp_path):
        one = save_pairs(tmp_path, 1)
        with pytest.raises(EvalError, match="the text has 1 records and 2 are needed"):
            Perplexity(**fields(one)).run(session, EvalContext())

    def test_a_prompt_longer_than_the_window(self, file, session):
        with pytest.raises(SourceError, match="more than the 32 of `window`. Set window to at least"):
            Perplexity(**fields(file, window=32)).run(session, EvalContext())

    def test_what_was_calibrated_on(self, file, session):
        eval_ = Perplexity(**fields(file)).pinned(None)
        context = EvalContext(calibrated_on=(eval_.identity(),))
        with pytest.raises(EvalError, match=r"the model was calibrated on .*pairs.jsonl"):
            eval_.run(session, context)

    def test_other_pixels_than_the_baseline(self, directory, file, session, tmp_path):
        shutil.copytree(directory, tmp_path / "other")
        settings = tmp_path / "other" / "preprocessor_config.json"
        settings.write_text(settings.read_text().replace('"do_normalize": true', '"do_normalize": false'))
        with pytest.raises(EvalError, match="read the text as different tokens"):
            Divergence(**fields(file)).run(open_session(tmp_path / "other"), EvalContext(baseline=session))

    def test_images_that_cannot_be_read_are_found_before_anything_runs(self, directory, tmp_path):
        file = save_pairs(tmp_path)
        (tmp_path / "2.png").write_bytes(b"no image")
        place = TextPlace(directory, None, tmp_path / "counts")
        for given in (place, replace(place, transformers=True)):
            with pytest.raises(SourceError, match="2.png: the image cannot be read"):
                Divergence(**fields(file)).check_texts(given)
