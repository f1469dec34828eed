"""A stage with another library in its place: what it refuses, its keys, and what becomes of what
the library wrote.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from optkit.backends.environments import Environments
from optkit.backends.libraries import LIBRARIES
from optkit.common.frozen import digest
from optkit.errors import OptkitError, RecipeError, StageError
from optkit.keys import SCHEMA, make_step_key
from optkit.model.checkpoint import Checkpoint
from optkit.progress import SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.stage import Context
from optkit.stages.awq import Awq
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing import backend_field as foreign
from optkit.stages.quantizing import backend_support as offers
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.changes import change_json
from tests.support.fake_library import environment_at
from tests.support.running import run_stage

CALIBRATION = {"dataset": "python-reference", "samples": 4, "sequence_length": 32}


def test_only_what_decides_the_result_is_in_the_fields() -> None:
    """So `backend: optkit` has the key that recipes without it have, and a library's key none of
    the fields that it does not have.
    """
    assert "backend" not in Gptq().model_dump(mode="json")
    assert Gptq(backend="optkit").model_dump() == Gptq().model_dump()
    assert "backend" not in Rtn().model_dump(mode="json")
    dumped = Gptq(backend="gptqmodel", damping=0.05).model_dump(mode="json")
    assert {*dumped, "earlier_errors"} == offers.OFFERS["gptq", "gptqmodel"].fields
    assert Gptq(backend="gptqmodel", earlier_errors=0.25).model_dump()["earlier_errors"] == 0.25  # its GPTAQ
    assert (dumped["backend"], dumped["damping"], dumped["format"], dumped["true_sequential"]) == (
        "gptqmodel",
        0.05,
        "gptq",
        True,
    )
    assert Gptq(**dumped).model_dump(mode="json") == dumped
    rounded = Gptq(backend="auto_round", learn="blocks").model_dump(mode="json")
    assert set(rounded) == offers.OFFERS["gptq", "auto_round"].fields
    assert (rounded["learning_steps"], rounded["format"]) == (200, "gptq")  # auto-round's own


def test_another_version_of_the_library_makes_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(backend: str) -> str:
        recipe = load_recipe({"name": "r", "model": "smollm2-135m", "stages": [{"awq": {"backend": backend}}]})
        return make_step_key(recipe.transforms[0], "source", 0)

    backends = ("optkit", "autoawq", "gptqmodel")
    before = [key(backend) for backend in backends]
    own = {
        "kind": "awq",
        "version": Awq.version,
        "fields": Awq().model_dump(mode="json"),
        "source": "source",
        "seed": 0,
    }
    assert before[0] == digest({"schema": SCHEMA, **own})
    raised = {
        "autoawq": replace(LIBRARIES["autoawq"], bare=("autoawq==0.3.0",)),
        "gptqmodel": replace(LIBRARIES["gptqmodel"], requirements=("gptqmodel==8.0.0",)),
    }
    monkeypatch.setattr(foreign, "LIBRARIES", raised)
    assert [key(backend) == old for backend, old in zip(backends, before, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    ("stage", "fields", "said"),
    [
        (
            Gptq,
            {"backend": "gptqmodel", "refinements": 2},
            "`refinements`: gptqmodel has nothing like it. Leave it out, or take backend: optk",
        ),
        (
            Gptq,
            {"backend": "llmcompressor", "equal_tokens": True, "scale_search": "mse"},
            "`equal_tokens`, `scale_search`: llmcompressor has",
        ),
        (
            Gptq,
            {"backend": "gptqmodel", "format": "compressed-tensors"},
            "format: gptqmodel has gptq, not compressed-tensors",
        ),
        (Gptq, {"backend": "gptqmodel", "symmetric": False}, "symmetric: gptqmodel has true, not false"),
        (
            Awq,
            {"backend": "autoawq", "include": ["*.mlp.*"], "grid_points": 5},
            "`grid_points`, `include`: autoawq has nothing like it",
        ),
        (Awq, {"backend": "auto_round", "symmetric": True}, "symmetric: auto_round has false, not true"),
        (Awq, {"backend": "gptqmodel", "bits": 8}, "bits: gptqmodel has 4, not 8"),
        (
            Gptq,
            {"backend": "llmcompressor", "bits": 5},
            "llmcompressor has 2, 3, 4 or 8, not 5. Set bits to 2, 3, 4 or 8, or take backend: optkit",
        ),
        (Gptq, {"backend": "auto_round"}, "has blocks, not null. Set learn to blocks, or take backend: optkit"),
        (Gptq, {"backend": "autoawq"}, "'optkit', 'auto_round', 'gptqmodel' or 'llmcompressor'"),
        (
            Rtn,
            {"backend": "llmcompressor", "scale_search": "mse"},
            "llmcompressor reads bits, exclude, format, group_size, include, overrides, symmetric",
        ),
    ],
)
def test_what_a_library_cannot_honour_is_refused_by_name(
    stage: type[Gptq | Rtn | Awq], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        stage(**fields)
    assert said in str(caught.value)


def test_a_recipe_names_the_line() -> None:
    text = "model: smollm2-135m\nstages:\n  - gptq: {backend: gptqmodel, refinements: 3}\n"
    with pytest.raises(RecipeError, match=r":3:\d+: .*`refinements`: gptqmodel has nothing like it"):
        load_recipe(text)
    written = load_recipe(text.replace(", refinements: 3", ", calibration: {dataset: python-reference}"))
    assert load_recipe(written.resolved()).resolved() == written.resolved()


def test_offers_are_of_fields_that_there_are() -> None:
    for (kind, backend), offer in offers.OFFERS.items():
        stage = {"gptq": Gptq, "rtn": Rtn, "awq": Awq}[kind]
        assert offer.fields | set(offer.defaults) <= set(stage.model_fields)  # type: ignore[attr-defined]
        assert backend in str(stage.model_fields["backend"].annotation)  # type: ignore[attr-defined]
        assert set(offer.values) | set(offer.passed) | set(offer.defaults) <= offer.fields


def test_the_whole_model_is_predicted_to_be_in_memory(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    cost, left = Gptq(backend="llmcompressor", calibration=CALIBRATION).predict(shape, "cuda")
    assert (cost.ram_bytes, cost.gpu_bytes) == (2 * shape.size_bytes, 2 * shape.size_bytes)
    assert left == Gptq(calibration=CALIBRATION).predict(shape, "cuda")[1]
    assert Gptq(backend="llmcompressor").predict(shape, "cpu")[0].gpu_bytes == 0


class FakeWorker:
    """Stands in for a library: quantizes with optkit's `rtn` what it is handed, then spoils it as
    it is told.
    """

    def __init__(self, spoil: Callable[[Path], None] = lambda written: None) -> None:
        self.spoil = spoil
        self.request: Mapping[str, Any] = {}

    def __call__(
        self, environment: Any, request: Mapping[str, Any], progress: Any, log: Path, check: Callable[[Path], None]
    ) -> dict[str, Any]:
        self.request = request
        logits = Path(request["target"]).parent / "logits.safetensors"
        save_file({"logits": foreign.logits_here(Path(request["source"]), request["probe"], request["dtype"])}, logits)
        check(logits)
        written = Path(request["target"])
        Rtn(group_size=32, include=tuple(request["layers"])).run(Path(request["source"]), written, Context())
        self.spoil(written)
        return {"library": "says"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Return what runs a stage on a model with a fake worker."""
    environment = environment_at(
        tmp_path / "env", "llmcompressor", {"llmcompressor": "0.14", "transformers": "5.17.0", "numpy": "2.2"}
    )
    monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))
    monkeypatch.setattr(foreign.Environments, "require", lambda self, name, progress: environment)

    def go(stage: Gptq | Rtn, source: Path, worker: FakeWorker) -> tuple[Path, Any]:
        monkeypatch.setattr(foreign, "run_worker", worker)
        target = tmp_path / "target"
        return target, run_stage(stage, source, target, Context(seed=7))

    return go


