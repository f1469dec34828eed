"""The texts under the fields of classes, as descriptions."""

from typing import ClassVar

from pydantic import Field

from optkit.common.frozen import Frozen
from optkit.common.meanings import DescribedSchema, described


class Outer(Frozen):
    """A class with texts."""

    kind: ClassVar[str] = "none"
    """Of no field."""
    first: int = Field(default=1, alias="1st")
    """The first
    of all.
    """
    second: str = ""
    third: float = 0.5
    """The third."""


class Inner(Outer):
    """A class that says something else."""

    third: float = 0.25
    second: str = "here"
    """Said below."""
    outer: Outer | None = None


def test_fields_are_described_by_what_stands_under_them() -> None:
    class Local(Frozen):
        size: int = 0
        """Of a class within a function."""

    assert {name: field.description for name, field in described(Outer).items()} == {
        "first": "The first\nof all.",
        "second": None,
        "third": "The third.",
    }
    inherited = {name: field.description for name, field in described(Inner).items()}
    assert inherited == {"first": "The first\nof all.", "second": "Said below.", "third": None, "outer": None}
    assert described(Local)["size"].description == "Of a class within a function."
    made = type("Made", (Outer,), {"__module__": "nowhere"})
    assert described(made)["third"].description == "The third."


def test_a_schema_says_them() -> None:
    schema = Inner.model_json_schema(schema_generator=DescribedSchema)
    assert schema["properties"]["1st"]["description"] == "The first\nof all."
    assert schema["$defs"]["Outer"]["properties"]["third"]["description"] == "The third."
    assert "description" not in schema["properties"]["third"]
