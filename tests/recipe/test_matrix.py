"""A recipe with a matrix: its combinations, their names, and every mistake at its line."""

from pathlib import Path
from typing import Any

import pytest

from optkit.errors import RecipeError
from optkit.recipe.combination_names import combination_name
from optkit.recipe.matrix_reading import load_matrix
from optkit.recipe.recipe import load_recipe

BASE = """\
name: tiny
model: smollm2-135m
stages:
  - rtn
evals: [footprint]
"""
FIRST = BASE.count("\n") + 1
"""The line of what a test adds."""


def matrix(text: str) -> str:
    return f"{BASE}matrix:\n" + "".join(f"  {line}\n" for line in text.splitlines())


def named(text: str, *overrides: str) -> dict[str, Any]:
    """Return the name of each combination with the first stage of its recipe."""
    return {each.name: each.recipe.stages[0] for each in load_matrix(text, overrides).combinations()}


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        load_matrix(text, overrides).combinations()
    return str(error.value)


def test_each_combination_is_a_recipe_with_a_name() -> None:
    found = load_matrix(matrix("stages.0.rtn.bits: [3, 4]\nstages.0.rtn.group_size: [32, 64]")).combinations()
    assert [each.name for each in found] == [
        "bits3-group_size32",
        "bits3-group_size64",
        "bits4-group_size32",
        "bits4-group_size64",
    ]
    assert [each.recipe.name for each in found] == [f"tiny-{each.name}" for each in found]
    assert [(each.recipe.stages[0].value.bits, each.recipe.stages[0].value.group_size) for each in found] == [
        (3, 32),
        (3, 64),
        (4, 32),
        (4, 64),
    ]
    assert found[1].assignment == {"stages.0.rtn.bits": 3, "stages.0.rtn.group_size": 64}


def test_whole_stages_come_before_their_fields_and_a_star_is_whichever_stands_there() -> None:
    text = """\
stages.0.*.bits: [4, 8]
stages.0: [rtn, {gptq: {calibration: {dataset: c4}}}]
exclude: [{stages.0: rtn, stages.0.*.bits: 8}]
include: [{stages.0: nf4}]"""
    found = named(matrix(text))
    assert [(name, each.kind) for name, each in found.items()] == [
        ("bits4-rtn", "rtn"),
        ("bits4-gptq", "gptq"),
        ("bits8-gptq", "gptq"),
        ("nf4", "nf4"),
    ]
    assert found["bits8-gptq"].value.bits == 8


def test_several_values_on_the_command_line_are_an_axis_of_any_recipe() -> None:
    assert [*named(BASE, "stages.0.rtn.bits=3,4", "seed=1")] == ["bits3", "bits4"]
    assert [*named(matrix("stages.0.rtn.bits: [3, 4]\nseed: [1, 2]"), "stages.0.rtn.bits=8")] == [
        "seed1-bits8",
        "seed2-bits8",
    ]
    assert load_matrix(BASE, ["seed=1"]).varied is False
    assert load_matrix(BASE, ["seed=1"]).combinations()[0].recipe == load_recipe(BASE, ["seed=1"])


def test_a_comma_in_a_list_a_mapping_or_quotes_is_no_border() -> None:
    lists = named(BASE, "stages.0.rtn.exclude=['*.a', '*.b'],['*.c']")
    assert [each.value.exclude for each in lists.values()] == [("*.a", "*.b"), ("*.c",)]
    whole = named(BASE, "stages.0={rtn: {bits: 3, group_size: 32}},rtn")
    assert [each.value.bits for each in whole.values()] == [3, 4]
    (alone,) = load_matrix(BASE, ["description='a, b'"]).combinations()
    assert alone.recipe.description == "a, b"


def test_of_one_path_the_last_values_count() -> None:
    """As of `--set` in other commands."""
    for values in ([4, 8], [6]):
        one, other = f"stages.0.rtn.bits={','.join(map(str, values))}", "stages.0.rtn.bits=3,5"
        assert [each.value.bits for each in named(BASE, one, other).values()] == [3, 5]
        assert [each.value.bits for each in named(BASE, other, one).values()] == values


