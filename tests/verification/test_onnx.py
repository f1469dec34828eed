"""Damage that `optkit verify` finds in the files of an ONNX artifact, and what it says of sound
ones.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import MissingPackageError, SourceError
from optkit.model.formats.base import Format
from optkit.verification import onnx_checks
from optkit.verification.artifact_checks import check_artifact, format_of
from tests.support.changes import change_json
from tests.support.onnx_changes import change_graph
from tests.support.publishing import published

onnx = pytest.importorskip("onnx")

TinyOnnx = Callable[[str, str], Path]
Broken = Callable[[], dict[str, str]]
WEIGHT = "model.layers.1.mlp.down_proj.MatMul.weight"


@pytest.fixture
def model(tiny_onnx: TinyOnnx, tmp_path: Path) -> Path:
    """Return the export of a llama of three blocks, to break before it is published."""
    return shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "model")


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Broken:
    """Return what publishes the model as it is now, and returns the checks that do not hold."""

    def find() -> dict[str, str]:
        return {
            check.name: check.detail for check in check_artifact(published(model, tmp_path / "out")) if not check.ok
        }

    return find


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_whole_artifact(precision: str, tiny_onnx: TinyOnnx, tmp_path: Path) -> None:
    artifact = published(tiny_onnx("llama", precision), tmp_path / "out")
    assert format_of(artifact) is Format.ONNX
    checks = {check.name: check for check in check_artifact(artifact)}
    assert [check.detail for check in checks.values() if not check.ok] == []
    assert list(checks) == ["digests", "weights", "numbers", "graph", "versions", "config", "genai_config", "tokenizer"]
    assert checks["weights"].detail.endswith(" tensors, whole, in model.onnx and model.onnx.data")
    assert checks["numbers"].detail.endswith(" tensors, all finite")
    said = (
        " nodes, the KV cache of 3 layers; onnx.checker finds nothing wrong, but for 1 of ONNX "
        "Runtime's own in ONNX's domain"
    )
    assert checks["graph"].detail.endswith(said)
    assert checks["versions"].detail.startswith("IR version 10, opsets ai.onnx 21, com.microsoft 1, which onnxruntime ")


def test_hard_links_are_no_damage(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    (tmp_path / "again").hardlink_to(artifact.directory / "model.onnx.data")
    assert [check.detail for check in check_artifact(artifact) if not check.ok] == []


def test_a_data_file_that_is_lost_or_cut_off(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    data = artifact.directory / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-64])
    checks = {check.name: check for check in check_artifact(artifact)}
    assert not checks["digests"].ok
    assert "bytes and the graph asks for" in checks["weights"].detail
    assert list(checks) == ["digests", "weights", "tokenizer"]
    data.unlink()
    checks = {check.name: check for check in check_artifact(artifact)}
    assert "1 of 1 files with its weights are missing: model.onnx.data" in checks["weights"].detail


def test_a_model_that_is_lost_is_still_that_of_an_onnx_artifact(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    (artifact.directory / "model.onnx").unlink()
    checks = {check.name: check.detail for check in check_artifact(artifact) if not check.ok}
    assert checks["digests"] == "model.onnx is missing"
    assert checks["weights"] == f"{artifact.directory}: there is no model.onnx."


def test_a_file_that_is_no_onnx(model: Path, broken: Broken) -> None:
    (model / "model.onnx").write_bytes(b"<html>not found</html>")
    with pytest.raises(SourceError, match=r"not a whole ONNX file \(22 bytes\)"):
        broken()


def test_an_artifact_whose_graph_was_replaced(model: Path, tmp_path: Path) -> None:
    artifact = published(model, tmp_path / "out")
    (artifact.directory / "model.onnx").write_bytes(b"<html>not found</html>")
    found = {check.name: check.detail for check in check_artifact(artifact) if not check.ok}
    assert "not a whole ONNX file (22 bytes)" in found["weights"]


def test_the_data_of_another_model(model: Path, broken: Broken) -> None:
    data = model / "model.onnx.data"
    size = data.stat().st_size
    data.write_bytes(data.read_bytes() + bytes(100_000))
    (said,) = broken().values()
    assert said.startswith(f"model.onnx.data has {size + 100_000:,} bytes and the graph asks for ")
    assert said.endswith(": it belongs to another model")


def place_of(directory: Path, name: str) -> tuple[int, int]:
    """Return offset and length of a tensor in the data file."""
    graph = onnx.load(directory / "model.onnx", load_external_data=False).graph
    (tensor,) = (each for each in graph.initializer if each.name == name)
    entry = {each.key: each.value for each in tensor.external_data}
    return int(entry["offset"]), int(entry["length"])


def overwrite(directory: Path, name: str, data: Callable[[int], bytes]) -> None:
    offset, length = place_of(directory, name)
    with (directory / "model.onnx.data").open("r+b") as file:
        file.seek(offset)
        file.write(data(length))


@pytest.mark.parametrize(("bits", "said"), [(b"\x00\x00\xc0\x7f", "NaN"), (b"\x00\x00\x80\xff", "infinite numbers")])
def test_numbers_that_are_none(bits: bytes, said: str, model: Path, broken: Broken) -> None:
    overwrite(model, WEIGHT, lambda length: bits)
    assert broken() == {"numbers": f"{WEIGHT} holds {said}"}


def test_infinities_beside_zeros_alone_are_a_mask(model: Path, broken: Broken) -> None:
    overwrite(model, WEIGHT, lambda length: b"\x00\x00\x80\xff" + bytes(length - 4))
    assert broken() == {}


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("FLOAT16", b"\x00\x7e"), ("BFLOAT16", b"\xc0\x7f"), ("FLOAT8E5M2", b"\x7f"), ("DOUBLE", b"\xff" * 8)],
)
def test_nan_in_every_float_dtype_inside_the_graph(kind: str, bits: bytes, model: Path, broken: Broken) -> None:
    def add(graph: Any) -> None:
        number = onnx.TensorProto.DataType.Value(kind)
        graph.graph.initializer.append(onnx.TensorProto(name="late", data_type=number, dims=[2], raw_data=bits * 2))

    change_graph(model, add)
    assert broken() == {"numbers": "late holds NaN"}


def test_numbers_are_read_in_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.verification.onnx_numbers.PIECE_BYTES", 1000)
    assert all(check.ok for check in onnx_checks.check_onnx(model))
    overwrite(model, WEIGHT, lambda length: bytes(length - 4) + b"\x00\x00\xc0\x7f")
    assert [check.detail for check in onnx_checks.check_onnx(model) if not check.ok] == [f"{WEIGHT} holds NaN"]


def test_a_graph_that_is_not_valid(model: Path, broken: Broken) -> None:
    def lose(model: Any) -> None:
        node = next(each for each in model.graph.node if each.op_type == "MatMul")
        node.op_type = "MatMull"

    change_graph(model, lose)
    said = broken()["graph"]
    assert said.startswith("onnx.checker says of model.onnx: No Op registered for MatMull with domain_version of 21")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: setattr(model, "ir_version", 99),
            "Unsupported model IR version: 99, max supported IR version: ",
        ),
        (
            lambda model: setattr(model.opset_import[0], "version", 99),
            "Current official support for domain ai.onnx is till opset ",
        ),
    ],
)
def test_a_newer_version_than_onnxruntime_reads(
    change: Callable[[Any], None], said: str, model: Path, broken: Broken
) -> None:
    change_graph(model, change)
    found = broken()["versions"]
    assert said in found
    assert ": onnxruntime " in found
    assert found.endswith("Upgrade it, or export with an older opset")


def test_without_onnxruntime_nobody_says_whether_it_reads_the_versions(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    checks = {check.name: check for check in onnx_checks.check_onnx(model)}
    assert checks["versions"].ok
    assert checks["versions"].detail.endswith("; no onnxruntime is installed here to say whether it reads them")


def test_without_the_package_onnx_nothing_is_said_to_be_damaged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = published(model, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        MissingPackageError, match=r"the package `onnx` is not installed\. Run: pip install 'optkit\[onnx\]'"
    ):
        check_artifact(artifact)


def test_a_tokenizer_that_does_not_open(model: Path, broken: Broken) -> None:
    change_json(model / "tokenizer.json", lambda data: data["model"].update(merges=[["never", "there"]]))
    assert broken()["tokenizer"].startswith("tokenizer.json is no tokenizer: ")
