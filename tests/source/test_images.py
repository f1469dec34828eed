"""Prompts with images: what records may look like, what the processor makes of them, bad input."""

import json
import sys

import pytest
from pydantic import ValidationError

from optkit.errors import MissingPackageError, SourceError
from optkit.source.calibration import Calibration
from optkit.source.hub import HubRepo
from optkit.source.images import load_processor
from optkit.source.text_place import TextPlace
from tests.support.processors import PROCESSORS, TEMPLATE, save_pairs, save_processor, without_videos


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("gemma3")
    save_processor("gemma3", place)
    (place / "config.json").write_text('{"model_type": "gemma3"}')
    return place


@pytest.fixture
def file(tmp_path):
    return save_pairs(tmp_path)


def calibration(file, **fields):
    given = {"dataset": str(file), "images": "image", "samples": 2, "sequence_length": 128}
    return Calibration(**{**given, **fields})


def write(file, *records):
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n")


class TestRecords:
    def test_messages_are_those_of_the_record(self, file, directory):
        said = [
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"}]},
            {"role": "assistant", "content": "noise"},
        ]
        write(file, {"image": "0.png", "messages": said})
        (pair,) = calibration(file, field="messages").pairs(None)
        prompts = calibration(file, field="messages", samples=1).inputs(directory, None)
        assert (pair.text, [picture.name for picture in pair.pictures]) == (
            "What is \nnoise",
            [str(file.parent / "0.png")],
        )
        text = prompts.processor.tokenizer.decode(next(iter(prompts))["input_ids"][0])
        assert text == "user: What is \n\n<boi>" + "<image>" * 4 + "<eoi>\n\n\nassistant: noise\n"

    def test_a_place_for_the_images_is_made_in_front_of_the_question(self, file):
        said = [{"role": "user", "content": "And these?"}, {"role": "assistant", "content": "noise too"}]
        write(file, {"image": ["0.png", "1.png"], "text": said})
        (pair,) = calibration(file).pairs(None)
        assert pair.messages[0]["content"] == [
            {"type": "image"},
            {"type": "image"},
            {"type": "text", "text": "And these?"},
        ]

    def test_a_record_without_an_image(self, file, directory):
        said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody"}]
        write(file, {"image": None, "text": said}, {"image": [], "text": said})
        assert all("pixel_values" not in prompt for prompt in calibration(file).inputs(directory, None))

    def test_the_digest_is_that_of_text_and_pixels(self, file):
        text = calibration(file)
        pinned = text.pinned(None)
        assert pinned.pinned(None) == pinned
        assert pinned.revision.startswith("sha256:")
        (file.parent / "0.png").write_bytes((file.parent / "1.png").read_bytes())
        with pytest.raises(SourceError, match=r"the text is sha256:\w+ and not sha256:"):
            pinned.pairs(None)

    def test_rows_of_the_hub(self, monkeypatch, file):
        datasets = pytest.importorskip("datasets")
        pixels = (file.parent / "0.png").read_bytes()

        class Rows(list):
            def decode(self, enable):
                assert not enable
                return self

        rows = Rows({"image": {"bytes": pixels, "path": "a.png"}, "text": f"row {number}"} for number in range(3))
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        monkeypatch.setattr(HubRepo, "commit", lambda repo, revision=None: "c" * 40)
        text = calibration("org/name").pinned(None)
        assert [pair.text for pair in text.pairs(None, 2)] == ["row 0", "row 1"]
        assert text.pairs(None)[0].pictures[0].decoded().size == (50, 30)
        rows[0]["image"] = "a.png"
        with pytest.raises(SourceError, match=r"org/name \(train\): the field 'image' is no image but a.png"):
            text.pairs(None)

    def test_rows_of_a_parquet_file(self, file):
        parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").Table
        contents = [(file.parent / f"{index}.png").read_bytes() for index in range(3)]
        rows = [{"image": {"bytes": each, "path": "a"}, "text": f"row {index}"} for index, each in enumerate(contents)]
        parquet.write_table(table.from_pylist(rows), file.with_suffix(".parquet"))
        text = calibration(file.with_suffix(".parquet")).pinned(None)
        assert text.revision.startswith("sha256:")
        assert [pair.text for pair in text.pairs(None, 2)] == ["row 0", "row 1"]
        assert [pair.pictures[0].content for pair in text.pairs(None)] == contents
        with pytest.raises(SourceError, match=r"pairs.parquet: row 1: the field 'image' is neither a text nor a list"):
            calibration(file.with_suffix(".parquet"), field="image").pairs(None)
        file.with_suffix(".parquet").write_bytes(b"PAR1")
        with pytest.raises(SourceError, match=r"pairs.parquet: not a whole Parquet file"):
            calibration(file.with_suffix(".parquet")).pairs(None)

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"text": "a"}, r"pairs.jsonl:1: there is no field 'image'. Known: text. Set `images:`"),
            ({"image": "0.png"}, r"pairs.jsonl:1: there is no field 'text'. Known: image. Set `field:`"),
            ({"image": 3, "text": "a"}, "pairs.jsonl:1: the field 'image' is no image but 3"),
            (
                {"image": "no.png", "text": "a"},
                r"no.png: the image cannot be read. No such file .* It is named in .*pairs.jsonl:1. Replace it",
            ),
            (
                {"image": "0.png", "text": 3},
                "the field 'text' is neither a text nor a list of messages: 3. A message has",
            ),
            (
                {"image": "0.png", "text": [{"role": "user", "content": [{"type": "video"}]}]},
                "neither a text nor a list",
            ),
            (
                {"image": "0.png", "text": [{"role": "user", "content": [{"type": "image"}] * 2}]},
                "its messages have 2 places for images, and 1 images are named",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, file, record, message):
        write(file, record)
        with pytest.raises(SourceError, match=message):
            calibration(file).pairs(None)


