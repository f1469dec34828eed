"""What onnx_quantize and onnx_optimize say that they will leave and need, beside what they leave
and need.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optkit.model.onnx_shape import onnx_shape
from optkit.model.shape import ModelShape
from optkit.onnx.changed_shape import LIBRARY_BYTES
from optkit.source.calibration import Calibration
from optkit.stage import Context, Transform
from optkit.stages.onnx_optimize import OnnxOptimize
from optkit.stages.onnx_quantize import OnnxQuantize
from tests.support.exported import exported
from tests.support.tiny_models import CONFIGS, save_tiny_model
from tests.support.warm import warm_pythons

WIDE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CASES = [("onnx_quantize", '{"algorithm": "rtn"}'), ("onnx_optimize", '{"level": "extended", "float16": true}')]
PEAK = """
import json, os, sys, tempfile, threading
from pathlib import Path
from optkit.recipe.registry import stage_class
from optkit.stage import Context
def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
def run(source, kind, fields):
    seen, done = [held()], threading.Event()
    def watch():
        while not done.wait(0.002):
            seen.append(held())
    watching = threading.Thread(target=watch)
    watching.start()
    with tempfile.TemporaryDirectory() as target:
        stage_class(kind)(**json.loads(fields)).run(Path(source), Path(target), Context())
    done.set()
    watching.join()
    return max(seen) - seen[0]
import onnxruntime, torch, transformers
for case in json.loads(sys.argv[3]):
    if os.fork() == 0:
        run(sys.argv[1], *case)
        print(run(sys.argv[2], *case))
        break
    os.wait()
"""
"""Prints the bytes that each stage holds beside what its libraries do, which a run on a tiny model
has loaded.
"""


@pytest.fixture(scope="module")
def wide_onnx(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    root = tmp_path_factory.mktemp("wide-onnx")

    def make(tied: bool) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(CONFIGS, "wide", CONFIGS["llama"] | WIDE | {"tie_word_embeddings": tied})
            target = root / f"onnx-{tied}"
            return target if target.exists() else exported(save_tiny_model("wide", root / f"source-{tied}"), target)

    return make


STAGES: dict[str, Transform] = {
    "asymmetric": OnnxQuantize(),
    "symmetric": OnnxQuantize(symmetric=True, algorithm="rtn"),
    "hqq": OnnxQuantize(algorithm="hqq", block_size=64),
    "k_quant": OnnxQuantize(algorithm="k_quant", block_size=32, lm_head=4),
    "eight": OnnxQuantize(bits=8, block_size=128),
    "head kept": OnnxQuantize(lm_head="keep"),
    "some": OnnxQuantize(include=("*.mlp.*",), exclude=("*down_proj*",), lm_head="keep"),
    "dynamic": OnnxQuantize(method="dynamic"),
    "dynamic, embedding": OnnxQuantize(method="dynamic", op_types=("MatMul", "Gather"), per_channel=False),
    "static": OnnxQuantize(
        method="static", calibration=Calibration(dataset="python-reference", samples=2, sequence_length=16)
    ),
    "basic": OnnxOptimize(),
    "float16": OnnxOptimize(level="none", float16=True),
}


@pytest.mark.parametrize(
    ("stage", "tied"),
    [*((stage, True) for stage in STAGES), ("symmetric", False), ("dynamic", False), ("basic", False)],
)
def test_the_size_that_is_left(wide_onnx: Callable[[bool], Path], tmp_path: Path, stage: str, tied: bool) -> None:
    source = wide_onnx(tied)
    STAGES[stage].run(source, tmp_path, Context())
    cost, left = STAGES[stage].predict(onnx_shape(source), "cpu")
    written = (tmp_path / "model.onnx.data").stat().st_size
    assert left.size_bytes == pytest.approx(written, rel=0.04)
    assert cost.disk_bytes >= 0.96 * written


def test_an_embedding_that_shares_codes(wide_onnx: Callable[[bool], Path], tmp_path: Path) -> None:
    stage = OnnxQuantize(embedding="shared")
    stage.run(wide_onnx(True), tmp_path, Context())
    left = stage.predict(onnx_shape(wide_onnx(True)), "cpu")[1]
    assert left.size_bytes == pytest.approx((tmp_path / "model.onnx.data").stat().st_size, rel=0.04)


def test_patterns_on_nodes_choose_no_weight(wide_onnx: Callable[[bool], Path]) -> None:
    shape = onnx_shape(wide_onnx(False))
    assert OnnxQuantize(include=("/model/layers.0/*",)).predict(shape, "cpu")[1].size_bytes == shape.size_bytes


def test_float16_is_said_in_the_config(wide_onnx: Callable[[bool], Path]) -> None:
    left: ModelShape = OnnxOptimize(float16=True).predict(onnx_shape(wide_onnx(True)), "cpu")[1]
    assert left.config["dtype"] == "float16"
    assert {info.dtype for info in left.tensors.values() if len(info.shape) == 2} == {"F16"}


@pytest.fixture(scope="module")
def peaks(
    tmp_path_factory: pytest.TempPathFactory, tiny_onnx: Callable[[str, str], Path]
) -> Iterator[tuple[Path, list[str]]]:
    """Return a model of 100 MB, most of it in an embedding that is lm_head too, and the peak of
    each case: it is large enough to outweigh what libraries hold by the way.
    """
    place = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        wide = WIDE | {"vocab_size": 16_000, "hidden_size": 768, "intermediate_size": 2048, "tie_word_embeddings": True}
        patch.setitem(CONFIGS, "wide", CONFIGS["llama"] | wide)
        source = exported(save_tiny_model("wide", place / "source"), place / "onnx")
    command = [sys.executable, "-c", PEAK, str(tiny_onnx("llama", "fp32")), str(source), json.dumps(CASES)]
    with warm_pythons():
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    yield source, said.split()
    shutil.rmtree(place)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells how much memory a process holds")
@pytest.mark.parametrize("case", range(len(CASES)), ids=[kind for kind, _ in CASES])
def test_the_memory(peaks: tuple[Path, list[str]], case: int) -> None:
    from optkit.recipe.registry import stage_class

    (kind, fields), (source, found) = CASES[case], peaks
    peak = int(found[case])
    predicted = (
        stage_class(kind).model_validate_json(fields).predict(onnx_shape(source), "cpu")[0].ram_bytes - LIBRARY_BYTES  # type: ignore[attr-defined]
    )  # type: ignore[attr-defined]
    assert peak <= predicted <= 2.2 * peak