def test_names_are_unique_and_valid_for_directories() -> None:
    same = named(matrix("stages.0: [{rtn: {bits: 3}}, {rtn: {bits: 4}}]"))
    assert [*same] == ["rtn-bits3", "rtn-bits4"]
    two = BASE.replace("  - rtn\n", "  - bf16\n  - rtn\n")
    assert [*named(two, "stages.0={rotate: {residual: false}},bf16")] == ["rotate", "bf16"]
    assert [*named(BASE, "model.name=./a b,./a/b")] == ["namea-b-1", "namea-b-2"]
    assert [*named(BASE, "stages.0.rtn.group_size=-1,16")] == ["group_sizeminus1", "group_size16"]
    long = combination_name(["a" * 60, "b" * 60], {"a": 1})
    assert len(long) == 80
    assert long != combination_name(["a" * 60, "b" * 60], {"a": 2})
    assert combination_name(["-_"], {}) == "c_"


def test_fields_of_one_name_are_told_apart_by_their_way() -> None:
    text = BASE.replace("[footprint]", "[{perplexity: {dataset: python-reference, split: test}}, footprint]")
    found = named(text, "stages.0.rtn.bits=3,4", "evals.0.perplexity.windows=2,3")
    assert "bits3-windows2" in found
    both = named(
        BASE.replace("  - rtn\n", "  - bf16\n  - rtn\n"), "stages.1.rtn.group_size=32,64", "stages.1.rtn.bits=3,4"
    )
    assert "group_size32-bits3" in both


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "",
            f"recipe:{FIRST}:1: the matrix is empty: there is nothing to combine. Write `stages.0.gptq.bits: [3, 4]`.",
        ),
        ("exclude: []", f"recipe:{FIRST + 1}:3: the matrix is empty: there is nothing to combine. Write"),
        ("- 1", f"recipe:{FIRST + 1}:3: a matrix is a mapping, not [1]. Write `stages.0.gptq.bits: [3, 4]`."),
        ("seed: 4", f"recipe:{FIRST + 1}:9: the values of the axis seed are a list like [3, 4], not 4."),
        ("seed: []", f"recipe:{FIRST + 1}:9: the values of the axis seed are a list like [3, 4], not []."),
        ("seed: [1, 2, 1]", f"recipe:{FIRST + 1}:16: the axis seed has the value 1 twice. Remove one."),
        ("name: [a, b]", f"recipe:{FIRST + 1}:3: name is no axis: each combination is named after its values."),
        (
            "stages.0.rtn.bits: [4, 4.0]",
            f"recipe:{FIRST + 1}:3: the axis stages.0.rtn.bits changes nothing: all its 2 values give one recipe. "
            "Take it out, or vary a field that is used.",
        ),
        (
            "seed: [1, 2]\nstages.0.rtn.bits: [4]",
            f"recipe:{FIRST + 2}:3: the axis stages.0.rtn.bits changes nothing: 4 is what the recipe says. Give it "
            "other values, or take it out.",
        ),
        (
            "stages.0.rtn.bits: [4, 9]",
            f"recipe:{FIRST + 1}:26: bits: 9 is not one of 2, 3, 4, 5, 6, 8. Combinations: bits9.",
        ),
        (
            "stages.0.rtn.groupsize: [16, 32]",
            f"recipe:{FIRST + 1}:28: unknown field 'groupsize'. Did you mean 'group_size'? Combinations: groupsize16.",
        ),
        (
            "stages.0: [{rtn: {bits: 3}}, {rtn: {bitz: 3}}]",
            f"recipe:{FIRST + 1}:39: unknown field 'bitz'. Did you mean 'bits'? Combinations: rtn-bitz3.",
        ),
        ("stages.1.rtn.bits: [3, 4]", f"recipe:{FIRST + 1}:23: stages has one, 0; there is no 1"),
        ("stages.0.gptq.bits: [3]", f"recipe:{FIRST + 1}:24: stages.0 is rtn, not gptq. Write stages.0.rtn.bits."),
        (
            "seed: [1, 2]\nexclude: [{seeds: 1}]",
            f"recipe:{FIRST + 2}:14: seeds is no axis of the matrix, so that nothing can be excluded by it. Did you "
            "mean 'seed'?",
        ),
        (
            "seed: [1, 2]\nexclude: [{seed: 3}]",
            f"recipe:{FIRST + 2}:14: no combination has these values, so that nothing is excluded. Write values of",
        ),
        (
            "seed: [1, 2]\nexclude: [{seed: 1}, {seed: 2}]",
            f"recipe:{FIRST}:1: all 2 combinations are excluded: nothing is left.",
        ),
        (
            "seed: [1, 2]\ninclude: {seed: 3}",
            f"recipe:{FIRST + 2}:12: include is a list of mappings like {{stages.0.gptq.bits: 3}}, not a mapping.",
        ),
        ("seed: [1]\nexclude: [4]", f"recipe:{FIRST + 2}:13: exclude is a list of mappings like"),
        (
            "seed: [1, 2]\ninclude: [{seed: 2}]",
            f"recipe:{FIRST}:1: the combinations seed2 and seed2 are the same recipe. Exclude one of them.",
        ),
        (
            f"seed: {[*range(5000)]}\nstages.0.rtn.bits: [3, 4]",
            f"recipe:{FIRST}:1: the matrix has 10,000 combinations, and no more than 500 are all made. Let some of "
            "them be chosen: --trials N.",
        ),
    ],
)
def test_a_mistake_is_told_at_its_line(text: str, said: str) -> None:
    assert refused(matrix(text)).startswith(said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1,", "--set seed: an empty value in '1,'. Write PATH=VALUE,VALUE."),
        ("seed=1,1", "--set seed: the axis seed has the value 1 twice. Remove one."),
        ("seed=1,[", "--set seed: the value '[' is not YAML: "),
        ("stages.0.rtn.bits=4,7", "--set stages.0.rtn.bits: 7 is not one of 2, 3, 4, 5, 6, 8. Combinations: bits7."),
        ("seed", "--set seed: write PATH=VALUE, for example stages.0.gptq.group_size=32."),
    ],
)
def test_a_mistake_on_the_command_line_is_told_with_its_words(override: str, said: str) -> None:
    assert refused(BASE, override).startswith(said)