class TestFields:
    def test_images_need_records(self):
        with pytest.raises(ValidationError, match="'c4' has no images. Name a .jsonl or .parquet file, or a hub"):
            calibration("c4")

    def test_a_chat_template_leaves_nothing_to_cut(self, file):
        with pytest.raises(ValidationError, match="the chat template makes each prompt. Leave out packing"):
            calibration(file, packing="joined")

    def test_text_alone_has_the_key_that_it_had(self):
        assert "images" not in Calibration(dataset="c4").model_dump(mode="json")

    def test_what_reads_text_refuses_images(self, file):
        with pytest.raises(SourceError, match=r"pairs.jsonl with images: text alone is read here. Leave out `images`"):
            calibration(file).tokens(file.parent, None)


class TestPrompts:
    @pytest.mark.parametrize("kind", PROCESSORS)
    def test_they_are_what_the_processor_makes(self, kind, tmp_path, file, monkeypatch):
        without_videos(monkeypatch)
        save_processor(kind, tmp_path)
        prompts = calibration(file).inputs(tmp_path, None)
        first, second = prompts
        assert len(prompts) == 2
        assert first["input_ids"].shape[1] < second["input_ids"].shape[1]
        assert int((first["input_ids"] == 500).sum()) in (2, 4)
        text = prompts.processor.tokenizer.decode(first["input_ids"][0, prompts.answer(prompts.pairs[0], first) :])
        end = "<|endoftext|>" if kind == "paligemma" else "\n"  # its processor ends answers, not its template
        assert text == f"number 0 of the list number 1 of the list{end}"

    def test_the_last_message_is_the_answer(self, file, directory):
        write(file, {"image": "0.png", "text": [{"role": "user", "content": "What?"}]})
        prompts = calibration(file, samples=1).inputs(directory, None)
        with pytest.raises(
            SourceError, match="the last message is that of the role 'user'. The answer is what is measured"
        ):
            prompts.answer(prompts.pairs[0], next(iter(prompts)))

    def test_an_answer_has_tokens(self, file, tmp_path):
        save_processor("gemma3", tmp_path, TEMPLATE.replace(r"{{ '\n' }}", ""))
        write(file, {"image": "0.png", "text": ""})
        prompts = calibration(file, samples=1).inputs(tmp_path, None)
        with pytest.raises(SourceError, match="the last message has no tokens"):
            prompts.answer(prompts.pairs[0], next(iter(prompts)))


