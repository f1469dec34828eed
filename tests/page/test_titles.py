from optkit.page.table import Titles
from tests.support.full_scorecards import count


def test_labels_are_told_if_they_tell_something_apart() -> None:
    one = count("size", 1.0).model_copy(update={"labels": {"batch": 1, "prompt": 32}})
    other = one.model_copy(update={"labels": {"batch": 8, "prompt": 32}})
    assert [Titles([one])(one), Titles([one, other])(one)] == ["size", "size, batch 1"]
    assert Titles([one, count("size", 2.0)])(one) == "size"
    assert Titles([one, one])(one) == "size"
