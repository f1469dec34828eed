"""Local files with records."""

import pytest

from optkit.errors import SourceError
from optkit.source.text_files import read_objects, read_records


def test_of_a_parquet_file_the_named_fields_alone_are_read(tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet, table

    path = tmp_path / "a.parquet"
    parquet.write_table(table({"text": ["one", "two"], "image": [b"1", b"2"]}), path)
    assert [row for _, row in read_objects(path, "text")] == [{"text": "one"}, {"text": "two"}]
    assert [sorted(row) for _, row in read_objects(path)] == [["image", "text"]] * 2
    with pytest.raises(SourceError, match="row 1: there is no field 'txt'. Did you mean 'text'?"):
        read_records([path], "txt")
