import json
import os
import sys
from unittest.mock import Mock

import pytest
from pydantic import BaseModel, ValidationError

from optkit.errors import MissingPackageError, SourceError
from optkit.source import python_reference
from optkit.source.hub import HubRepo
from optkit.source.texts import KNOWN, TextSource, known_texts
from tests.support.fresh_python import imported_by


@pytest.fixture(autouse=True)
def no_data_directory(monkeypatch):
    monkeypatch.delenv("OPTKIT_DATA", raising=False)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "wikitext2_raw").mkdir()
    (tmp_path / "wikitext2_raw" / "wiki.test.raw").write_text(" \n = Title = \n \n Some text .\n \n", encoding="utf-8")
    (tmp_path / "c4_sample").mkdir()
    for number in (1, 2):
        (tmp_path / "c4_sample" / f"part{number}.jsonl").write_text(
            json.dumps({"text": f"document {number}"}) + "\n", encoding="utf-8"
        )
    return tmp_path


class TestNames:
    def test_a_bare_name_and_a_nested_one(self):
        class Stage(BaseModel):
            text: TextSource

        assert Stage.model_validate({"text": "wikitext2"}).text == TextSource(dataset="wikitext2", split="test")
        assert Stage.model_validate({"text": {"dataset": "c4", "split": "train"}}).text.split == "train"

    @pytest.mark.parametrize(
        ("dataset", "split"),
        [("python-reference", "test"), ("c4", "validation"), ("a.txt", "all"), ("org/name", "test")],
    )
    def test_the_usual_split(self, dataset, split):
        assert TextSource(dataset=dataset).split == split

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"dataset": "wikitxt2"},
                "unknown data set 'wikitxt2'. Did you mean 'wikitext2'? Or name a .txt, .jsonl or .parquet file, "
                "or a hub data set as org/name.",
            ),
            ({"dataset": "zzz"}, "unknown data set 'zzz'. Known: c4, python-reference, wikitext2."),
            (
                {"dataset": "wikitext2", "split": "valid"},
                "'wikitext2' has no split 'valid'. Did you mean 'validation'? If --set named the data set, "
                "set PATH.split too.",
            ),
            (
                {"dataset": "a.jsonl", "split": "train"},
                "'a.jsonl' has no split 'train'. Known: all. If --set named the data set, set PATH.split too.",
            ),
            ({"dataset": "c4", "splitt": "train"}, "Extra inputs are not permitted"),
            ({"split": "train"}, "Field required"),
            ({"dataset": 3}, "Input should be a valid string"),
        ],
    )
    def test_what_cannot_be_right_is_refused_when_the_recipe_is_read(self, fields, message):
        with pytest.raises(ValidationError) as caught:
            TextSource.model_validate(fields)
        assert message in str(caught.value)

    def test_every_built_in_text_has_one_line(self):
        assert set(known_texts()) == set(KNOWN) == {"python-reference", "wikitext2", "c4"}
        assert all(line and "\n" not in line for line in known_texts().values())


