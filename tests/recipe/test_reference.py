"""The site's pages about recipes: every kind, with an example that loads, and every field."""

import re
from pathlib import Path

import pytest

from optkit.recipe.matrix_reading import load_matrix
from optkit.recipe.recipe import load_recipe
from optkit.recipe.reference import FAMILIES, entry, recipe_pages
from optkit.recipe.registry import EVALS, PRESETS, STAGES, class_of

ROOT = Path(__file__).parents[2]
PAGES = recipe_pages()
ENTRIES = [*(("stage", kind) for kind in STAGES), *(("eval", kind) for kind in EVALS)]
FORM = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
GATES, MATRIX = re.findall(r"```yaml\n([^-].*?)```", FORM, re.DOTALL)


def test_every_stage_is_on_one_page() -> None:
    assert sorted(kind for family in FAMILIES.values() for kind in family.kinds) == sorted(STAGES)
    headings = [name for page in PAGES.values() for name in re.findall(r"^## `(\w+)`$", page, re.MULTILINE)]
    assert {kind for _, kind in ENTRIES} <= {*headings}
    assert len(headings) == len({*headings})


@pytest.mark.parametrize(("role", "kind"), ENTRIES, ids=lambda each: each)
def test_an_entry_has_every_field_and_an_example_that_loads(
    role: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    monkeypatch.chdir(tmp_path)
    text = entry(role, kind)
    model = class_of(role, kind)
    assert all(re.search(rf"^`{name}`: .+\n:   \S", text, re.MULTILINE) for name in model.model_fields)
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    others = {"answers": "org/encoder-decoder", "embedding": "all-minilm-l6-v2", "encoding": "all-minilm-l6-v2"}
    source = others.get(kind, "smollm2-135m")
    recipe = load_recipe(f"model: {source}\n{example}")
    assert kind in [each.kind for each in (recipe.stages if role == "stage" else recipe.evals)]
    assert max(map(len, example.splitlines())) <= 90


def test_presets_and_recipes_are_listed() -> None:
    assert all(f"\n`- {preset}`\n:   Short for" in PAGES["fields"] for preset in PRESETS)
    assert "\n`llama_int4`\n:   GPTQ to INT4" in PAGES["fields"]


def test_every_link_has_its_section() -> None:
    anchors = set(re.findall(r"^## `(\w+)`$", PAGES["fields"], re.MULTILINE))
    links = {link for page in PAGES.values() for link in re.findall(r"\]\(fields\.md#([^)]*)\)", page)}
    assert links
    assert links <= {anchor.lower() for anchor in anchors}


def test_nothing_generated_is_a_table() -> None:
    assert not any(line.startswith("|") for page in PAGES.values() for line in page.splitlines())


def test_the_gates_shown_are_taken() -> None:
    evals = "[{perplexity: {dataset: wikitext2}}, {divergence: {dataset: wikitext2}}, footprint, throughput]"
    recipe = load_recipe(f"model: smollm2-135m\nstages: [rtn]\nevals: {evals}\n{GATES}")
    assert len(recipe.gates) == 5


def test_the_matrix_shown_is_taken() -> None:
    matrix = load_matrix(f"model: smollm2-135m\nstages: [rtn]\n{MATRIX}")
    assert "gptq-bits4" in [each.name for each in matrix.combinations()]
