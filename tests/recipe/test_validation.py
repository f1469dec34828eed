from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from optkit.common.field_types import Form
from optkit.common.frozen import Frozen
from optkit.recipe.field_faults import Fault, shown, validate


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(Frozen):
    name: str
    """The inner name,
    told in two lines."""


class Outer(Frozen):
    whole: int = Field(default=1, ge=1, le=8)
    number: float = Field(default=0.5, gt=0, lt=1)
    even: int = Field(default=2, multiple_of=2)
    flag: bool = False
    text: str = Field(default="ab", min_length=1, max_length=3)
    code: Annotated[str, Form(r"^[a-z]\d$", "a letter and a digit")] = "a1"
    colour: Colour = Colour.RED
    path: Path = Path("here")
    either: int | Literal["all"] = "all"
    maybe: float | None = None
    several: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1,), min_length=1, max_length=2)
    mapping: dict[str, int] = {}
    inner: Inner = Inner(name="x")
    inners: tuple[Inner, ...] = ()

    @field_validator("text")
    @classmethod
    def _no_z(cls, value: str) -> str:
        if "z" in value:
            raise ValueError("z is not a letter here.")
        return value

    @model_validator(mode="after")
    def _fits(self) -> "Outer":
        if self.whole == 7 and self.even == 4:
            raise ValueError("7 and 4 do not go together.")
        return self


def messages(**data: Any) -> list[str]:
    found = validate(Outer, data)
    assert isinstance(found, list), found
    return [fault.message for fault in found]


def test_what_fits_is_taken_as_it_is_meant() -> None:
    taken = validate(
        Outer, {"several": [1, 2], "path": "a/b", "colour": "blue", "number": 0.25, "maybe": 3, "inner": {"name": "y"}}
    )
    assert taken == Outer(
        several=(1, 2), path=Path("a/b"), colour=Colour.BLUE, number=0.25, maybe=3.0, inner=Inner(name="y")
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"whole": "4"}, "whole: '4' is not a whole number."),
        ({"whole": True}, "whole: true is not a whole number."),
        ({"whole": 2.5}, "whole: 2.5 is not a whole number."),
        ({"whole": 0}, "whole: 0 is not at least 1."),
        ({"whole": 9}, "whole: 9 is not at most 8."),
        ({"number": "a"}, "number: 'a' is not a number."),
        ({"number": 0}, "number: 0 is not greater than 0."),
        ({"number": 1.0}, "number: 1.0 is not less than 1."),
        ({"even": 3}, "even: 3 is not a multiple of 2."),
        ({"flag": "yes"}, "flag: 'yes' is not true or false."),
        ({"flag": 1}, "flag: 1 is not true or false."),
        ({"text": 4}, "text: 4 is not text."),
        ({"text": ""}, "text: '' is not at least 1 characters long."),
        ({"text": "abcd"}, "text: 'abcd' is not at most 3 characters long."),
        ({"text": "z"}, "text: z is not a letter here."),
        ({"text": None}, "text: nothing is not text."),
        ({"code": "11"}, "code: '11' is not a letter and a digit."),
        ({"colour": "blu"}, "colour: 'blu' is not one of 'red', 'blue'. Did you mean 'blue'?"),
        ({"colour": "zzz"}, "colour: 'zzz' is not one of 'red', 'blue'."),
        ({"path": 4}, "path: 4 is not text."),
        ({"either": "al"}, "either: 'al' is not a whole number or 'all'. Did you mean 'all'?"),
        ({"either": [1]}, "either: [1] is not a whole number or 'all'."),
        ({"maybe": "a"}, "maybe: 'a' is not a number."),
        ({"several": 4}, "several: 4 is not a list."),
        ({"several": [1, 0]}, "several.1: 0 is not at least 1."),
        ({"several": []}, "several: [] is not at least 1 long (it has 0)."),
        ({"mapping": [1]}, "mapping: [1] is not a mapping."),
        ({"mapping": {"a": "b"}}, "mapping.a: 'b' is not a whole number."),
        ({"inner": 4}, "inner: 4 is not a mapping of fields."),
        ({"inner": {}}, "the field 'inner.name' is missing. It is: The inner name, told in two lines."),
        ({"inner": {"nam": "x", "name": "y"}}, "unknown field 'inner.nam'. Did you mean 'name'?"),
        ({"inners": [{"name": "x"}, {"name": 4}]}, "inners.1.name: 4 is not text."),
        ({"whole": 7, "even": 4}, "7 and 4 do not go together."),
        ({"text": "long" * 40}, f"text: {shown('long' * 40)} is not at most 3 characters long."),
    ],
)
def test_what_does_not_fit_is_told_in_a_sentence(data: dict[str, Any], message: str) -> None:
    assert messages(**data) == [message]


def test_all_faults_are_told_with_the_way_to_them() -> None:
    found = validate(Outer, {"whole": 0, "inners": [{"nme": "x"}], "mapping": {"a": None}})
    assert isinstance(found, list)
    assert {(fault.steps, fault.of_key) for fault in found} == {
        (("whole",), False),
        (("inners", 0, "nme"), True),
        (("inners", 0, "name"), True),
        (("mapping", "a"), False),
    }
    assert all(isinstance(fault, Fault) for fault in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "nothing"),
        (True, "true"),
        (1e-5, "1e-05"),
        ("a", "'a'"),
        ([1, "ä"], '[1, "ä"]'),
        ({"a": 1}, "a mapping"),
        ("x" * 100, "'" + "x" * 56 + "..."),
    ],
)
def test_values_are_shown_short(value: Any, text: str) -> None:
    assert shown(value) == text


def test_a_list_of_nothing_right_is_not_told_to_be_too_short() -> None:
    found = validate(Outer, {"several": ["one"]})
    assert isinstance(found, list)
    assert [fault.steps for fault in found] == [("several", 0)]