def test_what_is_wrong_in_every_combination_is_told_once() -> None:
    text = matrix("seed: [1, 2]").replace("footprint", "footprnt")
    assert refused(text).splitlines() == ["recipe:5:9: unknown eval 'footprnt'. Did you mean 'footprint'?"]


def test_one_recipe_is_not_many(tmp_path: Path) -> None:
    (tmp_path / "many.yaml").write_text(matrix("seed: [1, 2]"), encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "many.yaml")
    assert str(error.value).endswith(
        f"many.yaml:{FIRST}:1: a recipe with a matrix is many recipes. Run it with `optkit sweep`."
    )


def test_a_recipe_that_is_no_mapping_is_told_so() -> None:
    assert refused("- a\n- b\n").startswith("recipe:1:1: a recipe is a mapping of")


def test_some_of_many_are_drawn_and_more_trials_have_those_of_fewer() -> None:
    text = matrix(f"seed: {[*range(5000)]}\nstages.0.rtn.bits: [3, 4]\nexclude: [{{stages.0.rtn.bits: 3}}]")
    many = load_matrix(text)
    names = [each.name for each in many.some(6, seed=1)]
    assert len(set(names)) == 6
    assert all(name.endswith("bits4") for name in names)
    assert [each.name for each in many.some(3, seed=1)] == names[:3]
    assert [each.name for each in many.some(6, seed=2)] != names
    few = load_matrix(matrix("seed: [1, 2]"))
    assert few.some(9, seed=0) == few.combinations()


def test_no_more_are_made_than_trials_and_as_many_as_they_ask_for() -> None:
    few = load_matrix(matrix("seed: [1, 2]\ninclude: [{seed: 3}, {seed: 4}]"))
    with pytest.raises(RecipeError, match="the matrix has 2 combinations, and no more than 1 are all made"):
        few.combinations(most=1)
    for count in (1, 2, 3, 4, 9):
        assert len(few.some(count, seed=0)) == len(few.first(count)) == min(count, 4)


def test_trials_do_not_make_one_recipe_twice() -> None:
    text = matrix("seed: [1, 2, 3]\ninclude: [{seed: 2}]")
    for trials in (load_matrix(text).first, lambda count: load_matrix(text).some(count, seed=0)):
        with pytest.raises(RecipeError, match="the combinations seed2 and seed2 are the same recipe. Exclude one"):
            trials(3)


def test_what_is_included_has_a_name_of_its_own() -> None:
    text = matrix(
        "stages.0: [rtn, nf4]\ninclude: [{stages.0: {rtn: {bits: 3}}}, {stages.0: {rtn: {bits: 8}}}, {stages.0: int8}]"
    )
    assert [each.name for each in load_matrix(text).combinations()] == ["rtn", "nf4", "rtn-bits3", "rtn-bits8", "int8"]