def test_what_the_library_wrote_becomes_an_artifact(
    run: Callable[..., Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, worker = tiny_model("llama"), FakeWorker()
    stage = Gptq(
        backend="llmcompressor",
        group_size=32,
        calibration=CALIBRATION,
        exclude=("*.0.mlp.*",),
        overrides={"*.v_proj": {"bits": 8}},
    )
    target, report = run(stage, source, worker)
    assert report.changed == 18
    assert report.skipped["model.layers.0.mlp.up_proj"] == "excluded"
    assert report.calibrated_on == (stage.calibration.identity(),)
    assert report.details["backend"] == "llmcompressor"
    assert report.details["versions"]["llmcompressor"] == "0.14"
    assert report.details["library"] == "says"
    assert report.details["logits_apart"] == 0
    assert report.details["quantized_bits_per_weight"] == pytest.approx(4 + 32 / 32 + 64 * 8 / 8192, abs=0.4)
    assert worker.request["windows"] == stage.calibration.tokens(source, None).tolist()
    assert worker.request["probe"] == worker.request["windows"][0]
    assert worker.request["layers"]["model.layers.1.self_attn.v_proj"] == {
        "bits": 8,
        "group_size": 32,
        "symmetric": True,
    }
    assert "model.layers.0.mlp.up_proj" in worker.request["kept"]
    assert worker.request["fields"] == {"damping": 0.01, "activation_order": True, "batch_size": 1}
    assert worker.request["blocks"] == 3
    assert worker.request["seed"] == 7
    config = json.loads((target / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert quantization["quant_method"] == "compressed-tensors"
    assert config == {**Checkpoint(source).config, "dtype": "float32"}
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert [path.name for path in target.parent.iterdir() if path.name.startswith(".foreign")] == []
    open_session(target)


def test_the_environment_cannot_be_removed_meanwhile(run: Callable[..., Any], tiny_model: TinyModel) -> None:
    refused = []

    def remove(_written: Path) -> None:
        with pytest.raises(OptkitError, match="a run is at work in the environment of 'llmcompressor'"):
            Environments().remove("llmcompressor", SilentProgress())
        refused.append(True)

    run(Rtn(backend="llmcompressor", group_size=32), tiny_model("llama"), FakeWorker(remove))
    assert refused


def _drop(name: str) -> Callable[[Path], None]:
    def spoil(written: Path) -> None:
        tensors = load_file(written / "model.safetensors")
        save_file(
            {key: tensor for key, tensor in tensors.items() if not key.startswith(name)}, written / "model.safetensors"
        )

    return spoil


def _unquantize(written: Path) -> None:
    change_json(written / "config.json", lambda config: config.pop("quantization_config"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_unquantize, "backend llmcompressor: it wrote no quantization_config. Nobody could open the packed weights."),
        (
            _drop("model.norm"),
            r"backend llmcompressor: 1 tensors of the model are lost \(model.norm.weight\). It would open with random",
        ),
        (_drop("model.layers.1.mlp.up_proj"), r"1 of 21 layers are as they were \(model.layers.1.mlp.up_proj\)"),
    ],
)
def test_what_was_not_asked_for_is_an_error(
    run: Callable[..., Any], tiny_model: TinyModel, spoil: Any, said: str
) -> None:
    with pytest.raises(StageError, match=said):
        run(Rtn(backend="llmcompressor", group_size=32), tiny_model("llama"), FakeWorker(spoil))


def test_layers_that_should_stay_as_they_are(run: Callable[..., Any], tiny_model: TinyModel) -> None:
    class Greedy(FakeWorker):
        def __call__(self, environment: Any, request: Mapping[str, Any], *more: Any) -> dict[str, Any]:
            names = [name for name in (*request["layers"], *request["kept"]) if name != "lm_head"]
            return super().__call__(environment, {**request, "layers": dict.fromkeys(names)}, *more)

    with pytest.raises(
        StageError, match=r"3 layers are quantized that should stay as they are \(model.layers.0.mlp.down_proj\)"
    ):
        run(Rtn(backend="llmcompressor", group_size=32, exclude=("*.0.mlp.*",)), tiny_model("llama"), Greedy())


def test_a_model_that_is_read_as_another_one_is_refused(
    run: Callable[..., Any], tiny_model: TinyModel, monkeypatch: Any
) -> None:
    """The worker reads one model, this process another."""
    check = foreign._Agreement.check
    monkeypatch.setattr(
        foreign._Agreement, "check", lambda self, file: (setattr(self, "here", -self.here), check(self, file))
    )
    with pytest.raises(
        StageError, match="They read the checkpoint as two models, so another one than yours would be quantized"
    ):
        run(Rtn(backend="llmcompressor", group_size=32), tiny_model("llama"), FakeWorker())


def test_a_library_that_needs_a_gpu_says_why(tiny_model: TinyModel, tmp_path: Path) -> None:
    said = (
        r"^awq.backend: llmcompressor needs a GPU for it. Its AWQ pins memory for a GPU at every "
        r"batch .* Take backend: optkit.$"
    )
    with pytest.raises(StageError, match=said):
        Awq(backend="llmcompressor").run(tiny_model("llama"), tmp_path, Context())


def test_shapes_that_a_library_cannot_take_are_refused_before_it_is_asked(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    said = (
        r"^model.layers.0.self_attn.k_proj: 32 outputs are not a multiple of 64. autoawq searches "
        r"the clipping of so many at once."
    )
    with pytest.raises(StageError, match=said):
        Awq(backend="autoawq", group_size=32).run(tiny_model("llama"), tmp_path, Context())


def test_a_model_with_code_of_its_own_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tmp_path / "own"
    source.mkdir()
    for path in tiny_model("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    change_json(source / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    said = (
        r"^rtn.backend: the model needs code of its own \(mine.Mine\). It was written for one version of "
        r"transformers, and the library has"
    )
    with pytest.raises(StageError, match=said):
        Rtn(backend="llmcompressor").run(source, tmp_path, Context())
