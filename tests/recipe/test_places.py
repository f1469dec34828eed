"""Where the problems of a recipe are told, and where a recipe comes from, with the stages and evals
that there are.
"""

import io
import os
from pathlib import Path

import pytest

from optkit.errors import RecipeError
from optkit.recipe.recipe import load_recipe
from tests.support.recipe_stand_ins import problems_of


class TestPlaces:
    def test_a_check_across_fields_is_told_at_the_field_that_it_names(self) -> None:
        stages = "model: smollm2-135m\nstages:\n  - gptq:\n      bits: 4\n      symmetric: false\n      format: gptq\n"
        (problem,) = problems_of(stages)
        assert problem.startswith("recipe:6:15: ")
        (problem,) = problems_of(
            "model: smollm2-135m\nevals:\n  - perplexity:\n      window: 8\n      dataset: "
            "wikitext2\n      split: tst\n"
        )
        assert problem.startswith("recipe:6:14: 'wikitext2' has no split 'tst'")

    def test_an_empty_value_has_the_place_of_its_key(self) -> None:
        (problem,) = problems_of("model: smollm2-135m\nstages:\n  - gptq:\n      bits:\n\n\n      group_size: 32\n")
        assert problem == "recipe:4:7: bits: nothing is not one of 2, 3, 4, 5, 6, 8."

    def test_a_misspelled_field_of_an_override_is_told_with_those_that_there_are(self) -> None:
        (problem,) = problems_of('model: smollm2-135m\nstages:\n  - gptq: {overrides: {"*": {bitz: 3}}}\n')
        assert problem == "recipe:3:30: unknown field 'overrides.*.bitz'. Did you mean 'bits'?"


class TestStreams:
    TEXT = "model: smollm2-135m\nstages: [rtn]\n"

    def test_a_recipe_comes_through_a_pipe(self) -> None:
        reading, writing = os.pipe()
        os.write(writing, self.TEXT.encode())
        os.close(writing)
        try:
            recipe = load_recipe(Path(f"/dev/fd/{reading}"))
        finally:
            os.close(reading)
        assert (recipe.name, recipe.stages[0].kind) == ("recipe", "rtn")

    def test_a_dash_is_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(self.TEXT.encode())))
        assert load_recipe("-").stages[0].kind == "rtn"

    def test_a_stream_without_end_is_refused(self) -> None:
        with pytest.raises(RecipeError, match="more than 1,000,000 bytes are too many for a recipe"):
            load_recipe(Path("/dev/zero"))


def test_a_local_text_that_is_not_there_is_told_before_anything_is_pinned(tmp_path: Path) -> None:
    text = f"model: smollm2-135m\nevals:\n  - perplexity: {{dataset: {tmp_path}/gone.txt}}\n"
    (problem,) = problems_of(text)
    assert problem.startswith(f"recipe:3:27: there is no file {tmp_path}/gone.txt. A path counts from the directory")
    (tmp_path / "gone.txt").write_text("here")
    resolved = load_recipe(text).resolved()
    (tmp_path / "gone.txt").unlink()
    assert load_recipe(resolved).evals  # what an artifact records is read wherever it is


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(f"name: {'n' * 300}\nmodel: smollm2-135m\nstages: [rtn]\n")
    assert "is not at most 100 characters long" in problem
    file = tmp_path / f"{'f' * 200}.yaml"
    file.write_text(TestStreams.TEXT)
    assert load_recipe(file).name == "f" * 100