class TestBadInput:
    """All of it is found by `check_images`, before anything runs."""

    def check(self, directory, text, transformers=True):
        place = TextPlace(directory, None, directory / "counts", transformers=transformers)
        text.check_images(place, text.samples, text.limit)

    def test_good_input(self, file, directory):
        self.check(directory, calibration(file))
        self.check(directory, calibration(file), transformers=False)

    @pytest.mark.parametrize("transformers", [True, False])
    def test_an_image_that_cannot_be_read(self, file, directory, transformers):
        damaged = file.parent / "1.png"
        damaged.write_bytes(damaged.read_bytes()[:200])
        with pytest.raises(
            SourceError, match=r"1.png: the image cannot be read. .* Replace it, or take its record out"
        ):
            self.check(directory, calibration(file), transformers)

    def test_too_few_records(self, file, directory):
        with pytest.raises(SourceError, match="there are 4 records, and 9 are needed. Ask for fewer"):
            self.check(directory, calibration(file, samples=9))

    def test_no_processor(self, file, tmp_path):
        with pytest.raises(SourceError, match="there is no processor of images. Neither processor_config.json nor"):
            self.check(tmp_path, calibration(file), transformers=False)

    def test_no_pillow(self, file, directory, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingPackageError, match=r"the package `pillow` is not .* pip install 'optkit\[vision\]'"):
            self.check(directory, calibration(file), transformers=False)
        with pytest.raises(MissingPackageError, match=r"0.png: the package `pillow` is not installed"):
            calibration(file).pairs(None)[0].pictures[0].decoded()

    def test_no_torchvision(self, tmp_path, file):
        save_processor("qwen2_5_vl", tmp_path)
        pytest.importorskip("PIL")
        if "torchvision" in sys.modules:
            pytest.skip("torchvision is there")
        with pytest.raises(
            MissingPackageError, match="processor of images: the package `torchvision` is not installed"
        ):
            self.check(tmp_path, calibration(file))

    def test_a_damaged_processor(self, file, tmp_path):
        save_processor("gemma3", tmp_path)
        (tmp_path / "preprocessor_config.json").write_text("{")
        with pytest.raises(
            SourceError, match="the processor cannot be loaded. .* Copy its files from the model's source"
        ):
            self.check(tmp_path, calibration(file))

    def test_a_processor_of_text(self, tmp_path):
        save_processor("gemma3", tmp_path)
        (tmp_path / "processor_config.json").write_text("{}")
        (tmp_path / "preprocessor_config.json").unlink()
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(SourceError, match="the processor takes no images. Leave out `images`"):
            load_processor(tmp_path)

    def test_a_prompt_that_is_too_long(self, file, directory):
        with pytest.raises(
            SourceError, match=r"jsonl:3: the prompt and its 1 images are 65 tokens, more than the 50 of"
        ):
            self.check(directory, calibration(file, samples=3, sequence_length=50))

    def test_no_place_for_images_in_the_template(self, file, tmp_path):
        save_processor("gemma3", tmp_path, TEMPLATE.replace("IMAGE", ""))
        with pytest.raises(SourceError, match="the chat template has no place for an image. Copy chat_template.jinja"):
            self.check(tmp_path, calibration(file))

    def test_no_template(self, file, tmp_path):
        save_processor("gemma3", tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        with pytest.raises(SourceError, match="the processor has no chat template. Copy chat_template.jinja"):
            self.check(tmp_path, calibration(file))

    def test_what_the_processor_refuses(self, file, tmp_path):
        save_processor("gemma3", tmp_path, TEMPLATE.replace("IMAGE", "IMAGEIMAGE"))
        with pytest.raises(
            SourceError, match=r"jsonl:1: the model's processor makes no prompt of it. Prompt contained 2"
        ):
            self.check(tmp_path, calibration(file))
