import pytest
from pydantic import TypeAdapter, ValidationError

from optkit.common.byte_sizes import size_bytes
from optkit.common.field_types import Bytes


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (200_000_000, 200_000_000),
        ("200e6", 200_000_000),
        (2e9, 2_000_000_000),
        ("20 GiB", 20 * 2**30),
        ("20gib", 20 * 2**30),
        (" 1.5kB ", 1500),
        (".5 GB", 500_000_000),
        ("1 B", 1),
    ],
)
def test_sizes_as_flags_and_fields_take_them(written: float | str, size: int) -> None:
    assert size_bytes(written) == TypeAdapter(Bytes).validate_python(written) == size


@pytest.mark.parametrize("written", ["much", "-1 GB", "1 XB", "２GB", "20", 0, "0 B", "2000 TB", "1e99", True, [1]])
def test_what_is_no_size(written: object) -> None:
    message = r"is no size\. Write 20 GiB, 500 MB, or a number of bytes from 1000 to 1e\+15\."
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Bytes).validate_python(written)


def test_nothing_is_a_size_where_it_may_be() -> None:
    assert size_bytes("0 B", least=0) == 0
