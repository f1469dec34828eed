import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from optkit.plan import Plan, make_plan
from optkit.recipe.files import shipped_recipes
from optkit.recipe.matrix_reading import load_matrix
from optkit.recipe.recipe import Recipe, load_recipe
from optkit.recipe.schema import recipe_schema
from optkit.recipe.yaml_places import read_yaml
from optkit.source.models import known_models
from optkit.stage import Format
from optkit.store.store import Store

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
RECIPES = {each.recipe.name: each.recipe for name in NAMES for each in load_matrix(name).combinations()}
"""Those of a matrix are its combinations."""

PLAN_ALL = """
import sys
from pathlib import Path
from optkit.plan import make_plan
from optkit.recipe.matrix_reading import load_matrix
from optkit.recipe.files import shipped_recipes
from optkit.store.store import Store
for name in shipped_recipes():
    for each in load_matrix(name).combinations()[:1]:
        make_plan(each.recipe.pinned(None, Path(sys.argv[1])), Store(Path(sys.argv[1])), "cpu")
print(*sorted(shipped_recipes()))
print(*sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    root = tmp_path_factory.mktemp("store")
    return {name: make_plan(recipe.pinned(None, root), Store(root), "cpu") for name, recipe in RECIPES.items()}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe_schema()


def test_every_file_is_a_recipe() -> None:
    assert set(NAMES) == set(shipped_recipes())
    assert {
        "baseline",
        "llama_int4",
        "llama_int4_rtn",
        "llama_int8",
        "llama_nf4",
        "llama_nvfp4",
        "llama_sdpa_compile",
    } <= set(NAMES)
    assert {path.name for path in (ROOT / "recipes").iterdir()} == {
        *(f"{name}.yaml" for name in NAMES),
        "recipe.schema.json",
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_schema_that_its_first_line_names(name: str, schema: dict[str, Any]) -> None:
    path = ROOT / "recipes" / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert json.loads((path.parent / "recipe.schema.json").read_text(encoding="utf-8")) == schema
    assert list(Draft202012Validator(schema).iter_errors(read_yaml(text, name).data)) == []


@pytest.mark.parametrize("name", RECIPES)
def test_it_loads_pins_and_plans(name: str, plans: dict[str, Plan]) -> None:
    plan = plans[name]
    assert plan.recipe.name == name
    assert plan.recipe.description
    assert str(plan.recipe.model.revision).startswith("sha256:")
    assert len(plan.steps) == 1 + len(plan.recipe.transforms)
    assert len(plan.evals) == len(plan.recipe.evals) > 0
    assert all(len(step.key) == 64 for step in plan.steps)


@pytest.mark.parametrize("name", RECIPES)
def test_it_resolves_to_itself(name: str, plans: dict[str, Plan], schema: dict[str, Any]) -> None:
    for recipe in (RECIPES[name], plans[name].recipe):
        assert load_recipe(recipe.resolved()) == recipe
        assert list(Draft202012Validator(schema).iter_errors(recipe.resolved())) == []


@pytest.mark.parametrize("name", NAMES)
def test_it_needs_no_network(name: str) -> None:
    assert {recipe.model.name for name_of, recipe in RECIPES.items() if name_of.startswith(name)} <= {*known_models()}
    text = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert {line.split("dataset: ")[1].split(",")[0] for line in text.splitlines() if "dataset: " in line} <= {
        "python-reference"
    }


def test_the_int4_recipes_leave_packed_weights_of_a_quarter(plans: dict[str, Plan]) -> None:
    for name in ("llama_int4", "llama_int4_rtn"):
        model, packed = plans[name].steps
        assert packed.format is Format.QUANTIZED
        assert 0.1 < packed.size_bytes / model.size_bytes < 0.5
        assert packed.cost.disk_bytes >= packed.size_bytes
        assert packed.cost.ram_bytes > 0
    assert plans["llama_int4"].steps[0].key == plans["llama_int4_rtn"].steps[0].key


@pytest.mark.parametrize(("name", "share"), [("llama_nf4", 0.4), ("llama_int8", 0.5), ("llama_nvfp4", 0.4)])
def test_the_other_quantizing_recipes_leave_packed_weights(plans: dict[str, Plan], name: str, share: float) -> None:
    model, *_, packed = plans[name].steps
    assert packed.format is Format.QUANTIZED
    assert packed.size_bytes / model.size_bytes < share


def test_mxfp4_is_one_word_away_as_the_header_says() -> None:
    text = (ROOT / "recipes" / "llama_nvfp4.yaml").read_text(encoding="utf-8")
    (override,) = [line.partition("--set ")[2] for line in text.splitlines() if "--set " in line]
    assert load_recipe("llama_nvfp4", [override]).resolved()["stages"][1]["mx"]["type"] == "mxfp4"


def test_recipes_without_transforms_make_nothing(plans: dict[str, Plan]) -> None:
    assert plans["baseline"].artifact_key == plans["baseline"].baseline_key
    assert plans["llama_sdpa_compile"].weights_key == plans["baseline"].weights_key
    assert plans["llama_sdpa_compile"].artifact_key != plans["baseline"].artifact_key


def test_the_header_of_llama_int4_works_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "recipes" / "llama_int4.yaml").read_text(encoding="utf-8")
    header = [line.lstrip("# ").rstrip("\\ ") for line in text.splitlines() if line.startswith("#")]
    words = " ".join(header).split()
    overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    assert len(overrides) == 5
    recipe: Recipe = load_recipe("llama_int4", overrides, model=words[words.index("--model") + 1])
    assert recipe.model.name == "meta-llama/Llama-3.1-8B"
    evals = {kind: fields for entry in recipe.resolved()["evals"] for kind, fields in entry.items()}
    assert (evals["perplexity"]["dataset"], evals["perplexity"]["split"], evals["perplexity"]["window"]) == (
        "wikitext2",
        "test",
        2048,
    )
    assert recipe.resolved()["stages"][0]["gptq"]["calibration"]["dataset"] == "c4"


def test_planning_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAN_ALL, str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'evals'}", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [" ".join(NAMES), ""]
