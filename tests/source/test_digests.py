"""Digests of files: a big one is read once, and the memory of it is damaged."""

import json
import shutil

import pytest

from optkit.source import digests
from optkit.source.digests import FileDigests
from tests.support.remembered import Lines


class TestDigests:
    @pytest.fixture
    def big(self, tmp_path, monkeypatch):
        monkeypatch.setattr(digests, "REMEMBERED_BYTES", 16)
        read = []
        monkeypatch.setattr(digests, "sha256_of", lambda path: read.append(path.name) or f"digest {len(read)}")
        (tmp_path / "big").write_bytes(bytes(100))
        (tmp_path / "small").write_bytes(bytes(10))
        return read

    def test_a_big_file_is_read_once(self, big, tmp_path):
        for _ in range(3):
            known = FileDigests(tmp_path / "cache")
            assert known.of(tmp_path / "big") == "digest 1"
            known.save()
        assert big == ["big"]

    def test_reading_many_bytes_shows_how_far_it_is(self, big, tmp_path, monkeypatch):
        monkeypatch.setattr(digests, "WORTH_SAYING_BYTES", 0)
        (tmp_path / "large").write_bytes(bytes(3 << 20))
        files, first, again = [tmp_path / name for name in ("big", "large", "small")], Lines(), Lines()
        found = FileDigests(tmp_path / "cache").of_all(files, first)
        said = f"reading {tmp_path} once for its digest of"
        assert first.lines == [f"{said} 3 MB", "+0 big", "+3 large", "+0 small", "end"]
        assert FileDigests(tmp_path / "cache").of_all(files[:2], again) == found[:2]
        assert again.lines[0] == f"{said} 0 MB"

    def test_a_small_one_each_time(self, big, tmp_path):
        known = FileDigests(tmp_path / "cache")
        assert [known.of(tmp_path / "small"), known.of(tmp_path / "small")] == ["digest 1", "digest 2"]

    def test_a_changed_file_is_read_again(self, big, tmp_path):
        known = FileDigests(tmp_path / "cache")
        known.of(tmp_path / "big")
        (tmp_path / "copy").write_bytes(bytes(100))
        (tmp_path / "copy").replace(tmp_path / "big")
        assert known.of(tmp_path / "big") == "digest 2"

    @pytest.mark.parametrize("damage", ["", "[]", '{"/big": 3}', "{"])
    def test_a_damaged_memory_is_written_anew(self, big, tmp_path, damage):
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "digests.json").write_text(damage, encoding="utf-8")
        known = FileDigests(tmp_path / "cache")
        known.of(tmp_path / "big")
        known.save()
        assert list(json.loads((tmp_path / "cache" / "digests.json").read_text(encoding="utf-8"))) == [
            str(tmp_path / "big")
        ]

    def test_two_runs_keep_what_the_other_learnt(self, big, tmp_path):
        shutil.copyfile(tmp_path / "big", tmp_path / "other")
        first, second = FileDigests(tmp_path / "cache"), FileDigests(tmp_path / "cache")
        first.of(tmp_path / "big")
        second.of(tmp_path / "other")
        first.save()
        second.save()
        assert set(json.loads((tmp_path / "cache" / "digests.json").read_text(encoding="utf-8"))) == {
            str(tmp_path / "big"),
            str(tmp_path / "other"),
        }

    def test_a_place_that_cannot_be_written_loses_nothing_but_time(self, big, tmp_path):
        (tmp_path / "cache").write_text("a file", encoding="utf-8")
        known = FileDigests(tmp_path / "cache")
        known.of(tmp_path / "big")
        known.save()
        assert FileDigests(tmp_path / "cache").of(tmp_path / "big") == "digest 2"