class TestPythonReference:
    def test_splits_share_no_long_paragraph_and_each_is_large(self):
        paragraphs = {
            split: set().union(*map(python_reference.long_paragraphs, python_reference.read_topics(split)))
            for split in python_reference.SPLITS
        }
        for split, own in paragraphs.items():
            assert own.isdisjoint(set().union(*(other for name, other in paragraphs.items() if name != split)))
        sizes = {
            split: len(TextSource(dataset="python-reference", split=split).joined(None))
            for split in python_reference.SPLITS
        }
        assert sizes["train"] > 200_000
        assert sizes["test"] > 50_000
        assert sizes["validation"] > 15_000

    def test_documents_are_topics_in_the_order_of_their_names(self):
        from pydoc_data.topics import topics

        documents = TextSource(dataset="python-reference", split="train").documents(None)
        names = [next(name for name in sorted(topics) if topics[name] == document) for document in documents]
        assert names == sorted(names)
        assert "compound" in names
        assert "try" not in names

    def test_a_topic_stays_in_its_split_in_each_python(self):
        assert {
            name: python_reference.split_of(name)
            for name in ("compound", "specialnames", "strings", "types", "await", "binary")
        } == {
            "compound": "train",
            "specialnames": "train",
            "strings": "test",
            "types": "train",
            "await": "test",
            "binary": "validation",
        }

    def test_a_python_without_the_topics(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
        with pytest.raises(
            SourceError,
            match=r"python-reference: this Python has no pydoc_data.topics. It was left out .* Take another",
        ):
            TextSource(dataset="python-reference").pinned(None)

    def test_it_is_pinned_to_its_words(self):
        pinned = TextSource(dataset="python-reference").pinned(None)
        assert pinned.revision is not None
        assert pinned.revision.startswith("sha256:")
        assert pinned.pinned(None) == pinned
        with pytest.raises(
            SourceError, match=r"python-reference \(test\): the text is sha256:\w+ and not sha256:0. It was changed"
        ):
            TextSource(dataset="python-reference", revision="sha256:0").documents(None)


class TestLocalCopies:
    def test_wikitext_rows_are_those_of_the_hub(self, data):
        text = TextSource(dataset="wikitext2")
        assert text.documents(data) == ["", " = Title = \n", "", " Some text .\n", ""]
        assert text.joined(data) == "\n\n = Title = \n\n\n\n\n Some text .\n\n\n"

    def test_the_real_wikitext(self, shared_data):
        text = TextSource(dataset="wikitext2").pinned(shared_data)
        assert len(text.documents(shared_data)) == 4358
        assert text.revision == "sha256:696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"

    def test_c4_is_every_file_of_its_directory_in_order(self, data):
        assert TextSource(dataset="c4", split="train").documents(data) == ["document 1", "document 2"]

    def test_the_environment_names_the_directory_too(self, data, monkeypatch):
        monkeypatch.setenv("OPTKIT_DATA", str(data))
        assert TextSource(dataset="c4", split="train").documents(None) == ["document 1", "document 2"]

    @pytest.mark.parametrize(("by_option", "named"), [(True, "--data"), (False, "OPTKIT_DATA")])
    def test_a_directory_that_is_not_there(self, tmp_path, monkeypatch, by_option, named):
        gone = tmp_path / "gone"
        if not by_option:
            monkeypatch.setenv("OPTKIT_DATA", str(gone))
        with pytest.raises(SourceError, match=f"gone: no such directory. It was named by {named}."):
            TextSource(dataset="c4").pinned(gone if by_option else None)

    def test_without_copy_and_hub_it_says_where_it_looked_and_what_to_set(self, data):
        with pytest.raises(SourceError) as caught:
            TextSource(dataset="wikitext2", split="train").pinned(data)
        message = str(caught.value)
        assert "datasets--Salesforce--wikitext/refs/main" in message
        assert f"There is no {data / 'wikitext2_raw' / 'wiki.train.raw'}." in message
        assert "Name a directory of local copies with --data or OPTKIT_DATA, or take python-reference" in message
        with pytest.raises(
            SourceError, match=r"No data directory was named, which could hold wikitext2_raw/wiki.test.raw\."
        ):
            TextSource(dataset="wikitext2").pinned(None)
        with pytest.raises(SourceError, match="A data directory can hold its train, not validation"):
            TextSource(dataset="c4").pinned(data)

    def test_a_pinned_copy_that_was_taken_away(self, data):
        pinned = TextSource(dataset="wikitext2").pinned(data)
        (data / "wikitext2_raw" / "wiki.test.raw").unlink()
        with pytest.raises(
            SourceError, match="the local copy that was pinned as sha256:.* is not there. There is no .*wiki.test.raw"
        ):
            pinned.documents(data)


class TestFiles:
    def test_txt_is_one_document_whose_digest_is_the_file_s(self, tmp_path):
        import hashlib

        file = tmp_path / "mine.txt"
        file.write_bytes("one\r\n\ntwo ü\n".encode())
        text = TextSource(dataset=str(file)).pinned(None)
        assert text.documents(None) == ["one\r\n\ntwo ü\n"]
        assert text.revision == "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
        file.write_text("another", encoding="utf-8")
        with pytest.raises(
            SourceError, match="It was changed, or comes from another version of its source. Restore it"
        ):
            text.documents(None)

    def test_jsonl_takes_the_field_and_passes_over_blank_lines(self, tmp_path):
        file = tmp_path / "mine.jsonl"
        file.write_text('{"body": "a\\u2028b"}\n\n{"body": "c"}', encoding="utf-8")
        assert TextSource(dataset=str(file), field="body").documents(None) == ["a\u2028b", "c"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{not json", r"mine.jsonl:2: the line is not JSON. Expecting property name"),
            ('["text"]', r"mine.jsonl:2: the line is not a JSON object but '\[\"text\"\]'"),
            ('{"txt": "x"}', r"mine.jsonl:2: there is no field 'text'. Did you mean 'txt'\? Set `field:`"),
            ('{"text": 3}', r"mine.jsonl:2: the field 'text' is not a text but 3"),
            (
                '{"text": "\\ud800"}',
                r"mine.jsonl:2: the field 'text' holds half of a surrogate pair. No tokenizer takes that",
            ),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path, line, message):
        (tmp_path / "mine.jsonl").write_text('{"text": "fine"}\n' + line, encoding="utf-8")
        with pytest.raises(SourceError, match=message):
            TextSource(dataset=str(tmp_path / "mine.jsonl")).documents(None)

    @pytest.mark.parametrize(("encoding", "place"), [("latin1", 3), ("utf-16", 0)])
    def test_not_utf8(self, tmp_path, encoding, place):
        (tmp_path / "mine.txt").write_bytes("caf\xe9 au lait".encode(encoding))
        said = rf"mine.txt: byte {place} is not UTF-8. invalid \w* byte. Convert it: iconv -f {encoding} -t utf-8"
        with pytest.raises(SourceError, match=said):
            TextSource(dataset=str(tmp_path / "mine.txt")).documents(None)

    def test_a_byte_order_mark_is_no_text(self, tmp_path):
        (tmp_path / "mine.txt").write_text("a b c", encoding="utf-8-sig")
        with pytest.raises(SourceError, match=r"mine.txt: it begins with a byte order mark. .* Remove it: tail -c \+4"):
            TextSource(dataset=str(tmp_path / "mine.txt")).documents(None)

    def test_not_there(self, tmp_path):
        with pytest.raises(SourceError, match=r"gone.txt: cannot be read. No such file or directory"):
            TextSource(dataset=str(tmp_path / "gone.txt")).pinned(None)

    def test_of_another_user(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(SourceError, match=r"it.txt: cannot be read. Permission denied. .* or ask its owner to\."):
            TextSource(dataset=str(tmp_path / "it.txt")).pinned(None)

    def test_empty(self, tmp_path):
        (tmp_path / "mine.txt").write_text(" \n", encoding="utf-8")
        with pytest.raises(SourceError, match=r"mine.txt: the text is empty. Name another data set, split or field"):
            TextSource(dataset=str(tmp_path / "mine.txt")).pinned(None)


class TestOverlaps:
    def test_the_same_split_or_the_same_content(self, tmp_path):
        (tmp_path / "a.txt").write_text("same words", encoding="utf-8")
        (tmp_path / "b.txt").write_text("same words", encoding="utf-8")
        (tmp_path / "c.txt").write_text("other words", encoding="utf-8")
        a, b, c = (TextSource(dataset=str(tmp_path / f"{name}.txt")).pinned(None) for name in "abc")
        assert a.overlaps(b)
        assert a.overlaps(b.identity())
        assert not a.overlaps(c)
        assert TextSource(dataset="c4", split="train", revision="1" * 40).overlaps(
            {"dataset": "c4", "split": "train", "revision": "sha256:1"}
        )
        assert not TextSource(dataset="c4", split="train").overlaps(TextSource(dataset="c4", split="validation"))

    def test_a_built_in_name_and_its_hub_id_are_the_same(self):
        assert TextSource(dataset="c4", split="train").overlaps(TextSource(dataset="allenai/c4:en", split="train"))
        assert not TextSource(dataset="c4", split="train").overlaps(TextSource(dataset="allenai/c4:de", split="train"))

    def test_identity(self):
        assert TextSource(dataset="c4", revision="sha256:1").identity() == {
            "dataset": "c4",
            "split": "validation",
            "revision": "sha256:1",
        }


class Rows(list):
    """Stands in for a data set that is streamed: its media can be left as bytes."""

    def decode(self, enable: bool):
        assert not enable
        return self


class TestHub:
    commit = "c" * 40

    @pytest.fixture
    def load_dataset(self, monkeypatch):
        datasets = pytest.importorskip("datasets")
        calls = []

        def load_dataset(name, configuration=None, **keywords):
            calls.append((name, configuration, keywords))
            if keywords["split"] == "nowhere":
                raise ValueError('Unknown split "nowhere". Should be one of ["test"].')
            return Rows({"text": f"row {number}", "label": number} for number in range(20_000))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(HubRepo, "commit", lambda repo, revision=None: revision or self.commit)
        return calls

    def test_wikitext_is_read_whole_and_at_its_commit(self, load_dataset):
        text = TextSource(dataset="wikitext2").pinned(None)
        assert text.revision == self.commit
        assert len(text.documents(None)) == 20_000
        assert load_dataset == [
            ("Salesforce/wikitext", "wikitext-2-raw-v1", {"split": "test", "revision": self.commit, "streaming": False})
        ]

    def test_a_revision_of_the_hub_is_not_answered_by_a_local_copy(self, load_dataset, data):
        assert TextSource(dataset="wikitext2", revision=self.commit).documents(data)[0] == "row 0"

    def test_others_are_streamed_up_to_their_first_rows(self, load_dataset):
        assert len(TextSource(dataset="org/name:small").documents(None)) == 10_000
        assert load_dataset == [("org/name", "small", {"split": "test", "revision": self.commit, "streaming": True})]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"split": "nowhere"}, r"org/name \(nowhere\): the data set cannot be read. Unknown split .* Check split"),
            ({"field": "txt"}, r"org/name \(test\): there is no field 'txt'. Did you mean 'text'\? Set `field:`"),
            ({"field": "label"}, r"org/name \(test\): the field 'label' is not a text but 0"),
        ],
    )
    def test_what_is_wrong_is_said(self, load_dataset, fields, message):
        with pytest.raises(SourceError, match=message):
            TextSource(dataset="org/name", **fields).documents(None)

    def test_without_the_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingPackageError, match=r"pip install 'optkit\[hub\]'"):
            TextSource(dataset="org/name", revision=self.commit).documents(None)


def test_no_torch_is_imported():
    use = "from optkit.source.texts import TextSource; TextSource(dataset='python-reference').pinned(None)"
    assert "torch" not in imported_by(use)
