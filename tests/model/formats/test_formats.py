"""A format is one class and one entry point: one more, of another package, goes through a whole run."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import TypeAdapter

from optkit.artifact import read_artifact
from optkit.common.plug_ins import plugged_in
from optkit.errors import OptkitError, SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import holds_weights
from optkit.model.formats.base import Format
from optkit.model.layer_sizes import LayerSize
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.writer import copy_companions
from optkit.pipeline import open_artifact, plan, run
from optkit.recipe import registry
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.stage import Context, Cost, Opening, Report, Setting, Transform
from optkit.verification.artifact_checks import check_artifact
from tests.support.bigram_session import BigramSession

FILE = "weights.toy"
RECIPE = "name: tiny\nmodel: {}\nstages:\n{}\nevals: [footprint]\n"


class Toy(Format):
    """One file: a line of JSON with the shape of each tensor, then a byte for each weight."""

    kind: ClassVar[str] = "toy"
    label: ClassVar[str] = "TOY"
    phrase: ClassVar[str] = "a toy"
    opened: ClassVar[str] = "a toy"
    origin: ClassVar[str] = "what it was carved from"
    made_by: ClassVar[str] = "carve"
    may_link: ClassVar[bool] = False
    computes_in: ClassVar[str | None] = "float32"
    session: ClassVar[str] = f"{__name__}:open_toy"

    def detects(self, names: Collection[str]) -> bool:
        return FILE in names

    def holds_weights(self, name: str) -> bool:
        return name.endswith(".toy")

    def check(self, directory: Path) -> tuple[Path, ...]:
        path = directory / FILE
        header, _, body = path.read_bytes().partition(b"\n")
        if len(body) != sum(info.elements for info in self._tensors(header).values()):
            raise SourceError(f"has {len(body)} weights", where=str(path), remedy="Carve it again")
        return (path,)

    def shape(self, directory: Path) -> ModelShape:
        header = (directory / FILE).read_bytes().partition(b"\n")[0]
        return ModelShape(json.loads((directory / "config.json").read_text()), self._tensors(header))

    def layer_sizes(self, directory: Path) -> list[LayerSize]:
        return [LayerSize(8 * info.elements, info.elements, True) for info in self.shape(directory).tensors.values()]

    @staticmethod
    def _tensors(header: bytes) -> dict[str, TensorInfo]:
        return {name: TensorInfo("I8", tuple(shape)) for name, shape in json.loads(header).items()}


def open_toy(opening: Opening) -> BigramSession:
    session = BigramSession()
    session.directory, session.notes = opening.directory, tuple(setting.kind for setting in opening.settings)
    return session


class Carve(Transform):
    """Makes a toy of a checkpoint."""

    kind: ClassVar[str] = "carve"

    def run(self, source: Path, target: Path, context: Context) -> Report:
        copy_companions(source, target)
        (target / "config.json").write_bytes((source / "config.json").read_bytes())
        tensors = Checkpoint(source).tensors
        header = json.dumps({name: list(info.shape) for name, info in tensors.items()})
        body = bytes(sum(info.elements for info in tensors.values()))
        (target / FILE).write_bytes(header.encode() + b"\n" + body)
        return Report(changed=len(tensors))

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        carved = {name: TensorInfo("I8", info.shape) for name, info in shape.tensors.items()}
        return Cost(disk_bytes=shape.elements), ModelShape(shape.config, carved)


class Paint(Carve):
    """Changes a toy."""

    kind: ClassVar[str] = "paint"

    def run(self, source: Path, target: Path, context: Context) -> Report:
        for path in source.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        return Report(changed=1)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        return Cost(), shape


class Spin(Setting):
    """Is for toys."""

    kind: ClassVar[str] = "spin"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Format]:
    metadata = tmp_path / "optkit_toy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: optkit-toy\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[optkit.formats]\ntoy = {__name__}:Toy\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    plugged_in.cache_clear()
    for each in (Carve, Paint, Spin):
        monkeypatch.setitem(registry.STAGES, each.kind, f"{__name__}:{each.__name__}")
    monkeypatch.setattr(Carve, "produces", Format.TOY)
    for each in (Paint, Spin):
        monkeypatch.setattr(each, "accepts", frozenset({Format.TOY}))
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    yield Format.TOY
    plugged_in.cache_clear()


def recipe(model: Path, *stages: str) -> Path:
    path = Path("tiny.yaml")
    path.write_text(RECIPE.format(model, "\n".join(f"  - {stage}" for stage in stages)))
    return path


def test_a_run(toy: Format, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = recipe(model, "carve", "paint", "spin")
    weights = Checkpoint(model).shape.elements
    steps = plan(path, device="cpu").steps
    assert [(step.format, step.size_bytes) for step in steps[1:]] == [(toy, weights), (toy, weights)]

    card = run(path, device="cpu")
    rows = {row.metric.name: row.metric.value for row in card.rows}
    out = tmp_path / "artifacts" / "tiny"
    assert rows["weights_bytes"] == (out / FILE).stat().st_size
    assert rows["bits_per_quantized_weight"] == 8
    assert Format.of(out) is toy
    assert (out / FILE).stat().st_nlink == 1  # `may_link`
    assert (out / "tokenizer.json").is_file()
    session: Any = open_artifact(out, device="cpu")
    assert (session.directory, session.notes) == (out, ("spin",))
    checks = {check.name: (check.ok, check.detail) for check in check_artifact(read_artifact(out))}
    assert checks["weights"] == (True, f"whole, in {FILE}")
    assert run(path, device="cpu").steps[-1].cached


def test_it_is_a_model_to_start_from(toy: Format, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    run(recipe(tiny_model("llama"), "carve"), device="cpu")
    out = tmp_path / "artifacts" / "tiny"
    again = plan(recipe(out, "paint"), device="cpu")
    assert [step.format for step in again.steps] == [toy, toy]
    (out / FILE).write_bytes((out / FILE).read_bytes() + b"!")
    with pytest.raises(SourceError, match=r"weights.toy: has .* weights. Carve it again"):
        plan(recipe(out, "paint"), device="cpu")
    checks = {check.name: check.ok for check in check_artifact(read_artifact(out))}
    assert not checks["weights"]


def test_what_is_for_another_format(toy: Format, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(OptkitError, match="spin is applied to a toy when it is opened, .*a torch model. Put carve"):
        plan(recipe(model, "spin"), device="cpu")
    with pytest.raises(OptkitError, match="paint reads a toy and .* is a checkpoint with float weights. Put carve"):
        plan(recipe(model, "paint"), device="cpu")
    with pytest.raises(OptkitError, match="cast reads a checkpoint .* carve leaves a toy"):
        load_recipe(recipe(model, "carve", "bf16"))
    run(recipe(model, "carve"), device="cpu")
    out = tmp_path / "artifacts" / "tiny"
    with pytest.raises(OptkitError, match="cast reads a checkpoint .* Start from what it was carved from"):
        plan(recipe(out, "bf16"), device="cpu")
    with pytest.raises(SourceError, match="the weights are in TOY. .* Name what it was carved from"):
        Checkpoint(out)
    with pytest.raises(StageError, match="spin cannot be applied to a torch model. It is for a toy"):
        open_session(model, [Spin()])
    with pytest.raises(OptkitError, match="a toy cannot be opened as float16"):
        open_session(out, dtype="float16")


def test_a_format_is_its_kind() -> None:
    assert [*Format] == ["checkpoint", "quantized", "adapted", "onnx", "gguf"]
    assert Format("onnx") is Format.ONNX
    assert json.dumps({Format.ONNX: Format.CHECKPOINT}) == '{"onnx": "checkpoint"}'
    adapter = TypeAdapter(Format)
    assert adapter.validate_python("onnx") is Format.ONNX
    assert adapter.dump_json(Format.ADAPTED) == b'"adapted"'
    with pytest.raises(ValueError, match="'gif' is no format: checkpoint, quantized, adapted, onnx"):
        Format("gif")
    with pytest.raises(AttributeError, match="GIF"):
        _ = Format.GIF


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), "checkpoint"),
        (("model.safetensors", "model.onnx"), "checkpoint"),
        (("model.onnx", "model.onnx.data"), "onnx"),
        (("a.onnx",), "checkpoint"),
    ],
)
def test_names_of_files_say_the_format(names: tuple[str, ...], found: str) -> None:
    assert Format.of_files(names) == found


def test_which_files_hold_weights(toy: Format) -> None:
    for name in ("model.safetensors", "model.onnx", "model.onnx_data_1", "pytorch_model.bin", "x.gguf", "a.toy"):
        assert holds_weights(Path(name)), name
    for name in ("config.json", "onnx.json", "tokenizer.model"):
        assert not holds_weights(Path(name)), name
