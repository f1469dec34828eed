import pytest

from optkit.errors import RecipeError
from optkit.recipe.yaml_places import MOST_NODES, read_yaml


def problems_of(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_yaml(text, "r.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5E3", 1500.0),
        ("-0.25", -0.25),
        ("12", 12),
        ("012", 12),
        ("0x1F", 31),
        ("1_000", 1000),
        ("-_", "-_"),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("off", "off"),
        ("2024-01-01", "2024-01-01"),
        ("'4'", "4"),
        ('"true"', "true"),
        ("!!str 4", "4"),
        ("~", None),
        ("", None),
        ("[1, 2]", [1, 2]),
        ("{b: 1}", {"b": 1}),
        ("<= 1.10x", "<= 1.10x"),
    ],
)
def test_a_scalar_is_what_yaml_1_2_says(written: str, value: object) -> None:
    read = read_yaml(f"a: {written}\n", "").data["a"]
    assert read == value
    assert type(read) is type(value)


def test_keys_and_values_have_places() -> None:
    placed = read_yaml("model: x\nstages:\n  - gptq: {bits: 4,\n           group_size: 64}\n", "r.yaml")
    bits = placed.value_place(("stages", 0, "gptq", "bits"))
    assert (bits.file, bits.line, bits.column) == ("r.yaml", 3, 18)
    key = placed.key_place(("stages", 0, "gptq", "group_size"))
    assert (key.line, key.column) == (4, 12)
    assert placed.key_place(("stages", 0, "gptq", "missing")) == placed.value_place(("stages", 0, "gptq"))
    assert placed.value_place(("evals", 3)).line == 1


def test_aliases_repeat_a_value_and_keep_its_place() -> None:
    placed = read_yaml("a: &text {dataset: x}\nb: *text\n", "")
    assert placed.data == {"a": {"dataset": "x"}, "b": {"dataset": "x"}}
    assert placed.value_place(("b", "dataset")).line == 1


def test_merge_keys_fill_what_is_not_written() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc:\n  <<: [*a, *b]\n  x: 0\n"
    placed = read_yaml(text, "")
    assert placed.data["c"] == {"x": 0, "y": 1, "z": 2}
    assert placed.value_place(("c", "x")).line == 5
    assert problems_of("a: {<<: 4}\n") == ["r.yaml:1:9: a merge key (<<) takes a mapping or a list of mappings."]


def test_all_duplicate_keys_are_refused_at_once() -> None:
    assert problems_of("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [
        "r.yaml:2:11: the key 'c' is here twice, first in line 2. Remove one of them.",
        "r.yaml:3:1: the key 'a' is here twice, first in line 1. Remove one of them.",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\tb: 1\n", "r.yaml:2:1: a tab stands here. YAML is indented with spaces; replace the tab by spaces."),
        (
            "a: 1\n---\nb: 2\n",
            "r.yaml:2:1: a second document begins here. A recipe is one document; remove the line '---' or '...' "
            "before it.",
        ),
        (
            "a: b: c\n",
            "r.yaml:1:5: a second ': ' in one line, or a line indented too far. Put quotes "
            "around text that holds ': '.",
        ),
        (
            "a: >= 2\n",
            "r.yaml:1:5: expected chomping or indentation indicators, but found '='. Put quotes "
            'around the text, e.g. ">= 2".',
        ),
        (
            "a: @x\n",
            "r.yaml:1:4: found character '@' that cannot start any token. Put quotes around the text, e.g. \"@x\".",
        ),
        (
            "- a\nb: 1\n",
            "r.yaml:2:1: the indentation does not fit the lines above."
            " Keys of one mapping, and the items of one list, begin in one column.",
        ),
        (
            "a: [1\n",
            "r.yaml:1:4: this is not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'.",
        ),
        (
            "a: 'b\nc: d\n",
            "r.yaml:1:4: this is not YAML: while scanning a quoted scalar, found unexpected end of stream.",
        ),
        ("a: *x\n", "r.yaml:1:4: this is not YAML: found undefined alias 'x'."),
        ("a: !new 3\n", "r.yaml:1:4: the tag !new is not supported. Remove it."),
        (
            "a: !!python/name:os.system\n",
            "r.yaml:1:4: the tag tag:yaml.org,2002:python/name:os.system is not supported. Remove it.",
        ),
        ("a: !!set {b}\n", "r.yaml:1:4: the tag tag:yaml.org,2002:set is not supported. Remove it."),
        ("a: .inf\n", "r.yaml:1:4: .inf is not a finite number."),
        ("a: .nan\n", "r.yaml:1:4: .nan is not a finite number."),
        ("5: a\n", "r.yaml:1:1: a key must be text, not 5."),
        ("? [a]\n: b\n", "r.yaml:1:3: a key must be text, not a list or mapping."),
        (": b\n", "r.yaml:1:1: a key must be text, not nothing."),
        ("a: &a [*a]\n", "r.yaml:1:4: the anchor '&a' holds an alias to itself. Write the value out."),
        ("b: 1\na: \x00\n", "r.yaml:2:4: the character U+0000 cannot stand in YAML. Remove it."),
    ],
)
def test_what_is_not_plain_yaml_is_refused(text: str, problem: str) -> None:
    assert problem in problems_of(text)


def test_aliases_cannot_multiply_without_bound() -> None:
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)
    ]
    (problem,) = problems_of("\n".join(lines))
    assert f"more than {MOST_NODES:,} values" in problem


@pytest.mark.parametrize(("levels", "said"), [(200, "r.yaml:1:54: more than 50 lists"), (5000, "r.yaml: cannot be")])
def test_what_is_nested_too_deeply_is_refused(levels: int, said: str) -> None:
    (problem,) = problems_of(f"a: {'[' * levels}{']' * levels}\n")
    assert problem.startswith(said)


def test_nesting_without_end_is_no_traceback() -> None:
    (problem,) = problems_of("[" * 20_000)
    assert problem.startswith("r.yaml: cannot be read as YAML")
